"""The command line under bad input: one line on the standard error, a status, never a traceback."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import keel.cli
from keel.cli import main
from keel.cli.arguments import one_line


def fail(capsys: pytest.CaptureFixture[str], *args: str, status: int = 2) -> str:
    """Run a command that must fail; return its one line."""
    assert main(list(args)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("keel: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def broken_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `keel explain` raise an error."""

    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("keel.cli.explain.run", run)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("explain", "clip", "--ratoi", "2"), "options: --ratoi, 2; did you mean --ratio?"),
        (("explain", "clip", "--ratio", "x"), "could not convert string to float: 'x'"),
        (("explain", "clip", "--ratio"), "missing value for argument '--ratio'"),
        (("explain", "advantage", "--end", "now"), "invalid choice 'now' for argument '--end'"),
        (("evaluate",), "keel: evaluate: missing: RUN The folder of the run"),
        (("export", "x", "--onx", "y"), "keel: export: "),
        (("resume", "--total-stpes", "1"), "keel: resume: "),
        (("route", "--bakends", "http://x"), "keel: route: unrecognized options: --bakends"),
        (("demos", "record", "--policy", "x"), "keel: demos record: missing"),
        (("train", "CartPole-v1", "--sede", "1"), "keel: train: unrecognized options: --sede"),
        (("runs", "--josn"), "did you mean --json?"),
        (("compare", "a", "--bye", "x"), "did you mean --by?"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fail(capsys, *args)
    assert message in line
    assert line.count("keel") == 1


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc")
@pytest.mark.parametrize(
    "args",
    [
        ("explain", "kl", "--plot", "/proc/kl.png"),
        ("train", "CartPole-v1", "--runs", "/proc/runs"),
        ("train", "CartPole-v1", "--runs", "/dev/null"),
    ],
)
def test_a_folder_that_takes_no_files_is_one_line(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Files cannot be made in /proc, whoever asks: the tests may run as root."""
    assert args[-1] in fail(capsys, *args)


def test_a_folder_without_permission_is_found_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = fail(capsys, "explain", "kl", "--plot", str(tmp_path / "kl.png"))
    assert "--plot: no permission to write into" in line


def test_several_wrong_options_are_each_given_a_suggestion() -> None:
    box = (
        "╭─ Unrecognized options ─────────╮\n"
        "│ Unrecognized options: --ab, 1, │\n"
        "│ --cd                           │\n"
        "│ ────────────────────────────── │\n"
        "│ Arguments similar to --ab:     │\n"
        "│     --abc INT                  │\n"
        "│         Help (default: 1)      │\n"
        "│ ────────────────────────────── │\n"
        "│ Arguments similar to --cd:     │\n"
        "│     --cde, --no-cde            │\n"
        "│ ────────────────────────────── │\n"
        "│ For full helptext, run x       │\n"
        "╰────────────────────────────────╯\n"
    )
    assert one_line(box) == ("unrecognized options: --ab, 1, --cd; did you mean --abc or --cde?")


def test_an_unexpected_error_is_one_line_that_asks_for_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEEL_DEBUG", raising=False)
    broken_command(monkeypatch, ZeroDivisionError("division\nby zero"))
    line = fail(capsys, "explain", status=1)
    assert "unexpected ZeroDivisionError: division by zero" in line
    assert "please report it" in line
    assert "KEEL_DEBUG=1 or --traceback" in line


@pytest.mark.parametrize("how", ["variable", "flag"])
def test_the_traceback_is_shown_on_request(
    how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_DEBUG", "1" if how == "variable" else "0")
    broken_command(monkeypatch, ZeroDivisionError("oh"))
    assert main(["explain", *(["--traceback"] if how == "flag" else [])]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "in run\n" in err
    assert err.splitlines()[-1].startswith("keel: unexpected ZeroDivisionError")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied"),
        (OSError(errno.EXDEV, "Cross-device link", "a", None, "b"), "a → b: Cross-device link"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written: No space left"),
        (MemoryError(), "out of memory"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_one_line(
    error: BaseException,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_command(monkeypatch, error)
    assert message in fail(capsys, "explain")


class FullStream(io.TextIOWrapper):
    """A standard output on a full disk."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "no descriptor")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["explain", "clip"], ["runs", "-h"]])
def test_a_full_standard_output_is_one_line(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullStream())
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err == (
        "keel: the standard output, or a file, cannot be written: No space left on device\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_real_full_device_leaves_no_complaint_at_exit() -> None:
    command = [sys.executable, "-c", "import sys; from keel.cli import main; sys.exit(main())"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_a_narrow_encoding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["--help"]) == 0
    assert b"usage: keel COMMAND ?" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_closed_standard_error_is_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullStream())
    assert keel.cli.main(["explian"]) == 2


def test_a_run_whose_output_nobody_reads_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", FullStream())
    monkeypatch.setattr("keel.cli.train._announce", lambda *_: None)
    assert main(["train", "CartPole-v1", "--runs", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "training stops here" in err


@pytest.mark.parametrize(
    "args", [["CartPole-v1"], ["language", "--task", "lookup", "--model.hidden", "16"]]
)
def test_a_run_that_cannot_be_announced_is_not_made(
    args: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A reader that is gone, or a full disk, is noticed before the run begins."""
    monkeypatch.setattr(sys, "stdout", FullStream())
    runs = tmp_path / "some" / "runs"
    assert main(["train", *args, "--runs", str(runs)]) == 2
    err = capsys.readouterr().err
    assert err == (
        "keel: the standard output cannot be written (No space left on device): nothing was "
        "trained, and no run was made\n"
    )
    assert list(tmp_path.iterdir()) == []
