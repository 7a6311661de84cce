"""Protocol of environments for the rest of Keel: one step for N of them, numpy only.

Beside it stands what every backend meets it with: the request that it is made for, seeds, and the
sums of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import gymnasium
import numpy as np

from keel.resources import cores

if TYPE_CHECKING:
    from keel.envs.atari import AtariOptions
    from keel.envs.makers import Maker

Obs = dict[str, np.ndarray]
"""Observations by key, leading axis N.

A plain space has the single key `"obs"`, a Dict space keeps its keys. What an environment gives as
action mask (in its info, or as an observation key) is `"action_mask"`, bool `[N, A]`, and is not
part of `observation_space`. `keel.envs.spaces` says how each space is laid out.
"""

Autoreset = Literal["next_step", "same_step"]
Saved = tuple[dict[str, np.ndarray], dict[str, Any]]
"""The state of environments: named arrays, and data that JSON can hold."""


class Step(NamedTuple):
    """Result of one step of N environments; the arrays belong to the caller."""

    obs: Obs
    """What the policy sees next: float32, uint8 for pixels, int64 for Discrete."""
    reward: np.ndarray
    """`[N]` float32."""
    terminated: np.ndarray
    """`[N]` bool: the task ended, the future is worth 0."""
    truncated: np.ndarray
    """`[N]` bool: time ran out, the future is worth the value of the final observation."""
    ignored: np.ndarray
    """`[N]` bool: the action did nothing (an autoreset row); mask it out of everything.

    A row that is ignored *and* truncated was lost with its worker: the episode was cut before it,
    so the row before it is to be treated as truncated, with what the policy saw as final
    observation.
    """
    final_obs: tuple[np.ndarray, Obs] | None
    """same_step only: (indices `[K]`, their final observations). In next_step mode it is None, and
    `obs` of a done row *is* its final observation."""
    episode_index: np.ndarray
    """`[E]` int64: the environments whose episode ended in this step."""
    episode_return: np.ndarray
    """`[E]` float64: the sum of raw rewards (neither normalized nor clipped)."""
    episode_length: np.ndarray
    """`[E]` int64: in steps of the agent."""
    agent_return: np.ndarray | None = None
    """`[E, A]` float64: each agent's own; `episode_return` is their sum."""
    episode_measures: Mapping[str, np.ndarray] | None = None
    """`[E]` float64 each: what the environment itself has to say of these episodes."""


def lead(envs: Envs) -> tuple[int, ...]:
    """Return the leading axes of observations: `(N,)`, or `(N, A)` with several agents.

    Args:
        envs: the environments.
    """
    return (envs.num_envs, len(envs.agents)) if envs.agents else (envs.num_envs,)


