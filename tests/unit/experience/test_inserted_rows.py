"""The mask law of targets: rows of weight 0, inserted anywhere, change nothing for the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keel.config import Advantage, Critic, Network
from keel.experience.rollout import Rollout
from keel.experience.targets import compute_targets
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.types import GROUP

T, N, MORE = 9, 3, 4
BOX = spaces.Box(-9.0, 9.0, (2,))
AGENT = build_agent(BOX, spaces.Discrete(2), Network(hidden=(4,)), 0, Critic())


def rollout_of(seed: int) -> Rollout:
    """Episodes that end, that are cut off with a last observation of their own, and that go on."""
    rng = torch.Generator().manual_seed(seed)
    ended = torch.rand(T, N, generator=rng) < 0.15
    cut = (torch.rand(T, N, generator=rng) < 0.15) & ~ended
    index = torch.nonzero(cut.flatten())[:, 0]
    group = torch.randint(0, 2, (T, N), generator=rng)
    return Rollout(
        obs={"obs": torch.randn(T, N, 2, generator=rng), GROUP: group},
        action=torch.zeros(T, N, dtype=torch.int64),
        log_prob=torch.zeros(T, N),
        behavior={"logits": torch.zeros(T, N, 2)},
        reward=torch.randn(T, N, generator=rng),
        terminated=ended,
        truncated=cut,
        weight=torch.ones(T, N),
        last_obs={"obs": torch.randn(N, 2, generator=rng)},
        final_obs={"obs": torch.randn(len(index), 2, generator=rng)},
        final_index=index,
    )


def inserted(rollout: Rollout, place: Tensor, junk: float) -> Rollout:
    """The rollout with its rows at `place` `[T, N]`, and rows of weight 0 between them."""

    def among(x: Tensor, fill: float) -> Tensor:
        wide = torch.full((T + MORE, *x.shape[1:]), fill).to(x.dtype)
        where = place.reshape(*place.shape, *[1] * (x.ndim - 2)).expand_as(x)
        return wide.scatter(0, where, x)

    assert rollout.final_index is not None
    row, env = rollout.final_index // N, rollout.final_index % N
    return replace(
        rollout,
        obs={"obs": among(rollout.obs["obs"], junk), GROUP: among(rollout.obs[GROUP], 1.0)},
        action=among(rollout.action, 1.0),
        log_prob=among(rollout.log_prob, junk),
        behavior={"logits": among(rollout.behavior["logits"], junk)},
        reward=among(rollout.reward, junk),
        terminated=among(rollout.terminated, 0.0),
        truncated=among(rollout.truncated, 0.0),
        weight=among(rollout.weight, 0.0),
        final_index=place[row, env] * N + env,
    )


def learned(
    rollout: Rollout, config: Advantage, agent: Agent = AGENT, known: bool = False
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages and targets of the rows that count, and the statistics."""
    value = agent.value(agent.initial, rollout.obs) if known else None
    found, statistics = compute_targets(agent, agent.initial, rollout, config, value)
    shape = rollout.weight.shape
    return found.advantage.reshape(shape), found.target.reshape(shape), statistics


@given(
    st.sampled_from(["none", "batch", "group", "robust"]),
    st.sampled_from([0.0, 7.0, -1e6, math.nan]),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_rows_of_weight_0_inserted_anywhere_change_no_target(
    scaling: Any, junk: float, known: bool, seed: int
) -> None:
    """In the middle of an episode as well: what is before them is worth what comes after them."""
    config = Advantage(gamma=0.9, lam=0.7, normalize=scaling)
    rollout, rng = rollout_of(seed), torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(T + MORE, generator=rng)[:T].sort().values for _ in range(N)]
    place = torch.stack(chosen, 1)
    advantage, target, statistics = learned(rollout, config, known=known)
    wide = learned(inserted(rollout, place, junk), config, known=known)
    torch.testing.assert_close(wide[0].gather(0, place), advantage, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wide[1].gather(0, place), target, rtol=1e-4, atol=1e-5)
    assert wide[2] == pytest.approx(statistics, rel=1e-3, abs=1e-4)


def test_a_row_before_an_inserted_one_by_hand() -> None:
    """γ = λ = ½, a critic that says 0, rewards 1, (a million), 4, and the episode ends: A₃ = 4 and
    A₁ = 1 + ¼·4, as if the row between them were not there."""
    no = torch.zeros(3, 1, dtype=torch.bool)
    ended = no.clone()
    ended[2] = True
    rollout = Rollout(
        obs={"obs": torch.zeros(3, 1, 2)},
        action=torch.zeros(3, 1, dtype=torch.int64),
        log_prob=torch.zeros(3, 1),
        behavior={"logits": torch.zeros(3, 1, 2)},
        reward=torch.tensor([[1.0], [1e6], [4.0]]),
        terminated=ended,
        truncated=no,
        weight=torch.tensor([[1.0], [0.0], [1.0]]),
        last_obs={"obs": torch.zeros(1, 2)},
    )
    config = Advantage(gamma=0.5, lam=0.5, normalize="none")
    mute = torch.zeros_like(AGENT.initial)
    found, statistics = compute_targets(AGENT, mute, rollout, config)
    assert found.advantage.tolist() == [2.0, 0.0, 4.0]
    assert found.target.tolist() == [2.0, 0.0, 4.0]
    assert statistics["train/advantage_raw_mean"] == 3.0
