"""What a run shows while it goes on: plain lines where nothing can be redrawn, no remnants."""

from __future__ import annotations

import errno
import io
import math
import os
import warnings

import pytest
from rich.console import Console
from rich.text import Text

from keel import cli
from keel.apps.language.config import Language, Sample, decoding
from keel.cli.language import _text
from keel.config import Config
from keel.errors import EstimatorWarning
from keel.tracking.health import find_breaches
from keel.tracking.live import Display, OutputError, plain_line, print_health
from keel.tracking.progress import PipedConsole, ResizableLive

METRICS = {"rollout/return_mean": 12.0, "train/kl_step": 0.01, "train/max_kl": 0.05}


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=24)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_terminals_that_cannot_redraw_get_plain_lines(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, value)
    console = terminal()
    with Display(Config(), "keel train", console, quiet=False) as display:
        assert not display.live.is_started
        display.update(512, METRICS, done=False)
    assert "512/100,000  return 12.0" in text_of(console)
    assert "\x1b[" not in text_of(console)


def test_a_real_terminal_gets_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console = terminal()
    with Display(Config(), "keel train CartPole-v1", console, quiet=False) as display:
        assert display.live.is_started
        display.update(512, METRICS, done=False)
    assert "exact KL" in text_of(console)


def test_rows_that_a_narrower_terminal_wraps_are_erased() -> None:
    console = terminal(width=80)
    lines = "\n".join(["x" * 70, "y" * 70, "short"])
    with ResizableLive(lines, console=console, auto_refresh=False) as live:
        live.refresh()
        before = len(text_of(console))
        console.width = 30  # the terminal shows the two long lines on three rows each
        live.refresh()
        assert text_of(console)[before:].startswith("\r\x1b[4A\x1b[J")
        before = len(text_of(console))
        console.width = 100
        live.refresh()
        assert "\x1b[J" not in text_of(console)[before:]


def test_what_nobody_reads_stops_a_run_with_one_line() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    for stream, reason in (
        (Full(), "No space left on device"),
        (Closed(), "its reader has closed it"),
    ):
        display = Display(Config(), "x", PipedConsole(file=stream), quiet=False)
        with display, pytest.raises(OutputError, match=f"{reason}.*keel resume"):
            display.update(512, METRICS, done=False)


def test_explained_variance_is_shown_only_where_there_is_a_critic() -> None:
    assert "ev " not in plain_line(64, 640, METRICS)
    assert "ev 0.50" in plain_line(64, 640, {**METRICS, "train/explained_variance": 0.5})
    console = terminal()
    display = Display(Config(), "x", console, quiet=False)
    console.print(display._panel(64, METRICS))
    assert "explained" not in text_of(console)


SICK = {**METRICS, "train/clip_fraction": 0.61, "train/kl_exact": 0.2, "train/ratio_outside": 0.9}


def test_breaches_are_shown_live_in_two_lines_at_most() -> None:
    console = terminal(width=100)
    display = Display(Config(), "x", console, quiet=True)
    for steps in (512, 1024, 1536):
        display.update(steps, SICK, done=False)
        watched = [x.plain for x in display._panel(steps, SICK).renderables if isinstance(x, Text)]
        assert len(watched) == (3 if steps == 1536 else 1)  # the title is there in any case
    assert watched[1:] == [
        "watch: train/kl_exact 0.2 above 0.05 since step 512 (Keel)",
        "watch: train/clip_fraction 0.61 above 0.3 since step 512 (rule of thumb), and 1 more",
    ]


def test_a_log_says_once_what_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.tracking.live.PLAIN_SECONDS", 0.0)
    console = PipedConsole(file=io.StringIO(), width=200)
    with Display(Config(), "x", console, quiet=False) as display:
        for steps in range(512, 512 * 7, 512):
            loud = {**METRICS, "train/clip_fraction": 0.61}
            display.update(steps, loud, done=steps == 512 * 6)
    lines = text_of(console).splitlines()
    assert [line for line in lines if line.startswith("watch")] == [
        "watch: train/clip_fraction 0.61 above 0.3 since step 512 (rule of thumb)"
    ]
    assert lines[3].startswith("watch")  # after the line of the third update
    assert len(lines) == 7


def test_a_quiet_run_is_watched_without_a_word() -> None:
    console = PipedConsole(file=io.StringIO())
    with Display(Config(), "x", console, quiet=True) as display:
        for steps in (512, 1024, 1536):
            display.update(steps, SICK, done=False)
    assert text_of(console) == ""
    assert len(display.health.summary()) == 3


def test_a_run_ends_with_what_was_outside_and_what_it_means() -> None:
    loud = {"train/clip_fraction": 0.61, "train/loss": math.nan}
    console = PipedConsole(file=io.StringIO(), width=40)  # longer lines are not wrapped
    print_health(console, find_breaches((512 * n, loud) for n in (1, 2, 3)))
    first, second, third, *more = text_of(console).splitlines()
    assert first == "watch: train/loss is not finite since step 512, 3 of the last 3 updates"
    assert second == (
        "watch: train/clip_fraction 0.61 above 0.3 since step 512 (rule of thumb), "
        "3 of the last 3 updates"
    )
    assert third.startswith("  0.1–0.3, best about 0.2. Less than 0.1")
    assert more == []
    print_health(console, [])
    assert text_of(console).endswith("health: nothing to watch\n")


def test_a_warning_of_keel_is_one_line_and_shown_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: object) -> int:
        for category in (UserWarning, EstimatorWarning, EstimatorWarning):
            text = warnings.formatwarning("biased", category, "place.py", 3, "")
            print(text, end="")
        return 0

    monkeypatch.setattr("keel.cli.explain.run", run)
    for _ in range(2):  # the next command says it again
        assert cli.main(["explain"]) == 0
        first, *own = capsys.readouterr().out.splitlines()
        assert first.startswith("place.py:3: UserWarning: biased")
        assert own[-1:] == ["keel: warning: biased"]
        assert "\n".join(own).count("keel: warning") == 1


def test_how_completions_are_drawn_is_said() -> None:
    config = Language(sample=Sample(temperature=0.7, top_k=20, top_p=0.9))
    assert decoding(config) == "sampled at temperature 0.7, top-k 20, top-p 0.9"
    assert decoding(config, greedy=True) == "greedy"
    told = {
        "env": "language sort", "checkpoint": 64, "episodes": 4.0, "decoding": "greedy",
        "success": 0.5, "return_mean": 0.5, "length_mean": 3.0, "completions": [],
        "scores": [],
    }  # fmt: skip
    assert "4 held-out prompts, greedy\nsolved  50.0% (95 %: 15.0% to 85.0%)" in _text(told)


def test_plain_lines_tell_the_doctors_verdict_when_it_changes() -> None:
    verdicts = iter(["", "healthy: yes", "healthy: yes", "sick: of it", "sick: of it"])
    console = Console(file=io.StringIO(), width=80)
    with Display(Config(), "keel train", console, False, lambda *_: next(verdicts)) as display:
        for step in range(5):
            display.update(step, METRICS, done=step == 4)
    lines = [line for line in text_of(console).splitlines() if line.startswith("doctor: ")]
    assert lines == ["doctor: healthy: yes", "doctor: sick: of it"]


def test_a_live_display_has_one_line_of_the_doctors_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    console = terminal()
    with Display(Config(), "t", console, False, lambda *_: "sick: \x1b[2J of it") as display:
        display.update(512, METRICS, done=False)
        shown = Console(file=io.StringIO(), width=80)
        shown.print(display._panel(512, METRICS))
    assert text_of(shown).count("doctor: sick: ") == 1
