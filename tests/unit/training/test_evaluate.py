"""Evaluations always end: episodes that do not are cut, counted, and told of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.config import Config, from_dict
from keel.envs import Step, time_limit
from keel.training.evaluation import LONGEST_EPISODE, EvaluationWarning, _Tally, longest_episode
from keel.training.runner import start


class Endless(gymnasium.Env[Any, Any]):
    """Gives 1 in every step and never ends, like a game in which an idle player cannot lose."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 1.0, False, False, {}


if "keel/Endless-v0" not in gymnasium.registry:
    gymnasium.register("keel/Endless-v0", Endless)  # type: ignore[arg-type]


def test_an_episode_that_never_ends_is_cut_counted_and_told_of(tmp_path: Any) -> None:
    config = from_dict(
        {
            "env": "keel/Endless-v0",
            "total_steps": 64,
            "rollout_steps": 16,
            "envs": {"num": 4, "backend": "sync"},
            "network": {"hidden": [8]},
            "region": {"epochs": 1, "minibatch": 32},
            "evaluation": {"episodes": 3, "max_episode_steps": 20},
        }
    )
    with pytest.warns(EvaluationWarning, match="3 of 3 episodes did not end within 20 steps"):
        (last,) = start(config, tmp_path, "run")
    wanted = {"episodes_cut": 3.0, "episodes": 3.0, "length_mean": 20.0, "return_mean": 20.0}
    assert {name: last.metrics[f"eval/{name}"] for name in wanted} == wanted


def step(reward: list[float], ended: dict[int, tuple[float, int]] | None = None) -> Step:
    ended = ended or {}
    no = np.zeros(len(reward), bool)
    return Step(
        {}, np.array(reward, np.float32), no, no, no, None,
        np.array(list(ended), np.int64),
        np.array([total for total, _ in ended.values()], np.float64),
        np.array([length for _, length in ended.values()], np.int64),
    )  # fmt: skip


def tally(quota: int, limit: int) -> _Tally:
    envs: Any = SimpleNamespace(num_envs=2, agents=())
    return _Tally(envs, quota=quota, limit=limit)


def test_an_episode_that_ends_at_the_limit_is_not_cut() -> None:
    mine = tally(quota=1, limit=2)
    mine.add(step([1.0, 2.0]))
    mine.add(step([1.0, 2.0], {0: (2.0, 2)}))
    assert mine.complete
    assert mine.score(2) == ([2.0, 4.0], [2, 2], {}, 1)


def test_the_rest_of_a_cut_episode_is_no_episode() -> None:
    """Environment 0 is cut after two steps and ends after three; only its next one counts."""
    mine = tally(quota=2, limit=2)
    mine.add(step([1.0, 1.0], {1: (1.0, 1)}))
    mine.add(step([1.0, 1.0], {1: (1.0, 1)}))
    assert not mine.complete
    assert mine.stuck, "environment 1 is done, and 0 plays on in an episode that was cut"
    mine.add(step([5.0, 0.0], {0: (7.0, 3)}))
    assert not mine.stuck
    mine.add(step([4.0, 0.0], {0: (4.0, 1)}))
    assert mine.complete
    assert mine.score(4) == ([2.0, 4.0, 1.0, 1.0], [2, 1, 1, 1], {}, 1)


def test_an_evaluation_of_more_episodes_than_environments_ends_as_well() -> None:
    mine = tally(quota=3, limit=4)
    steps = 0
    while not mine.complete:
        if mine.stuck:
            mine.begin()
        mine.add(step([1.0, 1.0]))
        steps += 1
    assert steps == 3 * 4
    assert mine.score(5) == ([4.0] * 5, [4] * 5, {}, 5)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"env": "CartPole-v1"}, 500),
        ({"env": "CartPole-v1", "envs": {"options": "max_episode_steps=50"}}, 50),
        ({"env": "CartPole-v1", "evaluation": {"max_episode_steps": 7}}, 7),
        ({"env": "keel/Endless-v0"}, LONGEST_EPISODE),
        ({"env": "Breakout", "atari": {"frame_skip": 2}}, 54_000),
    ],
)
def test_the_limit_is_the_setting_or_the_environments_own(
    settings: dict[str, Any], longest: int
) -> None:
    assert longest_episode(from_dict(settings)) == longest


def test_a_run_of_an_older_version_has_no_limit_of_its_own() -> None:
    assert from_dict({"evaluation": {"episodes": 3}}).evaluation.max_episode_steps == 0
    assert Config().evaluation.max_episode_steps == 0
    assert time_limit("serving") is None
