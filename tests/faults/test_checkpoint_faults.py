"""Checkpoints under attack: crashes, full disks, rot, and files made to harm."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from children import run_child

from keel.tracking import files
from keel.tracking.integrity import dump_manifest
from keel.training import checkpoint, migration
from keel.training.checkpoint import (
    CheckpointError,
    CheckpointWarning,
    NewerSchemaError,
    check_same,
    check_shapes,
    load,
    save,
)

FILES = ("weights.safetensors", "state.safetensors", "state.json")
WEIGHTS = {"w": torch.arange(64.0)}
STATE = {"m": torch.arange(64.0), "n": torch.zeros(3, dtype=torch.int64)}


def put(run: Path, step: int) -> Path:
    return save(run, step, STATE, {"w": WEIGHTS["w"] + step}, {"step": step})


def forge(folder: Path, **contents: bytes) -> None:
    """Replace files and seal the folder anew, as somebody who knows the format would."""
    for name, content in contents.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    reseal(folder, {"schema": 1, "keel": "0.1.0", "step": int(folder.name)})


def reseal(folder: Path, header: dict) -> None:
    found = {name: (folder / name).read_bytes() for name in FILES}
    (folder / "manifest.json").write_bytes(dump_manifest(found, header))


def raw_safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


# 1: kill −9 at every write point. One process that forks: torch is imported only once.
KILL = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from keel.training import checkpoint, migration
from keel.training.checkpoint import load, mark_best, save
torch.set_num_threads(1)

def put(run, step, keep=None, note="first"):
    save(run, step, {"m": torch.full((100,), step)}, {"w": torch.ones(9)}, {"note": note}, keep)

os.fsync = lambda _: None  # a killed process loses nothing that it wrote; fsync is for power cuts
root, report = Path(sys.argv[1]), []
template = root / "template"
template.mkdir()
for step in (1, 2, 3):
    put(template, step)
mark_best(template, 1, 0.5)

scenarios = {
    "a new step": (lambda run: put(run, 4, keep=2), {3, 4}),
    "the same step again": (lambda run: put(run, 3, note="again"), {3}),
    "the first step": (lambda run: put(run, 1), None),
    "marking the best": (lambda run: mark_best(run, 2, 0.9), {3}),
}
for title, (act, allowed) in scenarios.items():
    def fresh(name):
        run = root / name
        run.mkdir() if allowed is None else shutil.copytree(template, run)
        return run
    points = []
    checkpoint._crash_point = points.append
    act(fresh(f"{title} dry"))
    checkpoint._crash_point = lambda name: None
    for number, point in enumerate(points):
        run = fresh(f"{title} {number}")
        child = os.fork()
        if child == 0:
            left = iter(range(number + 1))
            def crash(name):
                if next(left) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            checkpoint._crash_point = crash
            act(run)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found, best = None, None
        if allowed is not None:
            found, best = load(run), load(run, "best").step
        before = sorted(p.name for p in (run / "checkpoints").glob(".*"))
        checkpoint.sweep(run)
        after = sorted(p.name for p in (run / "checkpoints").glob(".*"))
        kept = found is None or load(run).step == found.step
        put(run, 9)
        report.append(dict(
            title=title, point=point, signal=os.WTERMSIG(status), left=before, after=after,
            ok=kept and (found is None or (found.step in allowed and not found.skipped
                                           and found.tensors["m"].eq(found.step).all().item())),
            best=best, next=load(run).step,
        ))
        shutil.rmtree(run)
print(json.dumps(report))
"""


