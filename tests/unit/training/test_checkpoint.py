"""Checkpoints: what is saved comes back, and what must stay is never pruned."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from keel.errors import InputError
from keel.training import checkpoint
from keel.training.checkpoint import CheckpointError, load, mark_best, save

WEIGHTS = {"actor.weight": torch.arange(6.0).reshape(2, 3), "actor.bias": torch.tensor([0.1, -0.0])}
STATE = {
    "adam.step": torch.tensor(7),
    "rng": torch.arange(5, dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "moments": torch.tensor([1 / 3, math.nan], dtype=torch.float64),
}
DATA = {
    "best": -math.inf,
    "last": [math.nan, math.inf, 0.1 + 0.2],
    "rng": {"state": 2**127 + 1, "name": "PCG64", "on": True, "none": None},
}


def put(run, step, **more):
    return save(run, step, STATE, WEIGHTS, {"step": step}, **more)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def steps(run):
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.is_dir())


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    place = save(tmp_path, 12288, STATE, WEIGHTS, DATA)
    assert place == tmp_path / "checkpoints" / "00012288"
    assert sorted(p.name for p in place.iterdir()) == [
        "manifest.json", "state.json", "state.safetensors", "weights.safetensors",
    ]  # fmt: skip
    for source in (tmp_path, tmp_path / "checkpoints", place):
        found = load(source)
        assert found.step == 12288
        assert found.skipped == ()
        for got, expected in ((found.weights, WEIGHTS), (found.tensors, STATE)):
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert got[name].dtype == tensor.dtype
                assert got[name].shape == tensor.shape
                assert torch.equal(bits(got[name]), bits(tensor))
        assert repr(found.data) == repr(DATA)


def test_loaded_tensors_can_be_trained_on(tmp_path):
    save(tmp_path, 1, {}, WEIGHTS, {})
    load(tmp_path).weights["actor.bias"].add_(1.0)
    assert load(tmp_path).weights["actor.bias"].tolist() == WEIGHTS["actor.bias"].tolist()


def test_views_and_shared_storage_are_saved_as_what_they_are(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    leaf = base.clone().requires_grad_()
    tensors = {"a": base, "b": base, "t": base.T, "row": base[1], "leaf": leaf}
    save(tmp_path, 1, tensors, {}, {})
    for name, tensor in load(tmp_path).tensors.items():
        assert torch.equal(tensor, tensors[name])


def test_files_of_two_saves_are_equal(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, two = put(tmp_path / "a", 1), put(tmp_path / "b", 1)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()


def test_the_newest_keep_remain_and_best_last_and_protected_ones(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2)
    mark_best(tmp_path, 1, score=3.5)
    for step in (3, 4, 5, 6):
        put(tmp_path, step, keep=2, protect={"00000003"})
    assert steps(tmp_path) == [1, 3, 5, 6]
    assert load(tmp_path, "best").step == 1
    assert load(tmp_path, "last").step == 6
    assert load(tmp_path, 3).step == 3
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["score"] == 3.5


def test_keep_one_keeps_the_one_just_saved(tmp_path):
    for step in (1, 2, 3):
        put(tmp_path, step, keep=1)
    assert steps(tmp_path) == [3]


def test_after_going_back_the_abandoned_future_is_not_the_last(tmp_path):
    for step in (10, 20, 30):
        put(tmp_path, step)
    put(tmp_path, 15)  # resumed from 10
    assert load(tmp_path).step == 15
    put(tmp_path, 18, keep=3)
    assert steps(tmp_path) == [10, 15, 18]


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 5, {}, {}, {"try": 1})
    save(tmp_path, 5, {}, {}, {"try": 2})
    assert load(tmp_path).data == {"try": 2}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_steps_of_more_than_eight_digits_sort_as_numbers(tmp_path):
    put(tmp_path, 99_999_999)
    put(tmp_path, 100_000_000)
    (tmp_path / "checkpoints" / "last.json").unlink()
    assert load(tmp_path).step == 100_000_000


def test_only_a_saved_checkpoint_can_be_the_best(tmp_path):
    put(tmp_path, 1)
    with pytest.raises(CheckpointError, match="00000002: no such checkpoint"):
        mark_best(tmp_path, 2, 1.0)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"a": {"b": torch.zeros(1)}}, r"data\.a\.b: Tensor"),
        ({"a": [0, {1: 2}]}, r"data\.a\[1\]: the key 1"),
        ({"__float__": 1}, "__float__"),
    ],
)
def test_data_that_would_not_come_back_is_refused_before_anything_is_written(tmp_path, data, where):
    with pytest.raises(InputError, match=where):
        save(tmp_path, 1, {}, {}, data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "keep"), [(-1, None), (1, 0)])
def test_impossible_arguments_are_errors(tmp_path, step, keep):
    with pytest.raises(InputError, match="expected step ≥ 0 and keep ≥ 1"):
        save(tmp_path, step, {}, {}, {}, keep=keep)


def test_a_file_that_is_not_ours_survives_sweeping(tmp_path):
    put(tmp_path, 1)
    root = tmp_path / "checkpoints"
    for name in (".gitkeep", ".DS_Store", ".notes.tmp"):
        (root / name).touch()
    (root / ".00000009.tmp").mkdir()
    assert checkpoint.sweep(tmp_path) == [".00000009.tmp"]
    assert (root / ".notes.tmp").exists()


def test_no_module_of_checkpoints_knows_pickle():
    import keel.tracking.integrity

    for module in (checkpoint, keel.tracking.integrity):
        source = Path(module.__file__).read_text()
        assert "import pickle" not in source
        assert "torch.load" not in source.replace("safetensors.torch.load", "")


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """A rename may reach the disk before the bytes it names: fsync files, folder, then parent."""
    put(tmp_path, 1)
    log, fsync, rename = [], os.fsync, Path.rename

    def logged_fsync(descriptor):
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def logged_rename(self, target):
        log.append(f"rename {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    put(tmp_path, 2)
    assert log[:7] == [
        "weights.safetensors", "state.safetensors", "state.json", "manifest.json",
        ".00000002.tmp", "rename 00000002", "checkpoints",
    ]  # fmt: skip
