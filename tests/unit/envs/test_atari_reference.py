"""The ALE's vector and EnvPool against Gymnasium's AtariPreprocessing, frame by frame."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from keel.envs import AtariOptions, Envs, make_envs

ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2", reason="AtariPreprocessing scales pictures by OpenCV")


def reference(noops: int, padding: str) -> gymnasium.Env[Any, Any]:
    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    shown = gymnasium.wrappers.AtariPreprocessing(game, noop_max=noops, frame_skip=4)
    return gymnasium.wrappers.FrameStackObservation(shown, 4, padding_type=padding)


def play(envs: Envs, noops: int, padding: str, *, until_life: bool) -> dict[str, list[Any]]:
    """The same actions in both; what each saw, was paid, and was told of lives."""
    game = reference(noops, padding)
    expected, info = game.reset(seed=0)
    first = envs.reset(0)["obs"][0]
    np.testing.assert_array_equal(first, expected)
    rng, lives = np.random.default_rng(0), info["lives"]
    told: dict[str, list[Any]] = {"life": [], "terminated": [], "points": [], "reward": []}
    for t in range(2000):
        action = int(rng.integers(0, 4)) if t % 7 else 1  # FIRE now and then: the ball must come
        expected, points, over, _, info = game.step(action)
        step = envs.step(np.array([action]))
        np.testing.assert_array_equal(step.obs["obs"][0], expected, err_msg=f"step {t}")
        told["life"].append(info["lives"] < lives)
        told["terminated"].append(bool(step.terminated[0]))
        told["points"].append(float(points))
        told["reward"].append(float(step.reward[0]))
        if over or (until_life and told["life"][-1]):
            break
        lives = info["lives"]
    game.close()
    envs.close()
    return told


def test_a_whole_game_on_the_ale_is_that_of_gymnasium() -> None:
    """Five lives: every picture, every reward, and an end wherever a life is lost."""
    options = AtariOptions(noop_max=0, fire_reset=False, episodic_life=True)
    envs = make_envs("Breakout", 1, backend="ale", seed=0, atari=options)
    told = play(envs, 0, "zero", until_life=False)
    assert sum(told["life"]) == 5
    assert told["terminated"] == told["life"]
    assert told["reward"] == told["points"]
    assert sum(told["points"]) > 0


def test_a_life_on_envpool_is_that_of_gymnasium() -> None:
    """Up to the first lost life; the row after it passes the action by, and Keel ignores it."""
    pytest.importorskip("envpool")
    options = AtariOptions(noop_max=1, fire_reset=False, episodic_life=True)
    envs = make_envs("Breakout", 1, backend="envpool", seed=0, atari=options)
    told = play(envs, 1, "reset", until_life=True)
    assert told["life"][-1]
    assert told["terminated"] == told["life"]
    assert told["reward"] == told["points"]