def test_kill_at_every_write_point(tmp_path):
    """Fault 1: kill −9 anywhere in a save: the previous or the new one loads, leftovers go."""
    done = run_child([sys.executable, "-W", "error", "-c", KILL, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {r["signal"] for r in report} == {9}
    assert [r for r in report if not r["ok"] or r["after"] or r["next"] != 9] == []
    assert {r["best"] for r in report if r["title"] != "marking the best"} == {1, None}
    points = [r["point"] for r in report if r["title"] == "a new step"]
    for name in (*FILES, "manifest.json", "last.json"):
        assert sum(name in point for point in points) >= 4  # create, two halves, sync
    assert {"publish", "remove 00000002", "empty 00000002"} <= set(points)
    assert any(r["point"] == "step aside" for r in report)
    assert any(r["left"] for r in report)  # there was something to sweep


def no_leftovers(run: Path) -> bool:
    return not list((run / "checkpoints").glob(".*"))


def test_disk_full_before_the_save(tmp_path, monkeypatch):
    """Fault 2: too little space is seen before anything is written, and the bytes are named."""
    put(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 990, 10))
    with pytest.raises(CheckpointError, match=r"needs \d{4} bytes, 10 are free; the previous"):
        put(tmp_path, 2)
    assert no_leftovers(tmp_path)
    assert load(tmp_path).step == 1


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_within_the_save(tmp_path, monkeypatch, number, code):
    """Fault 2: space that runs out in any file: previous intact, temporary removed."""
    put(tmp_path, 1)
    write, calls = files._write_all, iter(range(100))

    def full(descriptor, data):
        if next(calls) == number:
            write(descriptor, data[: len(data) // 3])
            raise OSError(code, os.strerror(code))
        write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_all", full)
        with pytest.raises(CheckpointError, match=r"the checkpoint needs \d+ bytes"):
            put(tmp_path, 2)
    assert no_leftovers(tmp_path)
    assert load(tmp_path).step == 1
    put(tmp_path, 2)
    assert load(tmp_path).step == 2


REAL = """
import sys
from pathlib import Path
import torch
from keel.training import checkpoint, migration
run = Path(sys.argv[1])
checkpoint.save(run, 1, {}, {"w": torch.ones(10)}, {})
real, asked = checkpoint.shutil.disk_usage, []
def blind(path):  # the space was there when it was asked for
    asked.append(path)
    return real(path)._replace(free=10**15) if len(asked) == 1 else real(path)
for usage in (real, blind):
    checkpoint.shutil.disk_usage = usage
    try:
        checkpoint.save(run, 2, {}, {"w": torch.ones(100_000)}, {})
    except checkpoint.CheckpointError as error:
        print(error)
    print([p.name for p in sorted((run / "checkpoints").iterdir())], checkpoint.load(run).step)
"""


def small_disk(path: Path, options: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a small tmpfs at `path`, in a mount namespace of its own."""
    script = f'mount -t tmpfs -o {options} tmpfs {path} && exec "$@"'
    return run_child(["unshare", "-rm", "sh", "-c", script, "sh", *command])


@pytest.fixture(scope="module")
def mountable(tmp_path_factory):
    path = tmp_path_factory.mktemp("mount")
    if shutil.which("unshare") is None or small_disk(path, "size=64k", "true").returncode:
        pytest.skip("no right to mount a small disk")


@pytest.mark.usefixtures("mountable")
def test_a_disk_that_is_really_full(tmp_path):
    """Fault 2: the same on a real file system of 256 KiB, seen before and met while writing."""
    done = small_disk(tmp_path, "size=256k", sys.executable, "-c", REAL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for message in lines[0::2]:
        assert "the disk is full: the checkpoint needs 400" in message
    assert lines[1::2] == ["['00000001', 'last.json'] 1"] * 2


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:middle])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "lengthened":
        path.write_bytes(content + b"\0")
    else:
        flipped = bytes([content[middle] ^ 1])
        path.write_bytes(content[:middle] + flipped + content[middle + 1 :])


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("how", ["deleted", "truncated", "emptied", "lengthened", "flipped"])
def test_a_damaged_newest_falls_back_to_the_older(tmp_path, name, how):
    """Fault 4: the hash detects it, the older one is used and it is said."""
    put(tmp_path, 1)
    damage(put(tmp_path, 2) / name, how)
    with pytest.warns(CheckpointWarning, match="continuing from the older one of step 1"):
        found = load(tmp_path)
    assert found.step == 1
    assert torch.equal(found.weights["w"], WEIGHTS["w"] + 1)
    assert len(found.skipped) == 1
    assert "00000002" in found.skipped[0]


def test_a_flipped_bit_anywhere_in_a_manifest_is_seen(tmp_path):
    """Fault 4: also in the schema number, which must not pass for that of a newer Keel."""
    folder = put(tmp_path, 1)
    path = folder / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        flipped = good[place] ^ 1 << place % 8 if good[place] != ord("1") else ord("3")
        path.write_bytes(good[:place] + bytes([flipped]) + good[place + 1 :])
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        assert caught.type is CheckpointError


@pytest.mark.filterwarnings("error")
def test_all_bad_or_missing_is_an_error(tmp_path):
    """Fault 5: never from scratch, never another one than the one that was named."""
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(tmp_path)
    for step in (1, 2):
        damage(put(tmp_path, step) / "weights.safetensors", "flipped")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used: .*00000002.*00000001"):
        load(tmp_path)
    put(tmp_path, 3)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are: 1, 2, 3"):
        load(tmp_path, 7)
    with pytest.raises(CheckpointError, match="no checkpoint of step best"):
        load(tmp_path, "best")
    with pytest.raises(CheckpointError, match=r"00000002: weights.safetensors is damaged"):
        load(tmp_path, 2)
    with pytest.raises(CheckpointError, match="00000009"):
        load(tmp_path / "checkpoints" / "00000009")


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_renamed_pickle_is_rejected_unexecuted(tmp_path, protocol, wrapped):
    """Fault 6: a malicious pickle with a valid manifest; the canary stays absent."""
    canary = tmp_path / "canary"
    folder = put(tmp_path, 1)
    torch.save(Bomb(canary), tmp_path / "bomb", pickle_protocol=max(protocol, 2))
    bomb = (tmp_path / "bomb").read_bytes() if wrapped else pickle.dumps(Bomb(canary), protocol)
    forge(folder, weights=bomb)
    with pytest.raises(CheckpointError, match="pickles are never loaded"):
        load(tmp_path, 1)
    assert not canary.exists()


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MALFORMED = {
    "a header longer than the file": raw_safetensors({}, length=2**40),
    "a header of many bytes": raw_safetensors(b"{}", length=100_000_001),
    "overlapping offsets": raw_safetensors(
        {"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"x" * 12
    ),
    "a gap": raw_safetensors({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"x" * 20),
    "data beyond the file": raw_safetensors({"a": {**F32, "data_offsets": [8, 16]}}, b"x" * 8),
    "a huge shape": raw_safetensors({"a": {**F32, "shape": [2**40, 2**20]}}, b"x" * 8),
    "a shape whose size overflows to fit": raw_safetensors(
        {"a": {**F32, "shape": [2**32 + 1, 2**32, 2]}}, b"x" * 8
    ),
    "a negative shape": raw_safetensors({"a": {**F32, "shape": [-1, -2]}}, b"x" * 8),
    "an unknown dtype": raw_safetensors({"a": {**F32, "dtype": "OBJECT"}}, b"x" * 8),
    "unclaimed bytes": raw_safetensors({"a": F32}, b"x" * 16),
    "no object": raw_safetensors([1]),
    "deep nesting": raw_safetensors(b"[" * 100_000),
    "no bytes": b"",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_header_is_rejected_before_allocation(tmp_path, monkeypatch, what):
    """Fault 7: with a valid manifest, so that only the header can tell."""
    folder = put(tmp_path, 1)
    forge(folder, state=MALFORMED[what])

    def untouched(_):
        raise AssertionError("the file was parsed")

    monkeypatch.setattr(checkpoint.safetensors.torch, "load", untouched)
    with pytest.raises(CheckpointError, match=r"state\.safetensors is not a sound safetensors"):
        load(folder)


def test_a_dtype_that_torch_has_not_is_an_error(tmp_path):
    folder = put(tmp_path, 1)
    forge(folder, state=raw_safetensors({"a": {**F32, "dtype": "F4", "shape": [16]}}, b"x" * 8))
    with pytest.raises(CheckpointError, match=r"00000001: this torch has no tensors of type .F4"):
        load(folder)


def test_a_file_of_another_size_is_not_read(tmp_path):
    """Fault 7: sizes come before hashes: a sparse terabyte costs nothing."""
    folder = put(tmp_path, 1)
    with (folder / "weights.safetensors").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=f"has {2**40} bytes instead of"):
        load(folder)


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "a\\b", "..", "x/y", ""])
def test_a_manifest_that_points_elsewhere_is_rejected(tmp_path, name):
    """Fault 8: `../`, absolute paths, other separators."""
    folder = put(tmp_path, 1)
    contents = {file: (folder / file).read_bytes() for file in FILES}
    header = {"schema": 1, "keel": "0.1.0", "step": 1}
    (folder / "manifest.json").write_bytes(dump_manifest({**contents, name: b""}, header))
    with pytest.raises(CheckpointError, match="which is no file of this folder"):
        load(folder)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_symlink_is_rejected(tmp_path, name):
    """Fault 8: also one whose target has the right bytes, and a pipe does not block."""
    folder = put(tmp_path, 1)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link"):
        load(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        load(folder)


def test_a_checkpoint_that_is_a_symlink_is_rejected_and_prunable(tmp_path):
    """Fault 8: the folder itself."""
    put(tmp_path, 1)
    put(tmp_path, 3).rename(tmp_path / "moved")
    (tmp_path / "checkpoints" / "00000003").symlink_to(tmp_path / "moved")
    with pytest.warns(CheckpointWarning, match="00000003: it is a symbolic link"):
        assert load(tmp_path).step == 1
    save(tmp_path, 4, {}, {}, {}, keep=1)
    assert (tmp_path / "moved" / "manifest.json").exists()
    assert load(tmp_path).step == 4


def test_a_checkpoint_under_the_name_of_another_is_rejected(tmp_path):
    """Fault 8: a copied folder would resume at a step it was not taken at."""
    shutil.copytree(put(tmp_path, 1), tmp_path / "checkpoints" / "00000005")
    with pytest.raises(CheckpointError, match="does not belong to this folder"):
        load(tmp_path, 5)


def test_a_newer_schema_is_refused(tmp_path):
    """Fault 9: clearly, and without falling back to an older checkpoint."""
    put(tmp_path, 1)
    reseal(put(tmp_path, 2), {"schema": 4, "keel": "9.0", "step": 2})
    with pytest.raises(NewerSchemaError, match=r"written by keel 9.0 in schema 4; .*upgrade Keel"):
        load(tmp_path)


def test_an_older_schema_is_migrated_step_by_step(tmp_path, monkeypatch):
    """Fault 9: each migration sees what the one before it made."""
    put(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "SCHEMA", 5)
    with pytest.raises(CheckpointError, match="schema 3 is too old"):
        load(tmp_path)
    for version in (3, 4):
        monkeypatch.setitem(
            migration.MIGRATIONS,
            version,
            lambda tensors, data, version=version: (
                tensors,
                {**data, "path": [*data.get("path", []), version]},
            ),
        )
    assert load(tmp_path).data == {"step": 1, "path": [3, 4]}
    put(tmp_path, 4)
    assert load(tmp_path).data == {"step": 4}


def test_other_weights_are_an_error_naming_both(tmp_path):
    """Fault 12: shapes, dtypes, missing and unknown names, all in one message."""
    saved = {"a": torch.zeros(4, 2), "b": torch.zeros(3), "old": torch.zeros(1)}
    model = {"a": torch.zeros(8, 2), "b": torch.zeros(3).double(), "new": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        check_shapes("the weights", saved, model)
    assert str(caught.value).splitlines() == [
        "the weights do not fit:",
        "  a: the checkpoint has [4, 2] float32, this run has [8, 2] float32",
        "  b: the checkpoint has [3] float32, this run has [3] float64",
        "  old: the checkpoint has [1] float32, this run has absent",
        "  new: the checkpoint has absent, this run has [1] float32",
    ]
    check_shapes("the weights", saved, dict(saved))


def test_other_spaces_are_an_error_naming_both():
    """Fault 12: before training."""
    saved = {"observation": "Box(4,)", "action": "Discrete(2)"}
    with pytest.raises(CheckpointError, match=r"has Discrete\(2\), this run has Discrete\(3\)"):
        check_same("the spaces", saved, {**saved, "action": "Discrete(3)"})
    check_same("the spaces", saved, dict(saved))


def test_a_vanished_run_is_a_typed_error(tmp_path):
    """Fault 36: a save does not bring a deleted run back as a stump."""
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        put(tmp_path / "gone", 1)
    assert not (tmp_path / "gone").exists()


def test_hashes_are_of_the_files(tmp_path):
    """Fault 4: the manifest can be checked with sha256sum."""
    folder = put(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
