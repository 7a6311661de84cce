"""A rollout of environments, and how it is collected: numpy all the way, no Python per environment.

Its steps are `[T, N]`, with agents `[T, N, A]`; `lead` is their shape. A row with weight 0 does not
exist for anything downstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from keel.distributions.actions import Array
from keel.envs.protocol import Envs, Obs, Step, lead
from keel.experience.acting import Acted, initial_hidden_state, make_actor
from keel.experience.batch import Batch
from keel.networks.agent import Agent
from keel.types import EPISODE_STARTS, MASK, Tree

if TYPE_CHECKING:
    from keel.envs import ObsNormalizer


class Episodes(NamedTuple):
    """Episodes that ended during a rollout: raw returns and lengths."""

    returns: Array = np.zeros(0)
    lengths: Array = np.zeros(0, np.int64)
    agents: Array | None = None
    """`[E, A]`: the returns of each agent, where there are several"""
    measures: Mapping[str, Array] = MappingProxyType({})
    """`[E]` each: measures that the environment itself gives"""


class RawObs(NamedTuple):
    """Observations of a rollout as the environments gave them, before they were normalized."""

    rows: Obs
    """`[T, N, …]`"""
    last: Obs
    """`[N, …]`: after the last row"""
    final: Obs | None
    """`[K, …]`: the last of truncated episodes, as `Rollout.final_obs`"""


@dataclass(frozen=True)
class Rollout:
    """Observations, actions and rewards, and the distribution that the actions came from."""

    obs: Tree
    """`[*lead, …]`: exactly what the network saw, already normalized."""
    action: Tensor
    """`[*lead]` or `[*lead, D]`; for squashed Gaussians the pre-squash action."""
    log_prob: Tensor
    """`[*lead]`: of `action` under `behavior`."""
    behavior: Tree
    """`[*lead, K]`: parameters of the sampling distribution, after mask and temperature."""
    reward: Tensor
    """`[*lead]`: normalized, if rewards are."""
    terminated: Tensor
    truncated: Tensor
    weight: Tensor
    """`[*lead]`: 0 for autoreset rows, dead agents, prompts, tool text, padding."""
    last_obs: Tree
    """`[*lead[1:], …]`: after the last row."""
    final_obs: Tree | None = None
    """`[K, …]`: last observations of truncated episodes, where the next row does not hold them."""
    final_index: Tensor | None = None
    """`[K]`: their rows, counted through the flattened lead."""
    hidden_state: Tree | None = None
    """`[*lead[1:], H]`: recurrent states before the first row; `obs` also say which rows begin an
    episode (`keel.types.EPISODE_STARTS`), where the state is reset."""
    group_axis: int | None = None
    """The agent axis of `lead`; None means one group."""
    agents: tuple[str, ...] = ()
    """their names"""
    temperature: float = 1.0
    value: Tensor | None = None
    """`[*lead]`, where the actor's pass gave it"""
    raw_reward: Array | None = None
    """`[*lead]`: neither normalized nor clipped"""
    raw_obs: RawObs | None = None
    """None where nothing is normalized"""
    episodes: Episodes = field(default_factory=Episodes)

    def to(self, device: torch.device) -> Rollout:
        """Return a copy on another device; itself where it already is."""
        if self.weight.device == device:
            return self

        def move(x: object) -> object:
            if isinstance(x, Tensor):
                return x.to(device)
            return {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else x

        return Rollout(**{f.name: move(getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]

    def normalized_by(self, normalizer: ObsNormalizer) -> Rollout:
        """Return the rollout with its observations as another normalizer shows them."""
        if self.raw_obs is None:
            return self

        def normalized(raw: Obs) -> dict[str, Tensor]:
            values = normalizer.apply(raw)
            return {key: torch.from_numpy(values[key]) for key in normalizer.scaling}

        final = self.final_obs
        if final is not None and self.raw_obs.final is not None:
            final = final | normalized(self.raw_obs.final)
        return replace(
            self,
            obs=self.obs | normalized(self.raw_obs.rows),
            last_obs=self.last_obs | normalized(self.raw_obs.last),
            final_obs=final,
        )

    def batch(self) -> Batch:
        """Return its steps as rows `[T·N, *rest]` without a copy; recurrent, `[N, T]`."""
        axis = self.group_axis
        flat = self.as_rows(
            {"action": self.action, "log_prob": self.log_prob, "weight": self.weight}
        )
        return Batch(
            obs=self.obs_rows(self.obs),
            behavior=self.as_rows(self.behavior),
            action=flat["action"],
            log_prob=flat["log_prob"],
            weight=flat["weight"],
            group_axis=None if axis is None else axis - 1,
        )

    def as_rows(self, tree: Tree) -> Tree:
        """Reorder tensors `[T, N, …]` as rows."""
        if self.hidden_state is None:
            return {key: x.reshape(-1, *x.shape[2:]) for key, x in tree.items()}
        return {key: x.transpose(0, 1).contiguous() for key, x in tree.items()}

    def obs_rows(self, obs: Tree) -> Tree:
        """Return observations as the network takes them: sequences with their hidden state."""
        return self.as_rows(obs) | (self.hidden_state or {})


@dataclass
class Collector:
    """Environments with the place they stand at, and the storage of rollouts; one per run."""

    envs: Envs
    agent: Agent
    steps: int
    obs: Obs
    """Next observations, `[N, …]`, raw."""
    rng: np.random.Generator
    hidden_state: dict[str, Array] = field(default_factory=dict)
    """recurrent states, `[N, H]` each"""
    episode_starts: Array = field(default_factory=lambda: np.zeros(0, bool))
    """`[N]` bool: whose `obs` begins an episode"""
    _store: dict[str, Array] = field(default_factory=dict)

    def begin(self, obs: Obs) -> None:
        """Reset hidden states: `obs` are the first of new episodes."""
        self.obs = obs
        self.episode_starts = np.ones(self.envs.num_envs, bool)
        self.hidden_state = initial_hidden_state(self.agent, self.envs.num_envs)

    def collect(
        self, params: Tensor, temperature: float, normalizer: ObsNormalizer | None
    ) -> Rollout:
        """Take `steps` steps of all environments with a frozen policy.

        Args:
            params: `[G, P]`.
            temperature: of the policy.
            normalizer: of the observations; None leaves them raw.
        """
        act = make_actor(self.agent, params)
        store, steps = self._allocate(normalizer), self.steps
        finished: list[Step] = []
        finals: list[tuple[Array, Obs]] = []
        dist, recurrent = self.agent.dist, self.agent.recurrent
        before = self.hidden_state
        same_step = self.envs.autoreset == "same_step"
        noise = dist.noise((steps, *lead(self.envs)), self.rng)
        acted = Acted()
        stored, raw = _under(store, "obs/"), _under(store, "raw/")
        outputs, actions, rewards = store["output"], store["action"], store["reward"]
        terminated, truncated, ignored = (store[k] for k in ("terminated", "truncated", "ignored"))
        for t in range(steps):
            obs = self._see(self.obs, normalizer)
            if recurrent:
                obs = {**obs, EPISODE_STARTS: self.episode_starts}
            for key, buffer in stored.items():
                _copy(buffer[t], obs[key])
            obs = {key: x[t] for key, x in stored.items()}  # act on what will be learned from
            for key, x in raw.items():
                x[t] = self.obs[key]
            output = outputs[t]
            acted = act({**obs, **self.hidden_state} if recurrent else obs, output)
            action = dist.sample(output, obs.get(MASK), temperature, noise[t])
            actions[t] = action
            if acted.value is not None:
                store["value"][t] = acted.value
            step = self.envs.step(dist.to_env(action))
            rewards[t], ignored[t] = step.reward, step.ignored
            terminated[t], truncated[t] = step.terminated, step.truncated
            if step.final_obs is not None:
                where, last = step.final_obs
                finals.append((where + t * self.envs.num_envs, last))
            if step.episode_index.size:
                finished.append(step)
            self.obs = step.obs
            if acted.hidden_state is not None:
                self.hidden_state = acted.hidden_state
                over = step.terminated | step.truncated
                self.episode_starts = step.ignored | over if same_step else step.ignored
        valued = acted.value is not None
        return self._finish(store, finals, finished, temperature, normalizer, valued, before)

    def _see(self, obs: Obs, normalizer: ObsNormalizer | None) -> Obs:
        return obs if normalizer is None else normalizer.apply(obs)

    def _finish(
        self,
        store: dict[str, Array],
        finals: list[tuple[Array, Obs]],
        finished: list[Step],
        temperature: float,
        normalizer: ObsNormalizer | None,
        valued: bool,
        hidden_state: dict[str, Array],
    ) -> Rollout:
        # A row lost with its worker cuts its episode off before it: the row above was the last.
        lost = store["ignored"][1:] & store["truncated"][1:]
        store["truncated"][:-1] |= lost
        tensors = {name: torch.from_numpy(x) for name, x in store.items()}
        obs = _under(tensors, "obs/")
        behavior = self.agent.dist.params(tensors["output"], obs.get(MASK), temperature)
        last = self._see(self.obs, normalizer)
        raw_final = _stack([final for _, final in finals])
        final = None
        if raw_final is not None:
            final = _tensors(self._see(raw_final, normalizer))
        if self.agent.recurrent:
            last = {**last, EPISODE_STARTS: self.episode_starts}
        raw = _under(store, "raw/")
        return Rollout(
            obs=obs,
            action=tensors["action"],
            log_prob=self.agent.dist.log_prob(behavior, tensors["action"]),
            behavior=behavior,
            reward=tensors["reward"],
            terminated=tensors["terminated"],
            truncated=tensors["truncated"],
            weight=1.0 - tensors["ignored"].float(),
            last_obs=_tensors(last),
            final_obs=final,
            final_index=_join([index for index, _ in finals]),
            hidden_state=_tensors(hidden_state) or None,
            group_axis=2 if self.envs.agents else None,
            agents=self.envs.agents,
            temperature=temperature,
            value=tensors["value"] if valued else None,
            raw_reward=store["reward"],
            raw_obs=RawObs(raw, self.obs, raw_final) if raw else None,
            episodes=_ended(finished),
        )

    def _allocate(self, normalizer: ObsNormalizer | None) -> dict[str, Array]:
        """Return the storage, which the first rollout allocates for all later ones."""
        if self._store:
            return self._store
        shape = (self.steps, *lead(self.envs))
        dist = self.agent.dist
        some = np.zeros((*shape[1:], dist.outputs), np.float32)
        noise = dist.noise(shape[1:], np.random.default_rng(0))
        action = dist.sample(some, self.obs.get(MASK), 1.0, noise)
        store = {
            "output": _aligned((*shape, dist.outputs), np.float32),
            "action": np.zeros((self.steps, *action.shape), action.dtype),
            "value": np.zeros(shape, np.float32),
            "reward": np.zeros(shape, np.float32),
            **{name: np.zeros(shape, bool) for name in ("terminated", "truncated", "ignored")},
        }
        if self.agent.recurrent:
            store[f"obs/{EPISODE_STARTS}"] = np.zeros(shape, bool)
        for key, x in self.obs.items():
            store[f"obs/{key}"] = _frames((self.steps, *x.shape), x.dtype)
            if normalizer is not None and key in normalizer.moments:
                store[f"raw/{key}"] = np.zeros((self.steps, *x.shape), x.dtype)
        self._store = store
        return store


X = TypeVar("X")


def _under(store: dict[str, X], prefix: str) -> dict[str, X]:
    return {k.removeprefix(prefix): x for k, x in store.items() if k.startswith(prefix)}


def _aligned(shape: tuple[int, ...], kind: Any) -> Array:
    """Return zeros in torch's memory: what is computed from them must round alike everywhere."""
    zeros: Array = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, kind)).dtype).numpy()
    return zeros