class Envs(Protocol):
    """N environments stepped together.

    `reset(seed)` seeds environment i with entry i of `keel.envs.env_seeds(seed, N)`; a Gymnasium
    vector entry point has one generator for all and takes the first entry.
    """

    @property
    def num_envs(self) -> int: ...

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents in each environment; empty where there is one agent without a name.

        With names, everything that is `[N]` in `Step` and has N first in `Obs` and in actions is
        `[N, A]`. The fields of `Step` about episodes stay `[E]`: all agents share an episode.
        """

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Space of one environment, as `Obs` lays it out, without the action mask."""

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Space of one environment, as `step` expects it: Discrete starts at 0, Box is flat."""

    @property
    def backend(self) -> str: ...

    @property
    def autoreset(self) -> Autoreset: ...

    def reset(self, seed: int) -> Obs:
        """Begin new episodes in all environments.

        Args:
            seed: of all environments, from which each derives its own.
        """

    def step(self, action: np.ndarray) -> Step:
        """Step all environments.

        Args:
            action: Discrete `[N]`, MultiDiscrete and MultiBinary `[N, K]`, Box `[N, D]` (clipped
                here).
        """

    def close(self) -> None: ...

    def save(self) -> Saved | None:
        """Return the state for a bit-exact continuation, or None where it cannot be saved."""

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        """Continue where `save` was called, in environments made in the same way.

        Args:
            arrays: named arrays that `save` returned.
            data: plain data that `save` returned.
        """


@dataclass(frozen=True)
class Request:
    """The arguments of `make_envs`, as the backends need them."""

    env_id: str
    num_envs: int
    seed: int
    kwargs: Mapping[str, Any]
    wrappers: tuple[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]], ...]
    autoreset: Autoreset
    threads: int | None
    """of EnvPool and ALE, processes of async; None: one per core"""
    timeout: float
    restart_workers: int
    atari: AtariOptions | None
    """how games are shown; None: as usual"""
    guard: bool
    maker: Maker | None = None
    """of Gymnasium environments, where the name is `module:attribute`"""

    @property
    def thread_count(self) -> int:
        """Number of threads, or of worker processes; never more than environments."""
        return min(self.num_envs, self.threads or cores())


def env_seeds(seed: int | Sequence[int], num_envs: int) -> list[int]:
    """Derive N seeds in [0, 2³¹) by `np.random.SeedSequence(seed)`.

    Neighbouring seeds give unrelated streams, and environment i keeps its seed when N grows.

    Args:
        seed: one seed, or several as one.
        num_envs: N.

    Examples:
        >>> env_seeds(0, 2) == env_seeds(0, 3)[:2]
        True
    """
    states = np.random.SeedSequence(seed).generate_state(num_envs, np.uint32)
    return [int(state) >> 1 for state in states]


NONE_ENDED = (
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.float64),
    np.zeros(0, dtype=np.int64),
)


class Episodes:
    """Sums of raw rewards `[N]` float64 and step counts `[N]` int64 since the last reset."""

    def __init__(self, num_envs: int) -> None:
        self.total = np.zeros(num_envs, dtype=np.float64)
        self.length = np.zeros(num_envs, dtype=np.int64)

    def clear(self) -> None:
        self.total[:] = 0.0
        self.length[:] = 0

    def update(
        self, reward: np.ndarray, ended: np.ndarray, ignored: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Add one step; return (index, return, length) of the episodes that `ended` `[N]`.

        `ignored` `[N]` rows take no time; None when there are none.
        """
        self.total += reward
        self.length += 1
        if ignored is not None:
            self.length -= ignored
        index = ended.nonzero()[0]
        if not index.size:
            return NONE_ENDED
        finished = index, self.total[index], self.length[index]
        self.total[index] = 0.0
        self.length[index] = 0
        return finished

    def drop(self, rows: np.ndarray) -> None:
        """Forget the running episodes of `rows` (indices), which a dead worker cut short."""
        self.total[rows] = 0.0
        self.length[rows] = 0

    def save(self) -> dict[str, np.ndarray]:
        return {"episode_total": self.total.copy(), "episode_length": self.length.copy()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.total[:] = arrays["episode_total"]
        self.length[:] = arrays["episode_length"]


class AgentEpisodes:
    """Episodes of several agents: sums `[N, A]`; an episode ends when it has ended for all."""

    def __init__(self, num_envs: int, agents: int) -> None:
        self.total = np.zeros((num_envs, agents), dtype=np.float64)
        self.length = np.zeros(num_envs, dtype=np.int64)

    def clear(self) -> None:
        self.total[:] = 0.0
        self.length[:] = 0

    def update(
        self, reward: np.ndarray, ended: np.ndarray, ignored: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Add one step `[N, A]`; return (index, return, length, return of each agent) of the
        episodes that `ended` `[N]`."""
        self.total += reward
        self.length += 1
        if ignored is not None:
            self.length -= ignored
        index = ended.nonzero()[0]
        agent_return = self.total[index]
        finished = index, agent_return.sum(1), self.length[index], agent_return
        self.total[index] = 0.0
        self.length[index] = 0
        return finished
