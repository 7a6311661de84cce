"""EnvPool's environments as a VecEnv of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import envpool
import numpy as np
from stable_baselines3.common.vec_env import VecEnv


class EnvPoolVecEnv(VecEnv):
    """EnvPool behind SB3's interface: an episode's end is followed by a reset in the same step.

    Args:
        env_id: Name of the environment in EnvPool.
        num_envs: How many are stepped together.
        seed: Seed of all of them.
    """

    def __init__(self, env_id: str, num_envs: int, seed: int) -> None:
        self.envs = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=seed)
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=int)
        super().__init__(num_envs, self.envs.observation_space, self.envs.action_space)

    def reset(self) -> np.ndarray:
        obs, _ = self.envs.reset()
        return obs.astype(np.float32)

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, _ = self.envs.step(self.actions)
        done, obs = terminated | truncated, obs.astype(np.float32)
        self.returns += reward
        self.lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended = np.flatnonzero(done)
        for i in ended:
            infos[i] = {
                "terminal_observation": obs[i].copy(),
                "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
                "episode": {"r": self.returns[i], "l": self.lengths[i], "t": 0.0},
            }
        if ended.size:
            obs[ended] = self.envs.reset(ended.astype(np.int32))[0]
            self.returns[ended], self.lengths[ended] = 0.0, 0
        return obs, reward.astype(np.float32), done, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"EnvPool's environments have no {attr_name}")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        raise AttributeError(f"EnvPool's environments have no {method_name}")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]

    def seed(self, seed: int | None = None) -> Iterable[None]:
        return [None] * self.num_envs
