"""Progress of long commands: a bar on a terminal, plain lines elsewhere, stdout untouched."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from keel.cli import main
from keel.errors import InputError
from keel.tracking.progress import PLAIN_SECONDS, WorkProgress, is_interactive

TRACE_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


@pytest.fixture(autouse=True)
def _no_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def test_only_a_terminal_that_moves_its_cursor_is_interactive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_interactive(terminal())
    assert not is_interactive(Console(file=io.StringIO()))
    monkeypatch.setenv("CI", "true")
    assert not is_interactive(terminal())
    monkeypatch.setenv("CI", "false")
    assert is_interactive(terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not is_interactive(Console(file=io.StringIO()))
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not is_interactive(terminal())


def test_a_file_gets_plain_lines_at_intervals() -> None:
    now, console = [0.0], Console(file=io.StringIO(), width=40)
    with WorkProgress("keel test", 8, "begin", console, lambda: now[0]) as progress:
        for k in range(8):
            now[0] += PLAIN_SECONDS / 2
            progress.advance(1, f"step [{k}]")
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "keel test: 0%, 0:00, begin",
        "keel test: 25%, 0:05, step [1]",
        "keel test: 50%, 0:10, step [3]",
        "keel test: 75%, 0:15, step [5]",
        "keel test: 100%, 0:20, step [7]",
    ]


def test_a_dumb_terminal_gets_no_control_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    with WorkProgress("keel test", 2, "begin", console) as progress:
        progress.advance(2, "end")
    assert console.file.getvalue() == "keel test: 0%, 0:00, begin\n"  # type: ignore[attr-defined]


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    console = terminal()
    with WorkProgress("keel test", 2, "begin", console) as progress:
        progress.advance(1, "half")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "keel test" in text
    assert "50 %" in text
    assert text.rstrip("\n").endswith("\x1b[2K")  # the line is erased


def test_land_tells_its_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["land", "--variant", "small", "--maps", "1", "--baselines", "wait", "greedy-roi",
             "--json"]  # fmt: skip
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert [x["policy"] for x in json.loads(out)["reports"]] == ["wait", "greedy-roi"]
    assert err.startswith("keel land: 0%, 0:00, wait plays\n")


def write_trace(path: Path, prompt: int) -> Path:
    rows = "".join(f"{i * 0.2},{prompt},{20 + i}\n" for i in range(5))
    path.write_text(TRACE_HEADER + rows)
    return path


def test_headroom_tells_its_progress_and_a_single_trace_is_strict_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.csv", 200)
    assert main(["serving", "headroom", "--trace", str(trace), "--json"]) == 0
    out, err = capsys.readouterr()
    rooms = json.loads(out, parse_constant=pytest.fail)["headroom"]
    assert [(x["low"], x["high"]) for x in rooms] == [(None, None)] * 2
    assert err.startswith("keel serving headroom: 0%, 0:00, kernels are compiled")


def test_a_trace_that_nobody_can_serve_is_one_line_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.csv", 10_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["serving", "headroom", "--trace", str(trace)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("keel: every heuristic has lost all requests of a trace")
    assert "Warning" not in err


def test_windows_of_a_trace_that_nobody_can_serve_are_refused_without_a_warning(
    tmp_path: Path,
) -> None:
    from keel.apps.serving.windows import sustainable_rate

    trace = write_trace(tmp_path / "t.csv", 10_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match="has memory for none of its requests"):
            sustainable_rate(str(trace), "llama-2-7b-a100")
