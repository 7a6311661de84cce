"""From environments to targets: a walk that is cut off every five steps."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Advantage, Network
from keel.envs import make_envs
from keel.experience.rollout import Collector
from keel.experience.targets import compute_targets
from keel.networks.build import build_agent

GAMMA, LENGTH = 0.9, 5


class Cut(gymnasium.Env[Any, Any]):
    """Sees its age, earns 1 a step, and is truncated when it is five steps old."""

    observation_space = spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return np.full(1, self.age, np.float32), 1.0, False, self.age == LENGTH, {}


gymnasium.register("keel/Cut-v0", Cut)  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_truncated_row_is_bootstrapped_from_what_it_saw_last(autoreset: Any, known: bool) -> None:
    """With λ = 0 the target of age a is 1 + γ·V(a + 1), at the cut as anywhere else."""
    envs = make_envs("keel/Cut-v0", 3, backend="sync", seed=0, autoreset=autoreset)
    agent = build_agent(envs.observation_space, envs.action_space, Network(), seed=0)
    collector = Collector(envs, agent, 13, envs.reset(0), np.random.default_rng(0))
    collector.begin(collector.obs)
    rollout = collector.collect(agent.initial, 1.0, None)
    envs.close()
    value = agent.value(agent.initial, rollout.obs) if known else None
    learned, _ = compute_targets(
        agent, agent.initial, rollout, Advantage(gamma=GAMMA, lam=0.0), value
    )
    counts = rollout.weight.reshape(-1) > 0
    age = rollout.obs["obs"].reshape(-1)
    assert rollout.truncated.sum() == 6
    assert counts.sum() == (33 if autoreset == "next_step" else 39)
    after = agent.value(agent.initial, {"obs": age[:, None] + 1.0})
    torch.testing.assert_close(learned.target[counts], (1.0 + GAMMA * after)[counts])


def test_pictures_are_stored_with_channels_last_and_nothing_else_changes() -> None:
    pytest.importorskip("ale_py")
    envs = make_envs("Breakout", 2, seed=0)
    agent = build_agent(envs.observation_space, envs.action_space, Network(features=16), seed=0)
    first = envs.reset(0)
    collector = Collector(envs, agent, 3, first, np.random.default_rng(0))
    collector.begin(first)
    rollout = collector.collect(agent.initial, 1.0, None)
    envs.close()
    stored = rollout.obs["obs"]
    assert (stored[0].numpy() == first["obs"]).all()
    assert stored.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
