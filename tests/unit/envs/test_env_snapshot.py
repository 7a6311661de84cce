"""Saved, loaded, continued: bit for bit, with the resets that follow."""

from __future__ import annotations

import json
from typing import Any

import env_toys
import numpy as np
import pytest
from gymnasium.wrappers import TransformReward

from keel.envs import Envs, Step, make_envs
from keel.errors import InputError

env_toys.register_toys()
CLASSICS = ["Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"]
MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Humanoid-v5", "Reacher-v5"]
CASES = [
    *[(name, "sync") for name in ["CartPole-v1", *CLASSICS, *MUJOCO]],
    ("CartPole-v1", "vector"),
]


def actions(envs: Envs, count: int) -> list[np.ndarray]:
    envs.action_space.seed(0)
    draw = envs.action_space.sample
    return [np.stack([draw() for _ in range(envs.num_envs)]) for _ in range(count)]


def flat(step: Step) -> list[np.ndarray]:
    return [*step.obs.values(), *step[1:5], *step[6:9]]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_stepping_after_load_is_bit_equal(name: str, backend: Any) -> None:
    if name in MUJOCO:
        pytest.importorskip("mujoco")
    kwargs = {"max_episode_steps": 9}
    envs = make_envs(name, 2, backend=backend, seed=0, env_kwargs=kwargs)
    envs.reset(3)
    moves = actions(envs, 35)
    for action in moves[:12]:
        envs.step(action)
    saved = envs.save()
    assert saved is not None
    arrays, data = {key: array.copy() for key, array in saved[0].items()}, json.dumps(saved[1])
    expected = [envs.step(action) for action in moves[12:]]
    assert sum(step.episode_index.size for step in expected) >= 4

    fresh = make_envs(name, 2, backend=backend, seed=99, env_kwargs=kwargs)
    for target in (fresh, envs):  # into new environments, and back into used ones
        target.load(arrays, json.loads(data))
        for action, wanted in zip(moves[12:], expected, strict=True):
            found = target.step(action)
            for a, b in zip(flat(found), flat(wanted), strict=True):
                assert a.dtype == b.dtype
                assert np.array_equal(a, b)


@pytest.mark.parametrize("backend", ["sync", "vector"])
def test_a_pending_reset_survives(backend: Any) -> None:
    """Saved between a done row and its autoreset row."""
    kwargs = {"max_episode_steps": 3}
    envs = make_envs("CartPole-v1", 2, backend=backend, seed=0, env_kwargs=kwargs)
    envs.reset(0)
    for _ in range(3):
        step = envs.step(np.zeros(2, dtype=np.int64))
    assert step.truncated.all()
    saved = envs.save()
    assert saved is not None
    other = make_envs("CartPole-v1", 2, backend=backend, seed=0, env_kwargs=kwargs)
    other.load(*saved)
    one, two = (e.step(np.zeros(2, dtype=np.int64)) for e in (envs, other))
    assert two.ignored.all()
    assert np.array_equal(one.obs["obs"], two.obs["obs"])


def test_what_is_saved_holds_arrays_and_json_only() -> None:
    envs = make_envs("CartPole-v1", 2, backend="sync", seed=0)
    envs.reset(0)
    saved = envs.save()
    assert saved is not None
    assert all(type(a) is np.ndarray and a.dtype != object for a in saved[0].values())
    assert json.loads(json.dumps(saved[1])) == saved[1]


def test_unknown_environments_and_wrappers_are_not_saved() -> None:
    envs = make_envs("keel/Walk-v0", 1, backend="sync", seed=0)
    envs.reset(0)
    assert envs.save() is None
    wrapped = make_envs(
        "CartPole-v1",
        1,
        backend="sync",
        seed=0,
        wrappers=[lambda env: TransformReward(env, lambda r: float(r))],
    )
    wrapped.reset(0)
    assert wrapped.save() is None


def test_a_state_of_something_else_is_refused() -> None:
    def saved(name: str, n: int, backend: Any) -> Any:
        envs = make_envs(name, n, backend=backend, seed=0)
        envs.reset(0)
        return envs.save()

    target = make_envs("CartPole-v1", 2, backend="sync", seed=0)
    with pytest.raises(InputError, match=r"the state is of .*PendulumEnv, the environment is .*C"):
        target.load(*saved("Pendulum-v1", 2, "sync"))
    with pytest.raises(InputError, match="the state holds 3 environments, there are 2 here"):
        target.load(*saved("CartPole-v1", 3, "sync"))
    vector = make_envs("CartPole-v1", 2, backend="vector", seed=0)
    with pytest.raises(InputError, match="the state holds 3 environments, there are 2 here"):
        vector.load(*saved("CartPole-v1", 3, "vector"))
    with pytest.raises(InputError, match="the state is of None"):
        vector.load(*saved("CartPole-v1", 2, "sync"))
