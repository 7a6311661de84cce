"""PettingZoo environments whose every number is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Countdown(ParallelEnv):  # type: ignore[type-arg]
    """`long` lives for five steps and has three choices; `short` dies after two and has two.

    A reward is the number of the step plus the action; observations are the step, as often as the
    agent has numbers. `long` may never do what it did last.
    """

    metadata = {"name": "countdown"}  # noqa: RUF012
    possible_agents = ["long", "short"]  # noqa: RUF012
    lives = {"long": 5, "short": 2}  # noqa: RUF012
    sizes = {"long": 3, "short": 2}  # noqa: RUF012

    def __init__(self, cut: bool = False, fail_at: int = -1) -> None:
        self.cut, self.fail_at = cut, fail_at
        self.agents: list[str] = []
        self.time, self.last, self.begun = 0, -1, 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0.0, 9.0, (self.sizes[agent],), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(self.sizes[agent])

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        self.time, self.last = 0, -1
        self.begun += 1
        return self._see(self.agents), self._info(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        if self.time == self.fail_at:
            raise RuntimeError("the machine is on fire")
        acted = list(self.agents)
        self.time += 1
        self.last = int(actions["long"])
        rewards = {name: float(self.time + actions[name]) for name in acted}
        over = {name: self.time >= self.lives[name] for name in acted}
        no = dict.fromkeys(acted, False)
        self.agents = [name for name in acted if not over[name]]
        ends = (no, over) if self.cut else (over, no)
        return self._see(acted), rewards, *ends, self._info(acted)

    def _see(self, names: list[str]) -> dict[str, Any]:
        return {name: np.full(self.sizes[name], self.time, np.float32) for name in names}

    def _info(self, names: list[str]) -> dict[str, Any]:
        return {
            name: {"action_mask": np.arange(3) != self.last} if name == "long" else {}
            for name in names
        }


class Stated(Countdown):
    """The same with a state of its own."""

    def state(self) -> np.ndarray:
        return np.array([self.time, 7.0], np.float32)


class Vanishing(Countdown):
    """Ends without telling anybody: neither terminated nor truncated, the agents are just gone."""

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, *_, info = super().step(actions)
        self.agents = []
        no = dict.fromkeys(actions, False)
        return seen, rewards, no, no, info


class Mixed(Countdown):
    """One agent counts, the other is moved."""

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2) if agent == "long" else spaces.Box(-1.0, 1.0, (2,), np.float32)


class Forgetful(Stated):
    """Has no state as soon as an agent is gone, as PettingZoo's multiwalker."""

    def state(self) -> np.ndarray:
        if len(self.agents) < 2:
            raise AttributeError("'NoneType' object has no attribute 'position'")
        return super().state()


class Stateless(Stated):
    """Fails while everybody is there, from step `broken_at` on; −1: from the start."""

    broken_at = 1

    def state(self) -> np.ndarray:
        if self.time >= self.broken_at:
            raise ValueError("no state today")
        return super().state()


class Attribute(Countdown):
    """Has something else of that name, as PettingZoo's rps."""

    state = {"long": 0}  # type: ignore[assignment]  # noqa: RUF012


class Growing(Stated):
    """Its state has another size in every step."""

    def state(self) -> np.ndarray:
        return np.zeros(2 + self.time, np.float32)


class Nim(AECEnv):  # type: ignore[type-arg]
    """Two players take one or two of five sticks in turn; who takes the last wins."""

    metadata = {"name": "nim", "is_parallelizable": False}  # noqa: RUF012
    possible_agents = ["first", "second"]  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict(
            {
                "observation": spaces.Box(0.0, 5.0, (1,), np.float32),
                "action_mask": spaces.Box(0, 1, (2,), np.int8),
            }
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {name: {} for name in self.agents}
        self.sticks, self.agent_selection = 5, "first"

    def observe(self, agent: str) -> dict[str, np.ndarray]:
        mine = agent == self.agent_selection
        mask = np.array([mine and self.sticks >= 1, mine and self.sticks >= 2], np.int8)
        return {"observation": np.array([self.sticks], np.float32), "action_mask": mask}

    def step(self, action: Any) -> None:
        mover = self.agent_selection
        if self.terminations[mover]:
            self._was_dead_step(action)
            return
        other = "second" if mover == "first" else "first"
        assert self.observe(mover)["action_mask"][action], "an illegal move"
        self.sticks -= int(action) + 1
        self._cumulative_rewards[mover] = 0.0
        self._clear_rewards()
        if self.sticks == 0:
            self.rewards = {mover: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other


class Counting(Countdown):
    """Observes a number of a few, as PettingZoo's rps."""

    sizes = {"long": 3, "short": 2}  # noqa: RUF012

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(10)

    def _see(self, names: list[str]) -> dict[str, Any]:
        return dict.fromkeys(names, self.time)
