"""Text from outside on its way to a terminal, and runs that cannot be read among others."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.cli import main
from keel.cli.render import simple_table
from keel.printing import printable
from keel.tracking import list_runs
from keel.tracking.live import print_line
from keel.tracking.progress import PipedConsole

RED = "\x1b[31m"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("plain, 30 %, κ‖λ\n\ttab", "plain, 30 %, κ‖λ\n\ttab"),
        (f"{RED}red", r"\x1b[31mred"),
        ("a\rb\x07\x9bc", r"a\rb\x07\x9bc"),
        ("right\u202eleft", r"right\u202eleft"),
        ("half \udcff", r"half \udcff"),
    ],
)
def test_what_could_steer_a_terminal_is_written_out(text: str, printed: str):
    assert printable(text) == printed


def test_rich_markup_is_text() -> None:
    console = PipedConsole(file=io.StringIO(), width=60)
    print_line(console, "run: runs [old]/swim [/] :dog:")
    console.print(simple_table(["name", "[bold]group"], [("a [red]", "1")]))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[0] == ["run:", "runs", "[old]/swim", "[/]", ":dog:"]
    assert lines[1] == ["name", "[bold]group"]
    assert lines[3] == ["a", "[red]", "1"]


def write_run(root: Path, name: str, **record: Any) -> Path:
    path = root / name / "seed-0"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump({"env": f"{RED}Env"}))
    full = {"name": name, "seed": 0, "status": "finished", "created": "2026", **record}
    (path / "run.json").write_text(json.dumps(full))
    lines = [json.dumps({"step": i, "rollout/return_mean": 1.0 * i}) for i in range(1, 4)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_control_characters_of_a_run_never_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number in (1, 2):
        write_run(tmp_path, f"{RED}evil{number}\n", tag=f"{RED}tag")
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    half = tmp_path / "half\udcff"  # a name that is no UTF-8
    write_run(tmp_path, half.name)
    picture, page = tmp_path / "out.png", tmp_path / "out.html"
    files = ["--png", str(picture), "--html", str(page)]
    assert main(["compare", str(tmp_path), *files]) == 0
    assert picture.is_file()
    assert "\x1b" not in page.read_text(encoding="utf-8").partition("<script")[0]
    assert main(["compare", str(tmp_path), "--baseline", RED]) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert r"\x1b[31mevil1" in captured.out


def test_columns_of_a_log_never_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "log.csv").write_text(f"{RED}a,b\n1,2\n")
    assert main(["compare", str(tmp_path / "log.csv")]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert r"\x1b[31ma" in error


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "deep": lambda path: path.write_text("[" * 5_000),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "list": lambda path: path.write_text("[1]"),
    "date": lambda path: path.write_text("a: 2024-99-99"),
    "pipe": make_pipe,
    "folder": make_folder,
    "gone": lambda path: path.unlink(),
    "link": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("file", ["run.json", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_that_cannot_be_read_hides_no_other(
    tmp_path: Path, file: str, damage: str, as_json: bool, capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path, "good")
    DAMAGES[damage](write_run(tmp_path, "bad") / file)
    assert main(["runs", "--runs", str(tmp_path), *(["--json"] if as_json else [])]) == 0
    captured = capsys.readouterr()
    if not as_json:
        assert captured.out.count("good") == 1
        return
    runs = {run["name"]: run for run in json.loads(captured.out)}
    assert runs["good"]["steps"] == 3
    assert runs["good"]["problem"] is None
    if (file, damage) not in {("metrics.jsonl", "gone"), ("metrics.jsonl", "link")}:
        assert runs["bad"]["problem"]
    if file == "run.json":
        assert runs["bad"]["status"] == "unreadable"


@pytest.mark.parametrize(
    "record",
    [{"seed": 1e400}, {"seed": [1]}, {"tag": float("nan")}, {"tag": {"a": [1]}}, {"created": 7}],
)
def test_a_record_of_the_wrong_types_hides_no_other(
    tmp_path: Path, record: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    write_run(tmp_path, "good")
    write_run(tmp_path, "bad", **record)
    assert main(["runs", "--runs", str(tmp_path), "--json"]) == 0
    assert {run["name"] for run in json.loads(capsys.readouterr().out)} == {"good", "bad"}


@pytest.mark.parametrize(
    "holder",
    [
        '{"pid": "x", "host": "a", "since": "", "started": ""}',
        '{"pid": 1e99, "host": "a", "since": "", "started": ""}',
        "[" * 100_000,
    ],
)
def test_a_lock_of_the_wrong_types_hides_no_other(tmp_path: Path, holder: str):
    write_run(tmp_path, "good")
    (write_run(tmp_path, "bad", status="running") / "lock").write_text(holder)
    assert {run.name: run.status for run in list_runs(tmp_path)} == {
        "good": "finished",
        "bad": "crashed",
    }


def test_a_folder_of_runs_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Root may read everything, so the system is made to refuse."""

    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["runs", "--runs", str(tmp_path)]) == 2
    assert f"{tmp_path}: cannot be read: Permission denied" in capsys.readouterr().err
