"""A rollout of environments: steps `[T, N]`, with agents `[T, N, A]`, and its rows as a batch.

`lead` is the shape of its steps. A row with weight 0 does not exist for anything downstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.distributions.actions import Array
from keel.envs.protocol import Obs
from keel.experience.batch import Batch
from keel.types import Tree

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
    episode (`keel.keys.EPISODE_STARTS`), where the state is reset."""
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
