"""Which network an observation gets, and what it does to pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Network
from keel.envs.spaces import observation_layout
from keel.errors import InputError
from keel.models.build import build_agent

ACTION = spaces.Discrete(3)


def test_bytes_are_scaled_and_floats_are_not() -> None:
    """The same picture as bytes and as numbers from 0 to 1 gives the same logits."""
    bytes_ = spaces.Box(0, 255, (3, 84, 84), np.uint8)
    floats = spaces.Box(0.0, 1.0, (3, 84, 84), np.float32)
    picture = torch.randint(0, 256, (2, 3, 84, 84), generator=torch.Generator().manual_seed(0))
    one, other = (build_agent(space, ACTION, Network(), seed=0) for space in (bytes_, floats))
    seen = one.policy(one.initial, {"obs": picture.to(torch.uint8)})["logits"]
    same = other.policy(other.initial, {"obs": picture / 255.0})["logits"]
    torch.testing.assert_close(seen, same, rtol=1e-4, atol=1e-6)
    assert seen.abs().max() > 1e-3


def test_pictures_with_channels_last_are_turned() -> None:
    layout = observation_layout(spaces.Box(0, 255, (96, 90, 3), np.uint8))
    assert layout.space.shape == (3, 96, 90)
    raw = np.random.default_rng(0).integers(0, 256, (2, 96, 90, 3)).astype(np.uint8)
    seen = layout.read(raw, (2,))["obs"]
    assert (seen[1, 2] == raw[1, :, :, 2]).all()
    room = {"obs": np.zeros((2, 3, 96, 90), np.uint8)}
    layout.store(room, 1, raw[1])
    assert (room["obs"][1] == seen[1]).all()
    kept = observation_layout(spaces.Box(0, 255, (4, 84, 84), np.uint8))
    assert kept.space.shape == (4, 84, 84)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 10, 10), np.uint8),
        spaces.Dict(image=spaces.Box(0, 255, (4, 84, 84), np.uint8), speed=spaces.Box(0, 1, (2,))),
    ],
)
def test_what_the_cnn_cannot_take_is_told_with_the_way_out(space: spaces.Space[object]) -> None:
    with pytest.raises(InputError, match=r"network\.kind mlp"):
        build_agent(space, ACTION, Network(), seed=0)
    assert build_agent(space, ACTION, Network(kind="mlp"), seed=0).groups == 1
