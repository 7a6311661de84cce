"""`check_env` finds what is broken, and says so in words."""

from __future__ import annotations

from typing import Any

import env_toys
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.envs import check_env, make_envs
from keel.envs.sync import SyncEnvs

env_toys.register_toys()


@pytest.mark.parametrize(
    "name",
    [
        *("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"),
        *("keel/Walk-v0", "keel/Masked-v0", "keel/MaskedInObservation-v0", "keel/Everything-v0"),
    ],
)
def test_healthy_environments_pass(name: str) -> None:
    assert check_env(name, steps=60) == []


@pytest.mark.parametrize("backend", ["vector", "envpool", "ale"])
def test_healthy_backends_pass(backend: Any) -> None:
    module = {"envpool": "envpool", "ale": "ale_py"}.get(backend)
    if module:
        pytest.importorskip(module)
    envs = make_envs("Pong" if backend == "ale" else "CartPole-v1", 2, backend=backend, seed=0)
    assert check_env(envs, steps=20) == []


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, (2,)),
        spaces.Box(-np.inf, np.inf, (1,)),
    ],
)
def test_all_kinds_of_actions_are_tried(space: Any) -> None:
    assert check_env("keel/Echo-v0", steps=20, env_kwargs={"action_space": space}) == []


class Wrong(env_toys.Walk):
    """Breaks one rule, the one it is told to."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        if self.rule == "reset":
            return obs
        if self.rule == "seed":
            obs = obs + np.float32(np.random.default_rng().random() * 0.1)
        if self.rule == "mask":
            info = {"action_mask": np.zeros(2, dtype=bool)}
        if self.rule == "mask shape":
            info = {"action_mask": np.ones(3, dtype=bool)}
        return obs, info

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        broken: dict[str, Any] = {
            "shape": (obs[:1], reward, terminated, truncated, info),
            "dtype": (obs.astype(str), reward, terminated, truncated, info),
            "finite": (obs * np.nan, reward, terminated, truncated, info),
            "bounds": (obs + 20, reward, terminated, truncated, info),
            "reward": (obs, np.nan, terminated, truncated, info),
            "reward shape": (obs, np.ones(1), terminated, truncated, info),
            "reward type": (obs, "one", terminated, truncated, info),
            "step": (obs, reward, terminated, info),
            "raise": None,
        }
        if self.rule == "raise":
            raise ZeroDivisionError("by design")
        return broken.get(self.rule, (obs, reward, terminated, truncated, info))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("reset", r"reset must return \(observation, info\), got an array of shape \[2\]"),
        ("step", r"step must return \(observation, reward, .*\), got a tuple of 4"),
        ("shape", r"environment 0, step 1: obs: expected shape \[2\], got \[1\]"),
        ("dtype", "environment 0, step 1: obs: expected dtype float32, got <U"),
        ("finite", "step 1: obs: environment 0 gave a value that is not finite"),
        ("bounds", "step 1: obs: environment 0 left the bounds of its space"),
        ("reward", "step 1: reward: environment 0 gave nan"),
        ("reward shape", r"environment 0, step 1: reward: expected a number, got an array .*\[1\]"),
        ("reward type", "environment 0, step 1: reward: expected a number, got str"),
        ("mask", "reset: action_mask: environment 0 leaves nothing of a choice"),
        ("mask shape", "action_mask: expected 2 entries, one per action, got 3"),
        ("seed", "two runs with seed 0 and the same actions differ in obs of reset"),
        ("raise", r"environment 0 raised in step \(seed \d+, step 1\)"),
    ],
)
def test_each_broken_rule_is_named(rule: str, message: str) -> None:
    envs = SyncEnvs(lambda: Wrong(rule), 2)
    problems = check_env(envs, steps=3)
    assert len(problems) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])


def test_several_problems_are_all_told_once() -> None:
    class Both(env_toys.Walk):
        observation_space = spaces.Box(0.0, 0.1, (2,), np.float32)

        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, np.inf, *rest

    problems = check_env(SyncEnvs(Both, 2), steps=30)
    assert len(problems) == 2
    assert gymnasium.Env in Both.__mro__


def test_several_agents_keep_the_contract_too() -> None:
    assert check_env("keel.probes.agents:SameOpposite", steps=20) == []
    assert check_env("land", steps=30, env_kwargs={"variant": "small"}) == []
