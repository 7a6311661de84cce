"""A task that cannot be solved without memory: a GRU solves it, an MLP cannot."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.config import from_dict
from keel.training.session import train

DELAY = 5


class Recall(gymnasium.Env[Any, Any]):
    """A cue is shown once; `DELAY` steps later the action must name it. Reward 1, or 0."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.age = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.cue - 1.0, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.age += 1
        over = self.age > DELAY
        reward = float(over and int(action) == self.cue)
        now = float(self.age == DELAY)  # says that it is time to answer
        return np.array([0.0, now], np.float32), reward, over, False, {}


if "keel/Recall-v0" not in gymnasium.registry:
    gymnasium.register("keel/Recall-v0", Recall)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "memory", "solved"),
    [("ppo", "both", True), ("ppo", "none", False), ("trpo", "both", True)],
)
def test_a_cue_is_remembered(algo: str, memory: str, solved: bool) -> None:
    config = from_dict(
        {
            "env": "keel/Recall-v0",
            "algo": algo,
            "total_steps": 60_000,
            "rollout_steps": 48,
            "envs": {"num": 16, "backend": "sync"},
            "network": {"memory": memory, "memory_size": 32, "hidden": [32]},
            "region": {"minibatch": 192, "epochs": 4, "learning_rate": 3e-3},
            "natural": {"cg_iters": 5, "fisher_fraction": 0.25} if algo == "trpo" else {},
            "explore": {"entropy_coef": 0.01},
        }
    )
    *_, last = train(config)
    found = last.metrics["rollout/return_mean"]
    assert last.metrics["train/kl_exact"] <= last.metrics["train/max_kl"]
    assert found > 0.95 if solved else found < 0.7
