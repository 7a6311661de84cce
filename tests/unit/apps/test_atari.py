"""The Atari application: films in colour, milestones, and how games are shown."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keel.apps.atari import milestones
from keel.config import from_dict
from keel.envs import make_envs
from keel.training.environments import atari_options

pytest.importorskip("ale_py")

TINY = {
    "env": "Breakout",
    "algo": "trpo",
    "total_steps": 64,
    "rollout_steps": 16,
    "envs": {"num": 4, "clip_reward": 1.0},
    "atari": {"episodic_life": True, "noop_max": 3},
    "network": {"cnn": "small", "features": 8, "share": False},
    "region": {"minibatch": 32, "epochs": 1},
    "natural": {"cg_iters": 2},
    "evaluation": {"episodes": 2, "deterministic": False},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from keel.training.runner import start

    (progress,) = start(from_dict(TINY), tmp_path_factory.mktemp("runs"), "tiny")
    return progress.path


def test_a_game_is_filmed_in_colour_and_is_the_game_that_was_played(
    run: Path, tmp_path: Path
) -> None:
    from keel.apps.atari import record_game_video
    from keel.training.policy import evaluate_policy, open_policy

    policy = open_policy(run)
    score = record_game_video(policy, tmp_path / "game.gif", seed=3)
    with Image.open(tmp_path / "game.gif") as film:
        assert film.size == (160, 210)
        frame = np.asarray(film.convert("RGB"))
        assert film.n_frames > 20  # type: ignore[attr-defined]
    assert np.ptp(frame.astype(int), axis=-1).max() > 60  # the wall of bricks is not grey
    played = evaluate_policy(policy, episodes=1, deterministic=False, seed=3)
    assert played.returns == score.returns
    assert played.lengths == score.lengths


def test_an_evaluation_is_of_whole_games_and_unclipped(run: Path) -> None:
    """A lost life ends an episode for the learner, but five of them are one game."""
    from keel.training.policy import evaluate_policy, open_policy

    policy = open_policy(run)
    assert policy.config.atari.episodic_life
    score = evaluate_policy(policy, episodes=3, deterministic=False, seed=0)
    envs = make_envs("Breakout", 1, seed=0, atari=atari_options(policy.config))
    envs.reset(0)
    lost = 0
    for _ in range(3000):
        step = envs.step(np.array([0]))
        lost += int(step.terminated[0])
        if step.episode_index.size:
            break
    envs.close()
    assert lost == 5
    assert all(length > 100 for length in score.lengths)


def test_milestones_are_the_first_time_the_mean_got_there() -> None:
    steps = [1.0, 2.0, 3.0, 4.0, 5.0]
    returns = [math.nan, 0.0, 0.5, 12.0, 9.0]
    found = dict(milestones(steps, returns))
    assert found["first point"] == 3.0
    assert found["mean 10"] == 4.0
    assert math.isnan(found["mean 50"])
    assert math.isnan(found["mean 100"])
