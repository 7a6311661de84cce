"""The compiled GRU against torch's cell, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keel.networks.recurrent import GRU


def by_cells(gru: GRU, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
    """Row by row, as the definition says."""
    states = []
    for t in range(x.shape[1]):
        state = torch.where(starts[:, t, None].bool(), 0.0, state)
        state = gru.cell(x[:, t], state)
        states.append(state)
    return torch.stack(states, 1)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 7),
    inputs=st.integers(1, 6),
    size=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_states_and_gradients_are_those_of_torchs_cell(
    rows: int, length: int, inputs: int, size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gru = GRU(inputs, size, generator)
    for parameter in gru.parameters():
        nn.init.normal_(parameter, generator=generator)
    x = torch.randn(rows, length, inputs, generator=generator)
    state = torch.randn(rows, size, generator=generator)
    starts = torch.rand(rows, length, generator=generator) < 0.3
    slope = torch.randn(rows, length, size, generator=generator)

    def gradients(run: object) -> list[Tensor]:
        assert callable(run)
        leaves = [x.clone().requires_grad_(), state.clone().requires_grad_()]
        result = run(*leaves, starts)
        found = torch.autograd.grad((result * slope).sum(), [*leaves, *gru.parameters()])
        return [result.detach(), *found]

    ours = gradients(gru)
    theirs = gradients(lambda *given: by_cells(gru, *given))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_an_episode_that_begins_forgets_all_before_it() -> None:
    gru = GRU(2, 3, torch.Generator().manual_seed(0))
    x = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    starts = torch.tensor([[0, 0, 1, 0]])
    states = gru(x, torch.ones(1, 3), starts)
    (slope,) = torch.autograd.grad(states[:, 2:].sum(), x)
    assert slope[0, :2].abs().max().item() == 0.0
    assert slope[0, 2:].abs().min().item() > 0.0
    alone = gru(x[:, 2:], torch.zeros(1, 3), torch.zeros(1, 2))
    torch.testing.assert_close(states[:, 2:], alone, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_let_through(value: float) -> None:
    gru = GRU(2, 3, torch.Generator().manual_seed(0))
    x = torch.full((1, 2, 2), value)
    assert not torch.isfinite(gru(x, torch.zeros(1, 3), torch.zeros(1, 2))).all() or (
        value == float("inf")  # a gate that is saturated is a number again
    )
