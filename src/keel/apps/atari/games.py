"""Filming a game: one twin is seen by the policy, the other by people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keel.envs import Envs, Obs, Step
from keel.training.evaluate import Score
from keel.training.policy import Policy, check_trusted, make_like
from keel.training.video import Camera, check_video_path, record_video

FRAMES = 60.0
"""A second of the console."""


class Twins:
    """Two games from one seed: the same actions keep them the same, so one can be in colour."""

    def __init__(self, seen: Envs, shown: Envs) -> None:
        self.num_envs, self.backend, self.autoreset = seen.num_envs, seen.backend, seen.autoreset
        self.observation_space, self.action_space = seen.observation_space, seen.action_space
        self.agents, self.save = seen.agents, seen.save
        self._seen, self._shown = seen, shown
        self.picture = np.zeros((1, 1, 3), np.uint8)

    def reset(self, seed: int) -> Obs:
        """Both."""
        self._look(self._shown.reset(seed))
        return self._seen.reset(seed)

    def step(self, action: np.ndarray) -> Step:
        """Both; what the policy sees is returned."""
        self._look(self._shown.step(action).obs)
        return self._seen.step(action)

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        """As the first of them does."""
        self._seen.load(arrays, data)

    def close(self) -> None:
        """Both."""
        self._seen.close()
        self._shown.close()

    def _look(self, obs: Obs) -> None:
        self.picture = obs["obs"][0, -1]


def film_game(policy: Policy, path: Path, *, deterministic: bool = False, seed: int = 0) -> Score:
    """Play one whole game and write it to `path`, a .gif or .mp4, in colour.

    Sticky actions are drawn by each game for itself, so they are left out of a film.
    """
    check_video_path(path)
    check_trusted(policy)
    skip, envs = policy.config.atari.frame_skip, replace(policy.config.envs, backend="ale")
    seen = make_like(replace(policy.config, envs=envs), 1, seed, sticky=0.0)
    unguarded = replace(policy.config, envs=replace(envs, guard=False))  # nothing learns from it
    shown = make_like(unguarded, 1, seed, sticky=0.0, colour=True)
    twins = Twins(seen, shown)
    camera = Camera(twins, lambda _: twins.picture, rate=FRAMES / skip)
    return record_video(policy, path, deterministic=deterministic, seed=seed, camera=camera)
