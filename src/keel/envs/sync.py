"""Gymnasium environments in this process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keel.envs import snapshot
from keel.envs.factory import factory_for
from keel.envs.lanes import Env, Lanes, Plan, read_obs, read_step, warn_of_masks
from keel.envs.protocol import Autoreset, Episodes, Obs, Request, Saved, Step, env_seeds
from keel.envs.spaces import action_layout, observation_layout
from keel.envs.watchdog import Watch, close_and_warn, closed_on_error


class SyncEnvs:
    """`num_envs` environments made by `factory`; the classics and MuJoCo can be saved.

    One that does not return for `timeout` seconds is interrupted: an `EnvHungError` names it.
    """

    backend = "gymnasium sync"

    agents: tuple[str, ...] = ()

    def __init__(
        self,
        factory: Callable[[], Env],
        num_envs: int,
        autoreset: Autoreset = "next_step",
        timeout: float = 60.0,
    ) -> None:
        first = factory()
        envs = [first]
        self.num_envs, self.autoreset = num_envs, autoreset
        with closed_on_error(envs, timeout):
            layout = observation_layout(first.observation_space)
            self._actions = action_layout(first.action_space)
            warn_of_masks(first, self._actions.choices)
            plan = Plan(layout, self._actions, num_envs)
            plan.expect_memory()
            while len(envs) < num_envs:
                envs.append(factory())
            self._buffers = plan.buffers(bytearray(plan.nbytes))
            self._lanes = Lanes(envs, layout, self._buffers, autoreset)
        self._episodes = Episodes(num_envs)
        self._watch = Watch(self._lanes.place, timeout)
        self.declared_spaces = ((first.observation_space, first.action_space),)
        self.observation_space, self.action_space = layout.space, self._actions.space

    def reset(self, seed: int) -> Obs:
        self._episodes.clear()
        self._buffers.masked[:] = False
        with self._watch("reset"):
            self._lanes.reset(env_seeds(seed, self.num_envs))
        return read_obs(self._buffers, np.zeros(self.num_envs, dtype=bool), self._actions)

    def step(self, action: np.ndarray) -> Step:
        self._buffers.action[:] = self._actions.encode(action)
        with self._watch("step"):
            self._lanes.step()
        return read_step(self._buffers, self._episodes, self.autoreset, self._actions)

    def close(self) -> None:
        close_and_warn(self._lanes.envs, self._watch.timeout)

    def save(self) -> Saved | None:
        state = snapshot.save_envs(self._lanes.envs)
        if state is None:
            return None
        arrays, data = state
        arrays |= self._episodes.save() | {"pending": np.array(self._lanes.pending)}
        return arrays, data | {"seeds": self._lanes.seeds, "steps": self._lanes.steps}

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        snapshot.load_envs(self._lanes.envs, arrays, data)
        self._episodes.load(arrays)
        self._lanes.pending = np.asarray(arrays["pending"]).tolist()
        self._lanes.seeds, self._lanes.steps = list(data["seeds"]), int(data["steps"])


def make_sync(request: Request) -> SyncEnvs:
    """Make environments that are stepped in this process."""
    return SyncEnvs(factory_for(request), request.num_envs, request.autoreset, request.timeout)
