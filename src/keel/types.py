"""What several packages share: keys of observations, hyperparameters, the state of an optimizer.

Environments know the keys, so torch is not imported here. All keys of observations but those below
are the environment's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Tree: TypeAlias = "dict[str, Tensor]"

MASK = "action_mask"
"""bool `[…, K]`: what is legal."""
GROUP = "group"
"""Key in an environment's info: the group of every row, from 0."""
AGENT = "agent"
"""int64 `[N, A]`: the number of each of several agents."""
STATE = "state"
"""float32 `[N, A, S]`: what a centralised critic sees, and actors do not."""
EPISODE_STARTS = "memory/starts"
"""bool `[N]`: which rows begin an episode, for recurrent networks."""
ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE = "memory/actor", "memory/critic"
"""float32 `[N, H]`: recurrent states of actor and critic; the text of the keys is that on disk."""
RESERVED = (EPISODE_STARTS, ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE)
"""Keys that stand beside those of an observation, which therefore must not have them."""
ENCODING, FIRST_ENCODING = 2, 1
"""How observations become the numbers that a network sees: in new runs, and in those of version
0.1. There, MultiDiscrete observations are numbers in place of one-hot vectors, images of bytes are
divided by 255, other images are taken as they are or normalized like vectors."""
SMALLEST_IMAGE = 7
"""Height and width from which an observation of rank 3 is an image; a smaller one is a board."""


def is_image_shape(shape: tuple[int, ...]) -> bool:
    """Return whether an observation `[C, H, W]` is an image that a CNN can take."""
    return len(shape) == 3 and min(shape[1:]) >= SMALLEST_IMAGE


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
        import torch

        return torch.tensor([getattr(self, f.name) for f in fields(self)], dtype=torch.float32)


HPARAM_INDEX: Mapping[str, int] = {f.name: i for i, f in enumerate(fields(HyperParams))}


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
