"""Serving clusters as a Gymnasium vector environment, for other training libraries.

import gymnasium, keel.apps.serving.gym
envs = gymnasium.make_vec("keel/Serving-v0", num_envs=64, setting="mixed")
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from keel.apps.serving.vector import vector_env
from keel.envs.protocol import Obs
from keel.types import MASK


class ServingVectorEnv(VectorEnv[Any, Any, Any]):
    """Vector environment with one routing decision per cluster and step.

    `info["action_mask"]` marks the replicas that are up.

    A trace that ends is followed at once by another (`SAME_STEP`); it terminates, so its final
    observation is not needed. Options are those of `keel.apps.serving.vector.vector_env`.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        self._envs = vector_env(num_envs, **options)
        self.num_envs = num_envs
        self.single_observation_space = self._envs.observation_space
        self.single_action_space = self._envs.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._last: Obs = {}

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a trace in every cluster."""
        if seed is None:
            seed = int(np.random.default_rng().integers(2**31))
        obs = self._envs.reset(int(seed[0] if isinstance(seed, list) else seed))
        return self._without_mask(obs), {MASK: obs[MASK]}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Send the requests at hand to the chosen replicas, `actions` `[num_envs]`."""
        final = {key: x.copy() for key, x in self._last.items()}
        step = self._envs.step(np.asarray(actions))
        info: dict[str, Any] = {MASK: step.obs[MASK]}
        if step.terminated.any():
            info["final_obs"], info["_final_obs"] = final, step.terminated
        return self._without_mask(step.obs), step.reward, step.terminated, step.truncated, info

    def _without_mask(self, obs: Obs) -> Obs:
        self._last = {key: x for key, x in obs.items() if key != MASK}
        return self._last


gymnasium.register("keel/Serving-v0", vector_entry_point="keel.apps.serving.gym:ServingVectorEnv")
