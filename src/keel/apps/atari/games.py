"""Videos of Atari games in color, beside the preprocessed observations of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keel.envs import Envs, Obs, Step
from keel.training.environments import make_run_envs
from keel.training.evaluation import Score
from keel.training.policy import Policy, check_trusted
from keel.training.video import Camera, check_video_path, record_video

FRAMES = 60.0
"""Frames per second of the console."""


class PairedEnvs:
    """Two games from one seed and with the same actions: one for the policy, one in color.

    Args:
        policy_envs: The game with the policy's preprocessing.
        color_envs: The same game in color.
    """

    def __init__(self, policy_envs: Envs, color_envs: Envs) -> None:
        self.num_envs, self.backend = policy_envs.num_envs, policy_envs.backend
        self.autoreset = policy_envs.autoreset
        self.observation_space = policy_envs.observation_space
        self.action_space = policy_envs.action_space
        self.agents, self.save = policy_envs.agents, policy_envs.save
        self._policy_envs, self._color_envs = policy_envs, color_envs
        self.image = np.zeros((1, 1, 3), np.uint8)

    def reset(self, seed: int) -> Obs:
        """Reset both games, and return the policy's observation."""
        self._update_image(self._color_envs.reset(seed))
        return self._policy_envs.reset(seed)

    def step(self, action: np.ndarray) -> Step:
        """Step both games, and return the policy's step."""
        self._update_image(self._color_envs.step(action).obs)
        return self._policy_envs.step(action)

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        """Load the state of the policy's game."""
        self._policy_envs.load(arrays, data)

    def close(self) -> None:
        """Close both games."""
        self._policy_envs.close()
        self._color_envs.close()

    def _update_image(self, obs: Obs) -> None:
        self.image = obs["obs"][0, -1]


def record_game_video(
    policy: Policy, path: Path, *, deterministic: bool = False, seed: int = 0
) -> Score:
    """Play one game and write a video of it in color.

    Sticky actions are left out: the two games would draw them independently.

    Args:
        policy: Of a run on an Atari game.
        path: File ending in .gif or .mp4.
        deterministic: Take the likeliest actions instead of sampling.
        seed: Seed of the game and of the sampled actions.

    Returns:
        The score of the game.
    """
    check_video_path(path)
    check_trusted(policy)
    skip, envs = policy.config.atari.frame_skip, replace(policy.config.envs, backend="ale")
    policy_envs = make_run_envs(replace(policy.config, envs=envs), 1, seed, sticky=0.0)
    unguarded = replace(policy.config, envs=replace(envs, guard=False))  # nothing learns from it
    color_envs = make_run_envs(unguarded, 1, seed, sticky=0.0, colour=True)
    envs_pair = PairedEnvs(policy_envs, color_envs)
    camera = Camera(envs_pair, lambda _: envs_pair.image, rate=FRAMES / skip)
    return record_video(policy, path, deterministic=deterministic, seed=seed, camera=camera)
