"""Many copies of a PettingZoo environment, with an axis of their own for agents.

Agents may die before the others, and their spaces may differ in size: vectors are padded with
zeros, choices that an agent does not have are masked. What a padded or dead agent does is ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from keel.envs.central import CentralState
from keel.envs.faults import BadStepError, EnvError, EnvWarning, UnsupportedSpaceError
from keel.envs.protocol import AgentEpisodes, Autoreset, Obs, Saved, Step, env_seeds
from keel.envs.spaces import (
    ActionLayout,
    ObsLayout,
    action_layout,
    observation_layout,
    reserved_key,
)
from keel.envs.watchdog import Place, Watch, close_and_warn, closed_on_error
from keel.types import AGENT, MASK, STATE

ParallelEnv = Any
"""`pettingzoo.ParallelEnv`; the package is optional, and its types say little."""


class ParallelEnvs:
    """`num_envs` environments made by `make`, stepped one after the other.

    Beside what each agent observes, `obs` holds its number (`agent`) and what a centralised critic
    may see (`state`): the environment's own `state()`, or all observations side by side.
    """

    autoreset: Autoreset = "next_step"
    backend = "pettingzoo"

    def __init__(
        self, make: Callable[[], ParallelEnv], num_envs: int, timeout: float = 60.0
    ) -> None:
        self._envs: list[ParallelEnv] = []
        self.num_envs = num_envs
        with closed_on_error(self._envs, timeout):
            while len(self._envs) < num_envs:
                self._envs.append(as_parallel(make(), quiet=bool(self._envs)))
            self._prepare(self._envs[0], timeout)

    def _prepare(self, first: ParallelEnv, timeout: float) -> None:
        """Lay out what the environments have in common, as the first of them tells."""
        num_envs = self.num_envs
        self.agents: tuple[str, ...] = tuple(map(str, first.possible_agents))
        names = self._names = list(first.possible_agents)
        self.declared_spaces = tuple(
            (first.observation_space(x), first.action_space(x)) for x in names
        )
        self._plan = plan_agents(self.declared_spaces)
        self.action_space = self._plan.action
        self._at_work = 0
        self._watch = Watch(self._place, timeout)
        self._seeds = [0] * num_envs
        self._steps = np.zeros(num_envs, np.int64)
        self._pending = np.zeros(num_envs, bool)
        self._alive = np.zeros((num_envs, len(self.agents)), bool)
        self._episodes = AgentEpisodes(num_envs, len(self.agents))
        self._masked = self._plan.masked
        raw_obs, info = first.reset(seed=0)
        self._masked |= any(MASK in (info.get(name) or {}) for name in raw_obs)
        self._state = CentralState(first, self._plan.observation, len(self.agents))
        parts = dict(self._plan.observation.items())
        parts[AGENT] = spaces.Discrete(len(self.agents))
        if self._state.space is not None:
            parts[STATE] = self._state.space
        self.observation_space = spaces.Dict(parts)
        self._obs = self._blank()

    def reset(self, seed: int) -> Obs:
        self._seeds = env_seeds(seed, self.num_envs)
        self._obs = self._blank()
        self._episodes.clear()
        self._pending[:] = False
        for index in range(self.num_envs):
            self._begin(index, self._seeds[index])
        return self._copy_obs()

    def step(self, action: np.ndarray) -> Step:
        lead = self._alive.shape
        reward = np.zeros(lead, np.float64)
        terminated, truncated = np.zeros(lead, bool), np.zeros(lead, bool)
        ignored = ~self._alive
        episode_over = np.zeros(self.num_envs, bool)
        resetting = self._pending.copy()
        for index in range(self.num_envs):
            if resetting[index]:
                ignored[index] = True
                self._begin(index, None)
                continue
            episode_over[index] = self._advance(
                index, action[index], reward[index], terminated[index], truncated[index]
            )
        self._pending = episode_over
        finished = self._episodes.update(reward, episode_over, resetting)
        obs = self._copy_obs()
        return Step(obs, reward.astype(np.float32), terminated, truncated, ignored, None, *finished)

    def close(self) -> None:
        close_and_warn(self._envs, self._watch.timeout)

    def save(self) -> Saved | None:
        """Return None: PettingZoo's environments have no state that could be saved."""
        return None

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        raise EnvError("pettingzoo: environments cannot be put back where they were")

    def _begin(self, index: int, seed: int | None) -> None:
        with self._watched(index, "reset"):
            raw_obs, info = self._envs[index].reset(seed=seed)
        self._steps[index] = 0
        self._alive[index] = [name in raw_obs for name in self._names]
        self._store(index, raw_obs, info)

    def _advance(
        self,
        index: int,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> bool:
        """Step one environment into `[A]` arrays; return whether its episode is over."""
        env, alive = self._envs[index], self._alive[index].copy()
        actions = {
            name: self._plan.actions[a].encode(self._plan.cut(a, action[a : a + 1]))[0]
            for a, name in enumerate(self._names)
            if alive[a]
        }
        with self._watched(index, "step"):
            raw_obs, rewards, ended, cut, info = env.step(actions)
        self._steps[index] += 1
        self._store(index, raw_obs, info)
        for a, name in enumerate(self._names):
            if alive[a]:
                reward[a] = rewards.get(name, 0.0)
                terminated[a] = bool(ended.get(name, True))
                truncated[a] = bool(cut.get(name, False)) and not terminated[a]
        remaining = {str(name) for name in env.agents}
        self._alive[index] = [name in remaining for name in self.agents]
        over = not remaining
        if over:  # the remaining agents end with the episode
            truncated |= alive & ~terminated
        return over

    def _store(self, index: int, raw_obs: Mapping[Any, Any], info: Mapping[Any, Any]) -> None:
        for a, name in enumerate(self._names):
            rows = {key: self._obs[key][index, a, ...] for key in self._plan.keys}
            if name not in raw_obs:
                for x in rows.values():
                    x[...] = 0
                continue
            try:
                parts = self._plan.layouts[a].read(raw_obs[name], ())
            except BadStepError as error:
                raise BadStepError(f"environment {index}, {name}: {error}") from error
            for key, x in rows.items():
                self._plan.fit(x[None], np.asarray(parts[key])[None])
            if MASK in self._obs:
                mask = self._obs[MASK][index, a]
                mask[:] = self._plan.choices(a)
                legal = parts.get(MASK, (info.get(name) or {}).get(MASK))
                if legal is not None:
                    mask[: len(legal)] &= np.asarray(legal, bool)
        if STATE in self._obs:
            observations = {key: self._obs[key][index] for key in self._plan.keys}
            last = self._obs[STATE][index, 0]
            try:
                with self._watched(index, "state"):
                    self._obs[STATE][index] = self._state.read(
                        self._envs[index], observations, last
                    )
            except BadStepError as error:
                raise BadStepError(f"environment {index}: {error}") from error
        if MASK in self._obs:
            present = np.array([name in raw_obs for name in self._names])
            self._plan.open_masks(self._obs[MASK][index], present)

    def _blank(self) -> Obs:
        lead = (self.num_envs, len(self.agents))
        obs: Obs = {
            key: np.zeros((*lead, *(space.shape or ())), space.dtype)
            for key, space in self.observation_space.items()
        }
        obs[AGENT][:] = np.arange(len(self.agents))
        if self._masked:
            obs[MASK] = np.ones((*lead, self._plan.width), bool)
        return obs

    def _copy_obs(self) -> Obs:
        return {key: x.copy() for key, x in self._obs.items()}

    def _place(self) -> Place:
        index = self._at_work
        return Place(index, self._seeds[index], int(self._steps[index]))

    @contextmanager
    def _watched(self, index: int, doing: str) -> Iterator[None]:
        """Raise the environment's own errors with the seed and step that reproduce them."""
        self._at_work = index
        with self._watch(doing):
            yield


def as_parallel(env: Any, quiet: bool = False) -> ParallelEnv:
    """Return a PettingZoo environment in its Parallel form.

    An AEC environment that says it `is_parallelizable` is converted by `aec_to_parallel`. In any
    other, agents take turns (`turn_based_aec_to_parallel`): all observe every move, and what those
    do whose turn it is not has no effect. An `EnvWarning` says so, unless `quiet`.
    """
    if not (hasattr(env, "agent_iter") and hasattr(env, "last")):
        return env
    from pettingzoo.utils import (  # type: ignore[import-untyped]
        aec_to_parallel,
        turn_based_aec_to_parallel,
    )

    if env.metadata.get("is_parallelizable", False):
        return aec_to_parallel(env)
    if not quiet:
        warnings.warn(
            "an AEC environment that is not parallelizable: agents take turns, and those who wait "
            "have one choice, which has no effect",
            EnvWarning,
            stacklevel=4,
        )
    return turn_based_aec_to_parallel(env)


class AgentsPlan(NamedTuple):
    """Spaces of all agents, and the one space that holds them."""

    layouts: list[ObsLayout]
    actions: list[ActionLayout]
    observation: spaces.Dict
    action: Space[Any]
    width: int
    """of a mask"""
    masked: bool
    """whether some agents lack choices, or say which are legal"""

    @property
    def keys(self) -> list[str]:
        return list(self.observation)

    def choices(self, agent: int) -> np.ndarray:
        """Return the actions that this agent has, `[width]` bool."""
        return np.arange(self.width) < self.actions[agent].choices

    @staticmethod
    def fit(target: np.ndarray, source: np.ndarray) -> None:
        """Write `source` `[N, …]` into the beginning of `target`; the rest stays 0."""
        if target.shape == source.shape:
            target[...] = source
        else:
            target[:, : source.shape[1]] = source

    def open_masks(self, mask: np.ndarray, present: np.ndarray) -> None:
        """Leave every agent a choice.

        Dead agents get every choice, since none of it is kept. Agents that may do nothing (in a
        game of turns, those that wait) get a single one, so that the policy is certain there:
        nothing to learn from, no entropy and no KL.

        Args:
            mask: `[A, width]`, changed in place.
            present: `[A]`, whether an agent observes something.
        """
        blocked = ~mask.any(-1)
        mask[blocked & ~present] = True
        for a in np.flatnonzero(blocked & present):
            mask[a, self.actions[a].first_choices] = True

    def cut(self, agent: int, action: np.ndarray) -> np.ndarray:
        """Return the actions of one agent `[N, …]`, without the padding of a vector."""
        shape = self.actions[agent].space.shape or ()
        return action[:, : shape[0]] if shape else action


def plan_agents(agent_spaces: Sequence[tuple[Space[Any], Space[Any]]]) -> AgentsPlan:
    """Return the layout that holds what all agents observe and do.

    Args:
        agent_spaces: of observations and actions of each agent, as the environment declares them.
    """
    layouts = [observation_layout(observed, matrices=True) for observed, _ in agent_spaces]
    actions = [action_layout(action_space) for _, action_space in agent_spaces]
    keys = [field.key for field in layouts[0].fields if field.key != MASK]
    for layout in layouts:
        agent_keys = [field.key for field in layout.fields if field.key != MASK]
        if agent_keys != keys:
            raise UnsupportedSpaceError(
                f"agents observe different things: {keys} and {agent_keys}; give all of them the "
                "same keys (vectors may differ in length)"
            )
    reserved = {AGENT, STATE} & set(keys)
    if reserved:
        raise UnsupportedSpaceError(reserved_key(min(reserved)))
    observation = spaces.Dict({key: _widest(key, layouts) for key in keys})
    action = _widest_action([layout.space for layout in actions])
    width = max(layout.choices for layout in actions)
    masks_given = any(field.key == MASK for layout in layouts for field in layout.fields)
    choices_differ = len({layout.choices for layout in actions}) > 1
    return AgentsPlan(layouts, actions, observation, action, width, masks_given or choices_differ)


def _widest(key: str, layouts: Sequence[ObsLayout]) -> Space[Any]:
    """Return a space that holds the observations of all agents under `key`."""
    agent_spaces = [field.space for x in layouts for field in x.fields if field.key == key]
    first = agent_spaces[0]
    assert first is not None
    if all(space == first for space in agent_spaces):
        return first
    if isinstance(first, spaces.Discrete) and all(
        isinstance(x, spaces.Discrete) for x in agent_spaces
    ):
        return spaces.Discrete(max(int(space.n) for space in agent_spaces))  # type: ignore[union-attr]
    shapes = [space.shape for space in agent_spaces if isinstance(space, spaces.Box)]
    if len(shapes) < len(agent_spaces) or len({x.dtype for x in agent_spaces if x is not None}) > 1:
        raise UnsupportedSpaceError(f"observation {key!r}: agents have different kinds of spaces")
    if any(len(shape) != 1 for shape in shapes) and len(set(shapes)) > 1:
        raise UnsupportedSpaceError(
            f"observation {key!r}: agents have shapes {sorted(set(shapes))}; only vectors can be "
            "padded"
        )
    if len(set(shapes)) == 1:
        bounds = [
            (space.low, space.high) for space in agent_spaces if isinstance(space, spaces.Box)
        ]
        lows, highs = zip(*bounds, strict=True)
        low, high = np.minimum.reduce(lows), np.maximum.reduce(highs)
        return spaces.Box(low, high, shapes[0], first.dtype.type)  # type: ignore[union-attr]
    size = max(shape[0] for shape in shapes)
    return spaces.Box(-np.inf, np.inf, (size, *shapes[0][1:]), np.float32)


def _widest_action(agent_spaces: Sequence[Space[Any]]) -> Space[Any]:
    """Return a space that holds the actions of all agents."""
    if all(space == agent_spaces[0] for space in agent_spaces):
        return agent_spaces[0]
    if all(isinstance(space, spaces.Discrete) for space in agent_spaces):
        return spaces.Discrete(max(int(space.n) for space in agent_spaces))  # type: ignore[attr-defined]
    if all(isinstance(x, spaces.Box) and x.shape == agent_spaces[0].shape for x in agent_spaces):
        low = np.minimum.reduce([x.low for x in agent_spaces])  # type: ignore[attr-defined]
        high = np.maximum.reduce([x.high for x in agent_spaces])  # type: ignore[attr-defined]
        # each agent clips to its own bounds
        return spaces.Box(low, high, agent_spaces[0].shape, np.float32)
    raise UnsupportedSpaceError(
        f"agents act in different spaces: {', '.join(sorted({str(x) for x in agent_spaces}))}; "
        "Discrete ones may differ in size, others must be of one shape"
    )
