"""Micro-batches: a gradient in pieces is that of the whole minibatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keel.algorithms.optimizer import Minibatch, StepResult, initial_opt_state, make_step
from keel.experience.batch import Batch
from keel.functional import aggregate, denominator
from keel.losses.ppo import Statistics
from keel.networks.agent import Agent
from keel.types import HyperParams

from .conftest import build


class Surrogate:
    """−A·log π, over the number of rows that count in the whole minibatch."""

    def denominator(self, batch: Batch) -> Tensor:
        return denominator(batch.weight)

    def __call__(
        self,
        agent: Agent,
        params: Tensor,
        batch: Batch,
        hparams: Tensor,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Statistics]:
        total = self.denominator(batch) if total is None else total
        log_prob = agent.dist.log_prob(agent.policy(params, batch.obs), batch.action)
        each = -batch.advantage * log_prob
        loss = aggregate(each, batch.weight, denominator_of_batch=total).reshape(1)
        largest = batch.advantage.max().reshape(1)
        nothing = torch.zeros(1)
        told = Statistics(loss.detach(), *[nothing] * 8)
        return loss, told._replace(log_ratio_max=largest)


def step_of(**pieces: Any) -> StepResult:
    setting = build((30,))
    step = make_step(setting.agent, Surrogate(), max_grad_norm=1e9, **pieces)
    index = torch.randperm(30, generator=torch.Generator().manual_seed(1))[:20]
    real = (torch.arange(20) < 17).float()
    return step(
        initial_opt_state(setting.opt_state.params),
        Minibatch(
            setting.batch,
            index,
            real,
            HyperParams(learning_rate=1e-2).tensor(),
            torch.ones(1, dtype=torch.bool),
        ),
    )


@pytest.mark.parametrize(
    "pieces",
    [
        {"micro": 1},
        {"micro": 7},
        {"micro": 64},
        {"micro": 7, "workers": 2},
        {"workers": 2},
        {"workers": 3},
    ],
)
def test_pieces_add_up_to_their_minibatch(pieces: dict[str, int]) -> None:
    whole, parts = step_of(), step_of(**pieces)
    assert whole.gradient_norm.item() > 1e-3
    torch.testing.assert_close(parts.gradient_norm, whole.gradient_norm)
    torch.testing.assert_close(parts.statistics, whole.statistics)
    torch.testing.assert_close(parts.opt_state.first, whole.opt_state.first)
    torch.testing.assert_close(parts.opt_state.params, whole.opt_state.params, rtol=1e-4, atol=1e-5)
