"""The size of a chunk is a matter of memory, never of the result."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keel.functional import categorical_kl, vocabulary_kl
from keel.functional.vocabulary import vocabulary_comparison

small = st.integers(1, 6)


def leaf(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 7),
    vocabulary=small,
    p_width=small,
    q_width=small,
    max_elements=st.integers(1, 64),
    temperature=st.floats(0.3, 3.0),
)
def test_any_chunking_gives_the_full_kl_and_its_gradients(
    seed, tokens, vocabulary, p_width, q_width, max_elements, temperature
):
    rng = torch.Generator().manual_seed(seed)
    p_hidden, p_head = leaf(rng, tokens, p_width), leaf(rng, vocabulary, p_width)
    q_hidden, q_head = leaf(rng, tokens, q_width), leaf(rng, vocabulary, q_width)
    tensors = (p_hidden, p_head, q_hidden, q_head)
    weights = torch.randn(tokens, generator=rng, dtype=torch.float64)

    chunked = vocabulary_kl(*tensors, temperature=temperature, max_elements=max_elements)
    full = categorical_kl(p_hidden @ p_head.T / temperature, q_hidden @ q_head.T / temperature)

    torch.testing.assert_close(chunked, full)
    torch.testing.assert_close(
        torch.autograd.grad(weights @ chunked, tensors),
        torch.autograd.grad(weights @ full, tensors),
        rtol=1e-7,
        atol=1e-10,
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.integers(2, 300),
    tokens=st.integers(1, 300),
    spread=st.sampled_from([0.0, 1e-3, 0.1, 2.0]),
)
def test_a_comparison_in_float32_is_that_of_float64(seed, vocabulary, tokens, spread):
    rng = torch.Generator().manual_seed(seed)
    p_hidden = torch.randn(tokens, 6, generator=rng)
    head = torch.randn(vocabulary, 6, generator=rng)
    q_hidden = p_hidden + spread * torch.randn(tokens, 6, generator=rng)
    token = torch.randint(0, vocabulary, (tokens,), generator=rng)
    sides = p_hidden, head, q_hidden, head

    found = vocabulary_comparison(*sides, token)
    exact = vocabulary_comparison(*(x.double() for x in sides), token)

    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=5e-3, atol=2e-6)
    if spread == 0.0:
        assert (found.kl == 0.0).all()
    assert (found.kl >= 0.0).all()
    assert (found.kl_reverse >= 0.0).all()
