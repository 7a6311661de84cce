"""Every command and example that README and documentation show is run, as their comments say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .pages import ROOT, Step, pages, read_page, steps
from .session import Session, plan

PAGES = {str(page.relative_to(ROOT)): list(steps(read_page(page))) for page in pages()}
SHOWN = [name for name, shown in PAGES.items() if shown]


def _is_slow(step: Step) -> bool:
    return step.kind == "command" and plan(step).how == "slow"


SLOW = [name for name in SHOWN if any(map(_is_slow, PAGES[name]))]


@pytest.fixture
def session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Session]:
    session = Session(tmp_path, monkeypatch, capsys)
    yield session
    session.close()


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_page_shows_runs(name: str, session: Session) -> None:
    for step in PAGES[name]:
        session.run(step, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_in_a_page_runs_too(name: str, session: Session) -> None:
    for step in PAGES[name]:
        session.run(step, slow=True)
