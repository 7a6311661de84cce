"""Penalties that do nothing: a term that changes the loss and not its gradient.

An entropy floor built on `entropy.item()` is one: the loss rises, the policy never feels it, and
the log looks as if it did.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keel.algorithms.optimizer import Loss
from keel.errors import KeelError
from keel.experience.batch import Batch
from keel.networks.agent import Agent
from keel.types import HyperParams

PENALTIES = {
    "entropy_coef": "the entropy bonus",
    "kl_coef": "the KL penalty",
    "bc_coef": "the loss on demonstrations",
}
"""Coefficients that a loss may multiply a term with."""
ROWS = 64
"""Rows that are enough to tell a gradient from none."""
NEARBY = 1e-3
"""Standard deviation of the parameters around those that sampled: there a KL is 0, and flat."""


class DeadPenaltyError(KeelError):
    """A configured penalty has no gradient."""


def check_penalties(
    agent: Agent,
    loss: Loss,
    params: Tensor,
    batch: Batch,
    hparams: HyperParams,
) -> None:
    """Raise if a coefficient changes the loss of some rows and not its gradient.

    Args:
        agent: whose policy it is.
        loss: (agent, parameters, rows, hparams) to a loss per group and statistics.
        params: `[G, P]`.
        batch: a rollout with what it teaches; its first rows are used.
        hparams: as they are.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(params.shape, generator=generator, dtype=params.dtype).to(params.device)
    near = params + NEARBY * noise
    some = batch.split(min(ROWS, batch.rows))[0]

    def evaluate(values: HyperParams) -> tuple[Tensor, Tensor]:
        leaf = near.detach().requires_grad_()
        total = loss(agent, leaf, some, values.tensor().to(params.device))[0].sum()
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    set_now = [name for name in PENALTIES if getattr(hparams, name) != 0.0]
    if not set_now:
        return
    value, gradient = evaluate(hparams)
    for name in set_now:
        without, plain = evaluate(replace(hparams, **{name: 0.0}))
        if bool(value.isfinite()) and value != without and torch.equal(gradient, plain):
            raise DeadPenaltyError(
                f"{name}: {PENALTIES[name]} changes the loss ({without.item():.4g} without, "
                f"{value.item():.4g} with it) but its gradient is exactly 0: the policy never "
                "feels it. Build it from tensors that carry a gradient, not from numbers"
            )
