"""The critic's own optimizer step by compiled loops, for a small MLP; `dense` does both parts.

It does what `make_step` does with a `CriticObjective`; a test holds both to the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.dense import critic_numbers, make_workspace, row_arrays
from keel.algorithms.optimizer import BETAS, EPSILON, Minibatch, StepResult
from keel.experience.batch import Batch
from keel.losses.ppo import Statistics
from keel.networks.actor_critic import FEATURES, SeparateActorCritic
from keel.networks.agent import Agent
from keel.types import HPARAM_INDEX, OptimizerState


class DenseCriticStep:
    """The step that `make_step` gives, for a critic that fits; and a whole pass at once.

    Of a step of 0.3 ms half was spent between steps.
    """

    def __init__(self, agent: Agent, *, max_grad_norm: float) -> None:
        # numba is a second and 100 MB, which others need not pay; here, before threads are limited
        from keel.kernels.natural import critic_sweep

        network = agent.network
        assert isinstance(network, SeparateActorCritic)
        self._pass = critic_sweep
        self._sizes = network.critic.sizes
        tanh = network.critic.act_name == "tanh"
        self._net = self._sizes, tanh, critic_numbers(agent.critic)
        size = agent.initial.shape[1] - agent.critic_from
        self._max_norm, self._columns = max_grad_norm, np.zeros(size, bool)
        self._gradient, self._statistics = np.zeros(size, np.float32), np.zeros(10)
        self._rows: Batch | None = None
        self._arrays: tuple[Any, ...] = ()
        self._workspace: tuple[Any, ...] = ()

    def _prepare(self, rows: Batch, count: int) -> None:
        """Unpack the rows to arrays, and make buffers for a minibatch of `count`."""
        if rows is not self._rows:
            self._rows, self._arrays = rows, row_arrays(rows, FEATURES)
        if not self._workspace or self._workspace[3][0].size != count:
            self._workspace = make_workspace(count, [self._sizes], self._gradient, self._statistics)

    def sweep(
        self, own: OptimizerState, rows: Batch, order: Tensor, minibatch: int, hparams: Tensor
    ) -> tuple[OptimizerState, Tensor]:
        """Run one pass over all rows."""
        self._prepare(rows, minibatch)
        state = torch.cat(own[:3])
        measured = np.zeros((-(-len(order) // minibatch), 2))
        settings = float(hparams[HPARAM_INDEX["learning_rate"]]), self._max_norm, BETAS, EPSILON
        age = self._pass(
            state.numpy(),
            own.steps[0, 1].item(),
            self._net,
            self._arrays,
            order.numpy(),
            self._workspace,
            settings,
            self._columns,
            measured,
        )
        params, first, second = state[:, None].unbind(0)
        steps = torch.full_like(own.steps, age)
        return OptimizerState(params, first, second, steps), torch.from_numpy(measured).float()

    def __call__(self, opt_state: OptimizerState, minibatch: Minibatch) -> StepResult:
        """Take one minibatch; `real` must be 1 for its first rows and 0 for padding after them."""
        rows, index, real, hparams, active = minibatch
        count = int(real.sum())
        moved, measured = opt_state, torch.zeros(1, 2)
        if count and bool(active.item()):
            moved, measured = self.sweep(opt_state, rows, index[:count], len(index), hparams)
        loss, norm = measured[0, :1], measured[0, 1:]
        nothing, applied = torch.zeros(1), active & norm.isfinite()
        return StepResult(
            moved if bool(applied.item()) else opt_state,
            Statistics(loss, nothing, loss, *[nothing] * 6),
            norm,
            applied,
        )
