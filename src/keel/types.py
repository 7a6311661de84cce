"""Data that several packages share. `lead` is `[T, N]`, with agents `[T, N, A]`.

A row with weight 0 does not exist for anything downstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Tree = dict[str, Tensor]


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

    def to(self, device: torch.device) -> Rollout:
        """Return a copy on another device; itself where it already is."""
        if self.weight.device == device:
            return self

        def move(x: object) -> object:
            if isinstance(x, Tensor):
                return x.to(device)
            return {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else x

        return Rollout(**{f.name: move(getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class HyperParams:
    """Values in force now, which schedules and controllers change while a run goes on."""

    learning_rate: float = 3e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    temperature: float = 1.0
    max_kl: float = 0.05
    damping: float = 0.1
    """of TRPO's Fisher matrix"""
    bc_coef: float = 0.0
    """of the loss on demonstrations"""
    critic_factor: float = 1.0
    """the critic's learning rate over the policy's"""

    def tensor(self) -> Tensor:
        """Return one vector: constants in a compiled step would recompile it at every change."""
        return torch.tensor([getattr(self, f.name) for f in fields(self)], dtype=torch.float32)


HPARAM_INDEX: Mapping[str, int] = {f.name: i for i, f in enumerate(fields(HyperParams))}


POLICY = torch.tensor([True, False])
"""Which of `OptimizerState.steps` is the policy's."""


class OptimizerState(NamedTuple):
    """Parameters and Adam's moments `[G, P]`, and the steps taken by policy and critic `[G, 2]`."""

    params: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor


@dataclass(frozen=True)
class UpdateReport:
    """Effect of an update on the policy, measured over all rows of its rollout.

    Tensors are `[G]`, one value for every row of the parameters.
    """

    kl_exact: Tensor
    """mean KL(old‖new) of the policy that was kept"""
    kl_requested: Tensor
    """the same before anything was walked back: what controllers steer by"""
    alpha: Tensor
    """share of the step that was kept"""
    verdict: Literal["accepted", "walked_back", "rejected"] = "accepted"
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, Tensor] = field(default_factory=dict)
    """metrics of which every agent has its own, `[A]` each; empty for a single one"""
