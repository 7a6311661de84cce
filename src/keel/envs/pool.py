"""EnvPool: environments in C++ threads.

Its quirks, handled here: seeds are fixed when the pool is made; `done` covers both ends; a done
row resets on the next step and gives reward 0; MuJoCo takes and gives float64; some bounds are the
limits of a C++ type.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from keel.envs.atari import AtariOptions
from keel.envs.faults import EnvError, MissingExtraError, UnsupportedSpaceError
from keel.envs.names import POOL, atari_game, find_spec, unknown
from keel.envs.protocol import Autoreset, Episodes, Obs, Request, Saved, Step, env_seeds
from keel.envs.spaces import action_layout, observation_layout, open_mask
from keel.envs.watchdog import Place, Watch
from keel.errors import InputError
from keel.types import MASK

LIGHT = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
"""Steps of a microsecond: handing them to a second thread of EnvPool costs more than it saves."""


class PoolEnvs:
    """A synchronous EnvPool of `num_envs` environments on `threads` threads.

    The pool is asked through `_send` and `_recv`, the C++ calls under its `step`: that saves the
    building of nested dicts, a third of the time of a step of CartPole.
    """

    autoreset: Autoreset = "next_step"
    backend = "envpool"

    agents: tuple[str, ...] = ()

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        seed: int,
        threads: int,
        options: Mapping[str, Any] | None = None,
        clip_reward: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.num_envs = num_envs
        self._id, self._threads, self._options = env_id, threads, dict(options or {})
        self._clip_reward = clip_reward
        self._episodes = Episodes(num_envs)
        self._none = np.zeros(num_envs, dtype=bool)
        self._pending = self._none
        self._seed, self._steps = seed, 0
        self._watch = Watch(self._place, timeout)
        self._pool: Any = self._make(seed)
        self._fresh: int | None = seed
        keys = list(self._pool._state_keys)
        if self._pool.config["max_num_players"] > 1:
            raise UnsupportedSpaceError(f"{env_id}: a game for several players; Keel plays alone")
        if list(self._pool._action_keys) != ["env_id", "players.env_id", "action"]:
            raise UnsupportedSpaceError(
                f"{env_id}: actions {list(self._pool._action_keys)} are not supported on envpool"
            )
        self._at = {key: keys.index(key) for key in ("done", "trunc", "reward")}
        self._game_over = keys.index("info:terminated") if "info:terminated" in keys else None
        self._mask = keys.index(f"info:{MASK}") if f"info:{MASK}" in keys else None
        self._obs = {key[4:] or "obs": i for i, key in enumerate(keys) if key.startswith("obs")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bounds of a Box, cast by Gymnasium, not by the user
            observation = _repair_bounds(self._pool.observation_space)
            self._layout = observation_layout(observation)
            space = self._pool.action_space
        self.declared_spaces = ((observation, space),)
        self._actions = action_layout(space, np.dtype(self._pool._spec._action_spec[-1][0]))
        self._ids = np.arange(num_envs, dtype=np.int32)
        self.observation_space = self._layout.space
        self.action_space = self._actions.space

    def _make(self, seed: int) -> Any:
        envpool = import_envpool(self._id)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return envpool.make(
                    self._id,
                    env_type="gymnasium",
                    num_envs=self.num_envs,
                    num_threads=self._threads,
                    seed=env_seeds(seed, self.num_envs),
                    **self._options,
                )
            except ImportError as error:
                raise EnvError(f"{self._id} on EnvPool: {error}") from error

    def reset(self, seed: int) -> Obs:
        if seed != self._fresh:
            self._pool = self._make(seed)  # the only way to seed it again
        self._fresh = None
        self._pending = self._none
        self._episodes.clear()
        self._seed, self._steps = seed, 0
        with self._watch("reset"):
            self._pool._reset(self._ids)
            state = self._pool._recv()
        return self._read(state, self._none)

    def _place(self) -> Place:
        return Place(-1, self._seed, self._steps)

    def step(self, action: np.ndarray) -> Step:
        pool = self._pool
        encoded = np.ascontiguousarray(self._actions.encode(action))
        self._steps += 1
        with self._watch("step"):
            pool._send([self._ids, self._ids, encoded])
            state = pool._recv()
        done, truncated = state[self._at["done"]], state[self._at["trunc"]]
        reward = state[self._at["reward"]].astype(np.float32, copy=False)
        ended = done
        if self._game_over is not None:  # a lost life ends an episode, but not the game
            ended = truncated | (state[self._game_over] != 0)
        ignored, self._pending = self._pending, done
        finished = self._episodes.update(reward, ended, ignored)
        if self._clip_reward:
            reward = np.sign(reward)
        return Step(
            self._read(state, done),
            reward,
            done & ~truncated,
            truncated,
            ignored,
            None,
            *finished,
        )

    def _read(self, state: list[np.ndarray], done: np.ndarray) -> Obs:
        if self._layout.plain:
            (index,) = self._obs.values()
            obs = self._layout.read(state[index], (self.num_envs,))
        else:
            obs = self._layout.read(
                {key: state[i] for key, i in self._obs.items()}, (self.num_envs,)
            )
        if self._mask is not None:
            obs[MASK] = state[self._mask].astype(bool)
        if MASK in obs:
            open_mask(obs[MASK], done, self._actions)
        return obs

    def close(self) -> None:
        self._pool = None

    def save(self) -> Saved | None:
        return None  # the state lives in C++ and has no way out

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        raise EnvError("EnvPool cannot restore its state; `save` returned None")


def make_pool(request: Request) -> PoolEnvs:
    """Make environments of EnvPool."""
    game = atari_game(request.env_id)
    task = request.env_id if game is None else f"{game}-v5"
    envpool = import_envpool(request.env_id)
    module, _, name = task.rpartition(":")
    if module:
        raise InputError(
            f"backend: {request.env_id} is that of {module}; EnvPool's own is {POOL}{name}"
        )
    if task not in envpool.list_all_envs():
        raise unknown(request.env_id, envpool.list_all_envs())
    atari = request.atari or AtariOptions()
    options = {**({} if game is None else atari.for_envpool()), **request.kwargs}
    known_options = envpool.make_spec(task)._config_keys
    unknown_options = sorted(set(options) - set(known_options))
    if unknown_options:
        raise InputError(f"env_kwargs: EnvPool's {task} does not know {', '.join(unknown_options)}")
    spec = find_spec(task)
    light = spec is not None and str(spec.entry_point).startswith(LIGHT)
    return PoolEnvs(
        task,
        request.num_envs,
        seed=request.seed,
        threads=1 if light and request.threads is None else request.thread_count,
        options=options,
        clip_reward=game is not None and atari.clip_reward,
        timeout=request.timeout,
    )


def _repair_bounds(space: Space[Any]) -> Space[Any]:
    """Put ±∞ for missing bounds: EnvPool declares the smallest *positive* number as the lower."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _repair_bounds(inner) for key, inner in space.items()})
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    tiny, huge = np.finfo(space.dtype).tiny, np.finfo(space.dtype).max
    low = np.where(space.low == tiny, -np.inf, space.low)
    high = np.where(space.high == huge, np.inf, space.high)
    return spaces.Box(low, high, space.shape, space.dtype.type)


def import_envpool(env_id: str) -> Any:
    """Import EnvPool, or say in one line how to install it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import envpool
    except ImportError as error:
        raise MissingExtraError(f"{env_id} on EnvPool", "envpool") from error
    return envpool
