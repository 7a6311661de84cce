"""How commands are found in a page, and what its comments make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import Step, steps
from .session import Plan, Session, plan

PAGE = """
<!-- commands
RUN          | runs/first
keel land    | --maps 1
keel land big | slow --maps 2
keel bench   | parsed: needs a peer
curl         | not run: needs a server
             | keel runs
-->

Ask `keel explain kl 0.8,0.2
0.7,0.3`, or read about `keel land`; `keel.functional` is no command.

```
keel land RUN       # a remark
keel land big RUNS
keel bench ppo
curl RUN
```

```console
$ keel runs --json
[]
```

```text
a formula, and
keel explain clip
```
"""


def by_text(text: str) -> dict[str, Step]:
    return {step.text: step for step in steps(text)}


def test_commands_of_blocks_and_text_are_found_in_their_order() -> None:
    assert [(step.kind, step.text) for step in steps(PAGE)] == [
        ("command", "keel runs"),
        ("command", "keel explain kl 0.8,0.2 0.7,0.3"),
        ("name", "land"),
        ("command", "keel land RUN       # a remark"),
        ("command", "keel land big RUNS"),
        ("command", "keel bench ppo"),
        ("command", "curl RUN"),
        ("command", "keel runs --json"),
        ("command", "keel explain clip"),
    ]


@pytest.mark.parametrize(
    ("text", "planned"),
    [
        ("keel land RUN       # a remark", Plan("run", "keel land runs/first --maps 1")),
        ("keel land big RUNS", Plan("slow", "keel land big RUNS --maps 2")),
        ("keel bench ppo", Plan("parsed", "keel bench ppo")),
        ("curl RUN", Plan("not run", "curl runs/first")),
        ("keel runs --json", Plan("run", "keel runs --json")),
    ],
)
def test_the_longest_prefix_says_how_a_command_is_run(text: str, planned: Plan) -> None:
    assert plan(by_text(PAGE)[text]) == planned


def test_a_rule_holds_from_its_comment_on() -> None:
    before, after = steps("`keel x y`\n\n<!-- commands\nkeel x | slow\n-->\n\n`keel x y`\n")
    assert (plan(before).how, plan(after).how) == ("run", "slow")


def test_a_rule_without_a_bar_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"needs a `\|`: keel land"):
        list(steps("<!-- commands\nkeel land\n-->\n"))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```\nkeel explain nothing\n```", "line 2: `keel explain nothing` ended with status 2"),
        ("```\nkeel explain kl 0.8,0.2 --names a\n```", "ended with status 2"),
        ("```\nrm -r runs\n```", "line 2: neither run nor marked `not run`: rm -r runs"),
        ("```\nmake nothing-of-the-kind\n```", "line 2: make nothing-of-the-kind"),
        ("`keel trian`", "line 1: no such command: trian"),
        ("`python -m benchmarks.land watch`", "line 1: .*status 2"),
        ("`keel route --backend x`", "line 1: .*status 2"),
        ("```yaml\na: 1\n```", "line 1: a YAML block that nothing reads"),
        ("{{ keel explain kl 0.8,0.2 0.7,0.3 | kl_mats | .4f }}", "kl_mats"),
    ],
)
def test_what_fails_as_shown_is_told(
    page: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(tmp_path, monkeypatch, capsys)
    (step,) = steps(page)
    with pytest.raises((AssertionError, KeyError), match=message):
        session.run(step, slow=False)


def test_an_example_in_python_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(tmp_path, monkeypatch, capsys)
    with pytest.raises(ZeroDivisionError):
        session.run(next(steps("```python\n1 / 0\n```\n")), slow=False)
