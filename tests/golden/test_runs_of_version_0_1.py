"""Runs that version 0.1 made are evaluated, resumed and exported as that version did.

`runs-0.1/multidiscrete` was trained by version 0.1 for 256 steps, with two environments, 32 steps a
rollout and normalized observations; the numbers below are what that version gave for it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.cli import main
from keel.config import Network
from keel.envs import ObsNormalizer
from keel.envs.space_data import Interface
from keel.errors import InputError
from keel.networks.build import build_agent
from keel.networks.shared import CNN, NATURE
from keel.tracking import read_metrics
from keel.training.checkpoint import CheckpointError, load, save
from keel.training.policy import open_policy
from keel.types import ENCODING, FIRST_ENCODING

HERE = Path(__file__).parent
RETURNS = [5.0, 5.0, 2.0, 3.0]
"""Returns of four deterministic episodes with seed 0, before and after two more updates."""
RESUMED = {
    "train/loss": 1.1590168476104736,
    "train/value_mean": 0.5152703523635864,
    "train/kl_exact": 3.4696950339683155e-08,
    "rollout/reward_mean": 0.43103447556495667,
}
"""Of the update that ends at step 384."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(HERE))
    shutil.copytree(HERE / "runs-0.1", tmp_path / "runs")
    return tmp_path / "runs" / "multidiscrete"


def evaluated(run: Path, capsys: pytest.CaptureFixture[str], checkpoint: str) -> list[float]:
    words = [str(run), "--episodes", "4", "--checkpoint", checkpoint, "--trust-code", "--json"]
    assert main(["evaluate", *words]) == 0
    returns: list[float] = json.loads(capsys.readouterr().out)["returns"]
    return returns


def test_a_run_with_multidiscrete_observations_is_evaluated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(run, capsys, "256") == RETURNS


def test_it_is_resumed_and_keeps_its_encoding(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), "--total-steps", "384", "--trust-code", "--quiet"]
    assert main(["resume", *words]) == 0
    metrics = read_metrics(run / "seed-0")
    assert metrics.step[-1] == 384
    assert {name: metrics[name][-1] for name in RESUMED} == pytest.approx(RESUMED, rel=1e-3)
    assert load(run / "seed-0").data["interface"]["encoding"] == FIRST_ENCODING
    assert evaluated(run, capsys, "384") == RETURNS
    assert main(["resume", *words[:1], "--total-steps", "512", *words[3:]]) == 0


def test_it_is_exported(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    file = tmp_path / "policy.onnx"
    assert main(["export", str(run), "--onnx", str(file), "--trust-code"]) == 0
    assert file.stat().st_size > 0


def test_spaces_that_are_laid_out_otherwise_by_now_are_refused(run: Path) -> None:
    """Weights may fit by chance where channels of an image were moved."""
    checkpoint = load(run / "seed-0")
    data = {
        **checkpoint.data,
        "spaces": {**checkpoint.data["spaces"], "observation": "Box[7, 7, 3] uint8"},
    }
    save(run / "seed-0", 256, checkpoint.tensors, checkpoint.weights, data)
    with pytest.raises(CheckpointError, match="the spaces do not fit"):
        open_policy(run, trust_code=True)


@pytest.mark.parametrize(
    ("space", "scale"),
    [
        (spaces.Box(0, 255, (3, 40, 40), np.uint8), 1 / 255),
        (spaces.Box(0, 1, (3, 40, 40), np.uint8), 1 / 255),
        (spaces.Box(0.0, 255.0, (3, 40, 40), np.float32), 1.0),
    ],
    ids=["bytes", "bytes up to 1", "floats up to 255"],
)
def test_images_are_scaled_by_their_dtype(space: spaces.Box, scale: float) -> None:
    network = Network(features=4, hidden=(4,))
    agent = build_agent(space, spaces.Discrete(2), network, 0, encoding=FIRST_ENCODING)
    (cnn,) = (part for part in agent.network.modules() if isinstance(part, CNN))
    assert cnn.scale == scale


def test_large_images_have_the_usual_convolutions_and_images_of_floats_are_normalized() -> None:
    space = spaces.Box(0.0, 1.0, (1, 400, 400), np.float32)
    depths = {}
    for encoding in (FIRST_ENCODING, ENCODING):
        network = Network(features=1, hidden=(4,))
        with torch.no_grad():
            agent = build_agent(space, spaces.Discrete(2), network, 0, encoding=encoding)
        (cnn,) = (part for part in agent.network.modules() if isinstance(part, CNN))
        depths[encoding] = len(cnn.convolutions)
    assert depths[FIRST_ENCODING] == len(NATURE) < depths[ENCODING]
    assert "obs" in ObsNormalizer.for_space(space, encoding=FIRST_ENCODING).moments
    assert "obs" not in ObsNormalizer.for_space(space).moments


def test_an_encoding_of_the_future_is_refused(run: Path) -> None:
    policy = open_policy(run, trust_code=True)
    interface = Interface(policy.observation_space, policy.action_space, (), False)
    data = interface.to_data()
    assert Interface.from_data(data).encoding == ENCODING
    with pytest.raises(InputError, match="encoding of observations: expected 1 or 2, got 3"):
        Interface.from_data({**data, "encoding": 3})
