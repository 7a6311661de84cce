"""Which network an observation gets, and what it does to pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Network
from keel.envs.spaces import observation_layout
from keel.errors import InputError
from keel.networks.actor_critic import image_scale, spaces_of
from keel.networks.build import build_agent
from keel.networks.multi_input import JoinedEncoder
from keel.networks.shared import LARGEST_MAP, NATURE, SMALL, convolutions_for, feature_map

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


def test_a_cnn_without_an_image_is_told_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"a CNN needs an image.*network\.kind mlp"):
        build_agent(spaces.Box(0, 1, (4,)), ACTION, Network(kind="cnn"), seed=0)


@pytest.mark.parametrize("kind", ["nature", "small"])
@pytest.mark.parametrize(
    "size", [(7, 7), (7, 300), (19, 8), (20, 20), (30, 50), (84, 84), (480, 640)]
)
def test_convolutions_fit_images_of_any_size(size: tuple[int, int], kind: str) -> None:
    chosen = convolutions_for((3, *size), kind)
    channels, height, width = feature_map((3, *size), chosen)
    assert min(height, width) >= 1
    assert channels * height * width <= LARGEST_MAP
    if size == (84, 84):
        assert chosen == (NATURE if kind == "nature" else SMALL)


def test_numbers_from_zero_are_brought_to_one_and_others_left() -> None:
    def scale(low: float, high: float, dtype: Any = np.float32) -> float:
        return image_scale(spaces.Box(low, high, (3, 9, 9), dtype))

    assert scale(0, 255, np.uint8) == 1.0 / 255.0
    assert scale(0.0, 255.0) == 1.0 / 255.0
    assert scale(0, 10, np.uint8) == 0.1
    assert (
        scale(0.0, 1.0) == scale(-1.0, 1.0) == scale(-np.inf, np.inf) == scale(0.0, np.inf) == 1.0
    )


PARTS = spaces.Dict(
    {
        "board": spaces.Box(0, 4, (1, 2, 2), np.uint8),
        "counts": spaces.MultiDiscrete([2, 3]),
        "image": spaces.Box(0, 255, (3, 9, 8), np.uint8),
        "speed": spaces.Box(-1.0, 1.0, (2,), np.float32),
    }
)


def test_every_part_has_its_encoder_and_they_are_joined() -> None:
    """Boards are scaled, counts one-hot, vectors as they are; images become features."""
    parts = spaces_of(PARTS)
    encoder = JoinedEncoder(parts, torch.Generator().manual_seed(0), features=5)
    obs = {
        "board": torch.tensor([[[[0, 1], [2, 4]]]], dtype=torch.uint8),
        "counts": torch.tensor([[1, 2]]),
        "image": torch.full((1, 3, 9, 8), 255, dtype=torch.uint8),
        "speed": torch.tensor([[0.5, -0.5]]),
    }
    joined = encoder(parts.flatten()(obs))
    assert joined.shape == (1, encoder.size) == (1, 4 + 5 + 5 + 2)
    assert joined[0, :9].tolist() == [0.0, 0.25, 0.5, 1.0, 0, 1, 0, 0, 1]
    assert joined[0, -2:].tolist() == [0.5, -0.5]
    (cnn,) = encoder.images.values()
    assert torch.equal(joined[:, 9:14], cnn(obs["image"]))


def test_the_image_of_a_dict_moves_policy_and_value() -> None:
    agent = build_agent(PARTS, ACTION, Network(features=8, hidden=(8,)), seed=0)
    PARTS.seed(0)
    rows = [PARTS.sample() for _ in range(2)]
    obs = {k: torch.stack([torch.as_tensor(rows[0][k])] * 2) for k in PARTS}
    obs["image"] = torch.stack([torch.as_tensor(row["image"]) for row in rows])
    logits, value = agent.outputs(agent.initial, obs)[:2]
    assert logits is not None
    assert value is not None
    assert (logits[0] != logits[1]).any()
    assert value[0] != value[1]
