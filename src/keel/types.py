"""Data that several packages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Tree = dict[str, Tensor]


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
    """Damping of TRPO's Fisher matrix."""
    bc_coef: float = 0.0
    """Coefficient of the loss on demonstrations."""
    critic_factor: float = 1.0
    """the critic's learning rate over the policy's"""

    def tensor(self) -> Tensor:
        """Return one vector: constants in a compiled step would recompile it at every change."""
        return torch.tensor([getattr(self, f.name) for f in fields(self)], dtype=torch.float32)


HPARAM_INDEX: Mapping[str, int] = {f.name: i for i, f in enumerate(fields(HyperParams))}


POLICY = torch.tensor([True, False])
"""Mask of `OptimizerState.steps`: the policy's."""


class OptimizerState(NamedTuple):
    """Parameters and Adam's moments `[G, P]`, and the steps taken by policy and critic `[G, 2]`."""

    params: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor


@dataclass(frozen=True)
class AlgorithmState:
    """State of an algorithm between two updates."""

    opt_state: OptimizerState
    rng: torch.Generator
    """source of its shuffling, which advances in place"""
    updates: int = 0
    """Number of updates that were made."""


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
