"""Returns and lengths of the episodes that are under way, for all environments at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

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
