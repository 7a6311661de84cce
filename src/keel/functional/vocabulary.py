"""Log-probs, entropy and exact KL of tokens over a whole vocabulary, without ever holding tokens ×
vocabulary numbers.

Logits are recomputed from hidden states and the head's weight a few tokens at a time, in the
forward and again in the backward pass (as Cut Cross-Entropy does for the likelihood, 2024, arXiv
2411.09009). The peak is `max_elements` per buffer, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError, ShapeError, expect_rank, expect_shape
from keel.functional.divergence import kl_terms

MAX_ELEMENTS = 1 << 22
"""Logits held at once: 16 MiB in float32; a chunk's temporaries are about twenty times that."""


LOG_ZERO = -1e4
"""A log-probability whose exponential is 0, in place of −∞: 0 · −∞ is not a number."""


class TokenLogProb(NamedTuple):
    """Log-probability and entropy of tokens under a softmax over the vocabulary, `[*lead]` each."""

    log_prob: Tensor
    entropy: Tensor
    """Entropy of the whole distribution, in nats."""


def vocabulary_log_prob(
    hidden: Tensor, head: Tensor, token: Tensor, *, max_elements: int = MAX_ELEMENTS
) -> TokenLogProb:
    """Compute log p(token) and the entropy of p = softmax(hidden · headᵀ), with gradients to both.

    With z the logits, ∂ log p / ∂z = e_token − p  and  ∂ entropy / ∂z = −p · (log p + entropy).

    Args:
        hidden: `[*lead, H]`.
        head: `[V, H]`.
        token: `[*lead]`.
        max_elements: logits that are held at once.
    """
    _expect_head("hidden", hidden, "head", head)
    expect_shape("token", token, tuple(hidden.shape[:-1]), "one for each hidden state")
    rows = max(1, max_elements // head.shape[0])
    flat, chosen = hidden.reshape(-1, head.shape[1]), token.reshape(-1)
    log_prob, entropy = _TokenLogProb.apply(flat, head, chosen, rows)  # type: ignore[no-untyped-call]
    return TokenLogProb(log_prob.reshape(token.shape), entropy.reshape(token.shape))


class _TokenLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, token: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        log_prob, entropy = hidden.new_empty(2, hidden.shape[0]).unbind(0)
        for part in _chunks(hidden.shape[0], rows):
            log_p = _log_probs(hidden[part], head, 1.0)
            log_prob[part] = log_p.gather(1, token[part, None])[:, 0]
            entropy[part] = _entropy(log_p)
        ctx.save_for_backward(hidden, head, token, entropy)
        ctx.rows = rows
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, token, entropy = ctx.saved_tensors
        result = [
            torch.zeros_like(x) if need else None
            for x, need in zip((hidden, head), ctx.needs_input_grad[:2], strict=True)
        ]
        grad_log_prob, grad_entropy = (g[:, None] for g in grads)
        for part in _chunks(hidden.shape[0], ctx.rows):
            log_p = _log_probs(hidden[part], head, 1.0)
            p = log_p.exp()
            pull = log_p.clamp_(min=LOG_ZERO) + entropy[part, None]
            outer = -p * (grad_log_prob[part] + grad_entropy[part] * pull)
            outer.scatter_add_(1, token[part, None], grad_log_prob[part])
            _accumulate(outer, hidden[part], head, result, part)
        return (*result, None, None)


def vocabulary_kl(
    p_hidden: Tensor,
    p_head: Tensor,
    q_hidden: Tensor,
    q_head: Tensor,
    *,
    temperature: float = 1.0,
    max_elements: int = MAX_ELEMENTS,
) -> Tensor:
    """Compute KL(p‖q) per token, `[*lead]`, of p = softmax(p_hidden · p_headᵀ / temperature) and q.

    Gradients flow to all four tensors:  ∂/∂z_q = q − p  and  ∂/∂z_p = p · (log p − log q − KL).

    Args:
        p_hidden: `[*lead, H]`.
        p_head: `[V, H]`.
        q_hidden: `[*lead, H']`; the two models may differ in their width.
        q_head: `[V, H']`.
        temperature: above 0.
        max_elements: logits that are held at once.
    """
    lead = p_hidden.shape[:-1]
    for side, hidden, head in (("p", p_hidden, p_head), ("q", q_hidden, q_head)):
        _expect_head(f"{side}_hidden", hidden, f"{side}_head", head)
    if q_hidden.shape[:-1] != lead or p_head.shape[0] != q_head.shape[0]:
        raise ShapeError(
            f"q: expected tokens {list(lead)} and a vocabulary of {p_head.shape[0]} (those of p), "
            f"got {list(q_hidden.shape[:-1])} and {q_head.shape[0]}"
        )
    if not temperature > 0.0:
        raise InputError(f"temperature: expected a number above 0, got {temperature}")
    rows = max(1, max_elements // p_head.shape[0])
    p_rows, q_rows = p_hidden.reshape(-1, p_head.shape[1]), q_hidden.reshape(-1, q_head.shape[1])
    scale = 1.0 / temperature
    kl: Tensor = _VocabularyKL.apply(p_rows, p_head, q_rows, q_head, scale, rows)  # type: ignore[no-untyped-call]
    return kl.reshape(lead)


class _VocabularyKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        p_hidden: Tensor,
        p_head: Tensor,
        q_hidden: Tensor,
        q_head: Tensor,
        scale: float,
        rows: int,
    ) -> Tensor:
        ctx.save_for_backward(p_hidden, p_head, q_hidden, q_head)
        ctx.scale, ctx.rows = scale, rows
        kl = p_hidden.new_empty(p_hidden.shape[0])
        for part in _chunks(kl.shape[0], rows):
            log_p = _log_probs(p_hidden[part], p_head, scale)
            log_q = _log_probs(q_hidden[part], q_head, scale)
            kl[part] = kl_terms(log_p, log_q).sum(-1)
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p_hidden, p_head, q_hidden, q_head = ctx.saved_tensors
        need = ctx.needs_input_grad
        inputs = (p_hidden, p_head, q_hidden, q_head)
        result = [torch.zeros_like(x) if n else None for x, n in zip(inputs, need, strict=False)]
        for part in _chunks(p_hidden.shape[0], ctx.rows):
            log_p = _log_probs(p_hidden[part], p_head, ctx.scale)
            log_q = _log_probs(q_hidden[part], q_head, ctx.scale)
            outer = (grads[0][part] * ctx.scale).unsqueeze(-1)
            p = log_p.exp()
            if need[2] or need[3]:
                _accumulate(outer * (log_q.exp() - p), q_hidden[part], q_head, result[2:], part)
            if need[0] or need[1]:
                gap = torch.where(p > 0, log_p - log_q, 0.0)
                kl = (p * gap).sum(-1, keepdim=True)
                _accumulate(outer * p * (gap - kl), p_hidden[part], p_head, result[:2], part)
        return (*result, None, None)


class TokenComparison(NamedTuple):
    """Comparison of two distributions over the vocabulary, p and q, at a token: `[*lead]` each."""

    kl: Tensor
    """KL(p‖q)"""
    kl_reverse: Tensor
    """KL(q‖p)"""
    log_prob: Tensor
    """log q(token)"""
    entropy: Tensor
    """Entropy of q, in nats."""


@torch.no_grad()
def vocabulary_comparison(
    p_hidden: Tensor,
    p_head: Tensor,
    q_hidden: Tensor,
    q_head: Tensor,
    token: Tensor,
    *,
    max_elements: int = MAX_ELEMENTS,
) -> TokenComparison:
    """Compute `vocabulary_kl`, both ways, and `vocabulary_log_prob` from logits that are made once.

    There are no gradients.

    Args:
        p_hidden: `[*lead, H]`.
        p_head: `[V, H]`.
        q_hidden: `[*lead, H']`.
        q_head: `[V, H']`.
        token: `[*lead]`.
        max_elements: logits that are held at once.
    """
    _expect_comparable(p_hidden, p_head, q_hidden, q_head, token)
    p_rows, q_rows = p_hidden.reshape(-1, p_head.shape[1]), q_hidden.reshape(-1, q_head.shape[1])
    chosen = token.reshape(-1)
    measures = q_rows.new_empty(4, len(q_rows))
    for part in _chunks(len(q_rows), max(1, max_elements // q_head.shape[0])):
        log_p = _log_probs(p_rows[part], p_head, 1.0)
        log_q = _log_probs(q_rows[part], q_head, 1.0)
        measures[0, part] = kl_terms(log_p, log_q).sum(-1)
        measures[1, part] = kl_terms(log_q, log_p).sum(-1)
        measures[2, part] = log_q.gather(1, chosen[part, None])[:, 0]
        measures[3, part] = _entropy(log_q)
    return TokenComparison(*(x.reshape(token.shape) for x in measures))


def _expect_comparable(
    p_hidden: Tensor, p_head: Tensor, q_hidden: Tensor, q_head: Tensor, token: Tensor
) -> None:
    """Raise unless two distributions are over one vocabulary, and of the same tokens."""
    _expect_head("p_hidden", p_hidden, "p_head", p_head)
    _expect_head("q_hidden", q_hidden, "q_head", q_head)
    lead = tuple(p_hidden.shape[:-1])
    expect_shape("token", token, lead, "one for each hidden state")
    if tuple(q_hidden.shape[:-1]) != lead or len(p_head) != len(q_head):
        raise ShapeError(
            f"q: expected tokens {list(lead)} and a vocabulary of {len(p_head)} (those of p), "
            f"got {list(q_hidden.shape[:-1])} and {len(q_head)}"
        )
    if token.numel() and not 0 <= int(token.min()) <= int(token.max()) < len(q_head):
        raise InputError(
            f"token: expected tokens from 0 to {len(q_head) - 1}, got "
            f"{int(token.min())} to {int(token.max())}"
        )


def _expect_head(name: str, hidden: Tensor, head_name: str, head: Tensor) -> None:
    expect_rank(name, hidden, 1, "[*lead, H]")
    if head.ndim != 2 or head.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"{head_name}: expected [V, {hidden.shape[-1]}] (hidden is "
            f"{list(hidden.shape)}), got {list(head.shape)}"
        )


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _log_probs(hidden: Tensor, head: Tensor, scale: float) -> Tensor:
    return (hidden @ head.T).mul_(scale).log_softmax(-1)


def _entropy(log_p: Tensor) -> Tensor:
    """Return −Σ p·log p, `[N]`; a token that is ruled out (log p = −∞) adds nothing."""
    return -(log_p.exp() * log_p.clamp(min=LOG_ZERO)).sum(-1)


def _accumulate(
    logit_grad: Tensor, hidden: Tensor, head: Tensor, out: list[Tensor | None], part: slice
) -> None:
    """Add the chunk's gradient to `out` = [hidden gradient, head gradient], where wanted."""
    if out[0] is not None:
        out[0][part] = logit_grad @ head
    if out[1] is not None:
        out[1].addmm_(logit_grad.T, hidden)
