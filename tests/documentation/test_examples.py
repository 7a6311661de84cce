"""Every script of `examples/` is short, and runs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from .pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STEPS = {"image_and_vector": "512", "own_language_task": "64", "sweep_and_compare": "512"}
"""Arguments that make a script quick, where 1,024 steps are too many."""
LONGEST = 40


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs_and_prints_what_came_of_it(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), STEPS.get(script.stem, "1024")])
    runpy.run_path(str(script), run_name="__main__")
    assert capfd.readouterr().out
    assert list((tmp_path / "runs").glob("*/seed-*/checkpoints/last.json"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_screen(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_there_is_one_for_every_part_that_can_be_plugged_in() -> None:
    """A surrogate, a network, a controller, an environment, a task; acting, loops, comparisons."""
    assert {path.stem for path in EXAMPLES} >= {
        "own_environment",
        "own_network",
        "image_and_vector",
        "own_surrogate",
        "own_controller",
        "load_and_act",
        "own_loop",
        "two_agents",
        "own_language_task",
        "sweep_and_compare",
    }
