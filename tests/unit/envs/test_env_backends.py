"""One protocol, the same transitions on every backend, whatever its autoreset mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import env_toys
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from keel.envs import Envs, VectorEnvs, env_seeds, make_envs

env_toys.register_toys()
WALK = "keel/Walk-v0"


def make_walk() -> Any:
    return gymnasium.make(WALK)


def wrapped(mode: AutoresetMode, copy: bool = True) -> Callable[[int], Envs]:
    return lambda n: VectorEnvs(SyncVectorEnv([make_walk] * n, copy=copy, autoreset_mode=mode))


BACKENDS: dict[str, Callable[[int], Envs]] = {
    "sync, next step": lambda n: make_envs(WALK, n, backend="sync", seed=0),
    "sync, same step": lambda n: make_envs(WALK, n, backend="sync", seed=0, autoreset="same_step"),
    "async, next step": lambda n: make_envs(WALK, n, backend="async", seed=0, threads=2),
    "async, same step": lambda n: make_envs(
        WALK, n, backend="async", seed=0, threads=1, autoreset="same_step"
    ),
    "vector, NEXT_STEP": wrapped(AutoresetMode.NEXT_STEP),
    "vector, SAME_STEP": wrapped(AutoresetMode.SAME_STEP),
    "vector, DISABLED": wrapped(AutoresetMode.DISABLED),
    "vector that reuses arrays": wrapped(AutoresetMode.NEXT_STEP, copy=False),
}


@pytest.fixture(scope="module", params=BACKENDS)
def envs(request: pytest.FixtureRequest) -> Iterator[Envs]:
    """Three environments of a backend, made once: tests reset them, and processes start slowly."""
    made = BACKENDS[request.param](3)
    yield made
    made.close()


def test_every_autoreset_mode_gives_the_transitions_of_a_plain_loop(envs: Envs) -> None:
    found = env_toys.transitions(envs, seed=11, rows=40)
    expected = env_toys.naive(make_walk, env_seeds(11, 3), 40)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) >= 30
        assert mine == theirs[: len(mine)]
    ends = {(row[3], row[4]) for own in found for row in own}
    assert {(True, False), (False, True)} <= ends, "both kinds of end must have been seen"


def test_episode_statistics_are_those_of_a_plain_loop(envs: Envs) -> None:
    envs.reset(5)
    rng = np.random.default_rng(0)
    total, length = np.zeros(3), np.zeros(3, dtype=int)
    for _ in range(60):
        step = envs.step(rng.integers(0, 2, 3))
        total += step.reward
        length += ~step.ignored
        ended = np.flatnonzero(step.terminated | step.truncated)
        assert step.episode_index.tolist() == ended.tolist()
        assert step.episode_return.tolist() == total[ended].tolist()
        assert step.episode_length.tolist() == length[ended].tolist()
        total[ended], length[ended] = 0.0, 0


def test_ignored_rows_follow_a_done_row_and_carry_nothing(envs: Envs) -> None:
    envs.reset(0)
    done = np.zeros(3, dtype=bool)
    for _ in range(40):
        step = envs.step(np.ones(3, dtype=np.int64))
        assert (step.final_obs is None) or envs.autoreset == "same_step"
        if envs.autoreset == "next_step":
            assert (step.ignored == done).all()
            assert not step.reward[done].any()
            assert not (step.terminated | step.truncated)[done].any()
        else:
            assert not step.ignored.any()
        done = step.terminated | step.truncated


def test_a_step_is_the_callers_to_keep(envs: Envs) -> None:
    envs.reset(0)
    kept = envs.step(np.array([0, 1, 1]))
    before = [np.array(x) for x in (kept.obs["obs"], kept.reward, kept.terminated, kept.ignored)]
    for _ in range(10):
        envs.step(np.array([1, 0, 1]))
    after = (kept.obs["obs"], kept.reward, kept.terminated, kept.ignored)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_dtypes_and_shapes(envs: Envs) -> None:
    assert envs.reset(0)["obs"].dtype == np.float32
    step = envs.step(np.array([0, 1, 0]))
    assert step.obs["obs"].shape == (3, 2)
    assert step.obs["obs"].dtype == step.reward.dtype == np.float32
    for flags in (step.terminated, step.truncated, step.ignored):
        assert flags.dtype == bool
        assert flags.shape == (3,)
    assert step.episode_index.dtype == step.episode_length.dtype == np.int64
    assert step.episode_return.dtype == np.float64


def test_each_environment_has_its_own_seed_and_keeps_it_when_more_join() -> None:
    seeds = env_seeds(3, 64)
    assert len(set(seeds)) == 64
    assert env_seeds(3, 4) == seeds[:4]
    assert env_seeds(4, 64) != seeds
    assert all(0 <= seed < 2**31 for seed in seeds)
    obs = make_envs("Pendulum-v1", 4, backend="sync", seed=0).reset(9)["obs"]
    alone = gymnasium.make("Pendulum-v1")
    for row, seed in zip(obs, env_seeds(9, 4), strict=True):
        assert np.array_equal(row, alone.reset(seed=seed)[0])


@pytest.mark.parametrize("backend", ["vector", "sync"])
def test_resetting_with_the_same_seed_repeats_the_run(backend: Any) -> None:
    envs = make_envs("CartPole-v1", 3, backend=backend, seed=0)
    first = env_toys.transitions(envs, 7, 80)
    assert env_toys.transitions(envs, 7, 80) == first
    assert env_toys.transitions(envs, 8, 80) != first


@pytest.mark.parametrize("backend", ["vector", "sync"])
def test_cartpole_is_truncated_at_its_time_limit_not_terminated(backend: Any) -> None:
    kwargs = {"max_episode_steps": 4}
    envs = make_envs("CartPole-v1", 3, backend=backend, seed=0, env_kwargs=kwargs)
    envs.reset(0)
    for number in range(1, 11):
        step = envs.step(np.array([0, 1, 0]))
        assert not step.terminated.any()
        assert step.truncated.all() == (number % 5 == 4)
        assert step.ignored.all() == (number % 5 == 0)
        if number % 5 == 4:
            assert step.episode_length.tolist() == [4, 4, 4]
            assert step.episode_return.tolist() == [4.0, 4.0, 4.0]


def test_the_sync_lanes_follow_gymnasiums_own_cartpole() -> None:
    envs = make_envs("CartPole-v1", 2, backend="sync", seed=0)
    found = env_toys.transitions(envs, 1, 60)
    expected = env_toys.naive(lambda: gymnasium.make("CartPole-v1"), env_seeds(1, 2), 60)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == theirs[: len(mine)]


def test_wrappers_reach_every_environment_in_this_and_other_processes() -> None:
    for backend in ("sync", "async"):
        plain = make_envs(WALK, 2, backend="sync", seed=0)
        loud = make_envs(WALK, 2, backend=backend, seed=0, wrappers=[env_toys.Louder])
        for envs in (plain, loud):
            envs.reset(0)
        action = np.array([1, 0])
        assert (loud.step(action).reward == 2 * plain.step(action).reward).all()
        loud.close()
