"""The critic's own optimizer step by compiled loops, for a small MLP; `dense` does both parts.

It does what `make_step` does with a `CriticObjective`; a test holds both to the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.models.agent import FEATURES, Agent
from keel.models.networks import Separate
from keel.regions.critic import CriticObjective
from keel.regions.objective import Batch, Statistics
from keel.regions.stepper import BETAS, EPSILON, Optimum, Step, StepResult
from keel.types import KNOB_INDEX

MOVED, STAYED = torch.tensor([True]), torch.tensor([False])


def fits(agent: Agent, objective: CriticObjective) -> bool:
    """Whether this step can be taken by the compiled loops."""
    network = agent.network
    return (
        isinstance(network, Separate)
        and agent.initial.device.type == "cpu"
        and network.critic.is_small
        and objective.value_clip is None
    )


def make_dense_critic_step(agent: Agent, *, max_grad_norm: float) -> Step:
    """The same function as `make_step` gives, for a critic that fits."""
    # numba is a second and 100 MB, which others need not pay
    from keel.models import kernels
    from keel.models.kernels_adam import adam
    from keel.models.kernels_natural import critic_gradient

    network = agent.network
    assert isinstance(network, Separate)
    sizes, tanh = network.critic.sizes, network.critic.act_name == "tanh"
    size = agent.initial.shape[1] - agent.critic_from
    columns = np.zeros(size, bool)
    gradient, statistics = np.zeros(size, np.float32), np.zeros(9)
    held: dict[str, Any] = {"rows": None, "arrays": (), "desk": (), "size": -1}

    def unpack(rows: Batch) -> None:
        x = rows.obs[FEATURES].numpy()
        numbers = (x.numpy() for x in (rows.log_prob, rows.advantage, rows.target, rows.weight))
        held["arrays"] = x.reshape(x.shape[0], -1).astype(np.float32, copy=False), *numbers
        held["rows"] = rows

    def reserve(count: int) -> None:
        widest = count * int(sizes.max())
        room = np.empty(count * int(sizes.sum()), np.float32)
        spare = np.empty(widest, np.float32), np.empty(widest, np.float32)
        part = tuple(np.empty(count, np.float32) for _ in range(6))
        held["desk"] = room, *spare, part, gradient, statistics
        held["size"] = count

    def step(
        optimum: Optimum, rows: Batch, index: Tensor, real: Tensor, knobs: Tensor, active: Tensor
    ) -> StepResult:
        if held["rows"] is not rows:
            unpack(rows)
        if held["size"] != len(index):
            reserve(len(index))
        params, first, second = (x.numpy()[0] for x in optimum[:3])
        loss = critic_gradient(
            params, sizes, tanh, held["arrays"], index.numpy(), real.numpy(), held["desk"]
        )
        norm = float(statistics[kernels.NORM])
        moves = math.isfinite(norm) and bool(active.item())
        if moves:
            steps, moved = optimum.steps + 1.0, np.empty((3, size), np.float32)
            scale = min(1.0, max_grad_norm / (norm + 1e-6))
            rate = float(knobs[KNOB_INDEX["learning_rate"]])
            ages = steps[0].numpy()
            adam(params, first, second, gradient, scale, rate, BETAS, EPSILON, columns, ages, moved)
            new = [torch.from_numpy(moved[i : i + 1]) for i in range(3)]
            optimum = Optimum(new[0], new[1], new[2], steps)
        seen, nothing = torch.tensor([loss], dtype=torch.float32), torch.zeros(1)
        told = Statistics(seen, nothing, seen, *[nothing] * 5)
        size_of = torch.tensor([norm], dtype=torch.float32)
        return StepResult(optimum, told, size_of, MOVED if moves else STAYED)

    return step