def _frames(shape: tuple[int, ...], kind: Any) -> Array:
    """Return a buffer for observations; images `[T, N, C, H, W]` lie with their channels last, so
    that this is done once and not for every minibatch."""
    if len(shape) != 5:
        return _aligned(shape, kind)
    channels, height, width = shape[2:]
    return _aligned((*shape[:2], height, width, channels), kind).transpose(0, 1, 4, 2, 3)


def _copy(buffer: Array, x: Array) -> None:
    """Copy `x` into a buffer; images channel by channel, which is four times faster where the
    buffer has channels last and x has them first."""
    if buffer.ndim != 4:
        buffer[:] = x
        return
    for channel in range(buffer.shape[1]):
        buffer[:, channel] = x[:, channel]


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(x) for key, x in arrays.items()}


def _stack(parts: list[Obs]) -> Obs | None:
    if not parts:
        return None
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


def _ended(steps: list[Step]) -> Episodes:
    if not steps:
        return Episodes()
    own = [step.agent_return for step in steps if step.agent_return is not None]
    return Episodes(
        np.concatenate([step.episode_return for step in steps]),
        np.concatenate([step.episode_length for step in steps]),
        np.concatenate(own) if own else None,
        _measures(steps),
    )


def _measures(steps: list[Step]) -> dict[str, Array]:
    measures = [step.episode_measures for step in steps if step.episode_measures is not None]
    return {
        key: np.concatenate([x[key] for x in measures]) for key in (measures[0] if measures else ())
    }


def _join(parts: list[Array]) -> Tensor | None:
    return torch.from_numpy(np.concatenate(parts)) if parts else None
