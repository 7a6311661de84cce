"""Random damage to every file of a run, then every command: no traceback, nothing silent.

A command on a damaged run may refuse in one line (status 2), may say what it leaves out, or gives
exactly what it gives on the undamaged run. `KEEL_CORRUPTIONS` sets how many there are (default
500), `KEEL_SEED` which.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_commands import Commands

from keel.training.checkpoint import load

CORRUPTIONS = int(os.environ.get("KEEL_CORRUPTIONS", "500"))
SEED = int(os.environ.get("KEEL_SEED", "0"))
SMALL = ["--envs.num", "2", "--checkpoints.every", "1", "--evaluation.episodes", "2"]
LANGUAGE = [
    *("language", "--task", "lookup", "--task-options", "letters=1,facts=4", "--threads", "1"),
    *("--model.hidden", "16", "--model.layers", "1", "--model.heads", "2", "--no-control"),
    *("--sample.prompts", "2", "--sample.group", "4", "--region.minibatch", "4"),
    *("--warmup.examples", "8", "--warmup.epochs", "1", "--evaluation.prompts", "4"),
    *("--checkpoints.every", "1", "--total-steps", "24"),
]
RUNS: dict[str, list[str]] = {
    "ppo": ["CartPole-v1", *SMALL, "--rollout-steps", "32", "--region.minibatch", "32"],
    "trpo": ["Pendulum-v1", "--algo", "trpo", *SMALL, "--rollout-steps", "128"],
    "land": ["land", *SMALL, "--rollout-steps", "48", "--region.minibatch", "48"],
    "language": LANGUAGE,
}
STEPS = {"ppo": 192, "trpo": 768, "land": 288, "language": 24}
LONGER = {"ppo": 256, "trpo": 1024, "land": 384, "language": 32}
VOLATILE = re.compile(r"seconds|created|saved|^runs?$|path|onnx|csv|steps_per_second|fps|time/")


def flip(data: bytes, draw: random.Random) -> bytes:
    """Flip one bit."""
    changed = bytearray(data or b"\0")
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def change_digit(data: bytes, draw: random.Random) -> bytes:
    """Change one digit, which leaves most texts well-formed."""
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return flip(data, draw)
    changed = bytearray(data)
    place = draw.choice(places)
    changed[place] = 48 + (changed[place] - 48 + draw.randrange(1, 10)) % 10
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    """Truncate."""
    return data[: draw.randrange(len(data) + 1)]


def insert(data: bytes, draw: random.Random) -> bytes:
    """Insert bytes that are no UTF-8, or a control sequence."""
    place = draw.randrange(len(data) + 1)
    junk = draw.choice(
        [b"\xff\xfe\x00", b"\x1b[2J\x1b]0;owned\x07", b"\n\n: [{", b"NaN", b"\x00" * 9]
    )
    return data[:place] + junk + data[place:]


def drop_line(data: bytes, draw: random.Random) -> bytes:
    """Remove one line."""
    lines = data.splitlines(keepends=True)
    if lines:
        del lines[draw.randrange(len(lines))]
    return b"".join(lines)


EDITS: list[Callable[[bytes, random.Random], bytes]] = [flip, change_digit, cut, insert, drop_line]


def damage(run: Path, draw: random.Random) -> str:
    """Damage one file of a run; return what was done."""
    files = sorted(p for p in run.rglob("*") if p.is_file() and p.suffix not in (".png", ".html"))
    path = draw.choice(files)
    name = str(path.relative_to(run))
    action = draw.choice(["edit"] * 7 + ["delete", "folder", "swap"])
    if action == "edit":
        edit = draw.choice(EDITS)
        before = path.read_bytes()
        path.write_bytes(edit(before, draw))
        return f"{edit.__name__} {name}"
    path.unlink()
    if action == "folder":
        path.mkdir()
    elif action == "swap":
        other = draw.choice([p for p in files if p != path])
        shutil.copyfile(other, path)
        return f"put {other.relative_to(run)} in the place of {name}"
    return f"{action} {name}"


def command(kind: str, run: Path, out: Path, draw: random.Random) -> list[str]:
    """Return one of the commands that read a run."""
    into = ["--runs", str(out), "--name", "again"]
    common = [
        ["resume", str(run), "--total-steps", str(LONGER[kind]), "--json"],
        ["evaluate", str(run), "--episodes", "2", "--json"],
        ["runs", "list", "--runs", str(run.parent.parent), "--json"],
        ["runs", "export", str(run), "--csv", str(out / "metrics.csv"), "--json"],
        ["compare", str(run), str(run.parents[3] / "clean" / kind), "--json"],
        ["train", "--config", str(run / "config.yaml"), "--json", *into],
    ]
    more = {
        "ppo": [["export", str(run), "--onnx", str(out / "p.onnx"), "--json"]],
        "trpo": [["demos", "record", "Pendulum-v1", "--policy", str(run), "--episodes", "1"]],
        "land": [["land", str(run), "--maps", "1", "--baselines", "wait", "--json"]],
        "language": [],
    }[kind]
    if more and more[0][0] == "demos":
        more[0] += ["--out", str(out / "demos")]
    return draw.choice(common + more)


def result_of(text: str, run: Path, argv: list[str], out: Path) -> object:
    """Return what a command came to: its JSON without times and paths, and what it wrote."""
    answer: object = None
    for line in text.splitlines():
        if line.startswith(("{", "[")):
            try:
                answer = json.loads(line)
            except ValueError:
                continue
    trained = {"resume": run, "train": out / "again" / "seed-0"}.get(argv[0])
    files = sorted(p for p in out.rglob("*.csv"))
    return (
        json.dumps(_stable(answer), sort_keys=True),
        _weights(trained) if trained is not None else None,
        [hashlib.sha256(p.read_bytes()).hexdigest() for p in files],
    )


def _stable(value: object) -> object:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if not VOLATILE.search(str(k))}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def _weights(run: Path) -> str | None:
    try:
        return hashlib.sha256((load(run).path / "state.safetensors").read_bytes()).hexdigest()
    except Exception:
        return None


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    served = Commands(tmp_path_factory.mktemp("corruptions"))
    for kind, argv in RUNS.items():
        into = ["--runs", str(served.folder / "clean"), "--name", kind, "--quiet"]
        steps = ["--total-steps", str(STEPS[kind])]
        status, _, text = served.run(["train", *argv, *steps, *into])
        assert status == 0, text
    yield served
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_damage_is_never_silent(commands: Commands, kind: str) -> None:
    draw = random.Random(f"{kind} {SEED}")
    clean = commands.folder / "clean" / kind
    expected: dict[str, object] = {}
    wrong: list[str] = []
    for number in range(-(-CORRUPTIONS // len(RUNS))):
        place = commands.folder / f"{kind}-{number}"
        run, out = place / "runs" / kind / "seed-0", place / "out"
        shutil.copytree(clean, run.parent)
        out.mkdir()
        argv = command(kind, run, out, draw)
        key = argv[0] + " " + argv[1] if argv[0] == "runs" else argv[0]
        if key not in expected:
            status, _, text = commands.run(argv)
            assert status == 0, f"{argv}: {text}"
            expected[key] = result_of(text, run, argv, out)
            shutil.rmtree(place)
            shutil.copytree(clean, run.parent)
            out.mkdir()
        what = damage(run, draw)
        status, _, text = commands.run(argv)
        problem = judge(status, text, result_of(text, run, argv, out) == expected[key])
        if problem:
            wrong.append(f"{what}: keel {' '.join(argv)}: {problem}\n{text[-2000:]}")
        shutil.rmtree(place)
    assert not wrong, f"{len(wrong)} of {number + 1}:\n" + "\n\n".join(wrong)


def judge(status: int, text: str, same: bool) -> str | None:
    """Return what is wrong with an outcome, if anything is."""
    if "Traceback (most recent call last)" in text:
        return "a traceback"
    if status not in (0, 2):
        return f"status {status}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text.replace("\r", "")):
        return "control characters on the terminal"
    if status == 2 and len(text.strip().splitlines()) > 12:
        return "more than a short message"
    notice = re.search(
        r"warning|damaged|edited|ignored|dropped|missing|unreadable|cannot be read|no such file"
        r"|no metrics",
        text,
        re.I,
    )
    if status == 0 and not same and notice is None:
        return "another result, and not a word"
    return None


def test_what_this_campaign_calls_silent() -> None:
    """The judge itself can fail: another result without a word is silent."""
    assert judge(0, "{}", same=False) == "another result, and not a word"
    assert judge(0, "RunWarning: run.json was edited", same=False) is None
    assert judge(2, "keel: no such run", same=False) is None
    assert judge(0, '{"problem": "metrics.jsonl: no such file"}', same=False) is None
    assert judge(1, "", same=True) == "status 1"
    assert judge(2, "Traceback (most recent call last):", same=True) == "a traceback"
    assert judge(0, "\x1b[2J", same=True) == "control characters on the terminal"
