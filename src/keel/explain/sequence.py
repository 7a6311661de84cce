"""`keel explain sequence`: the KL of a sequence of tokens: per token, summed, and averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from keel.errors import InputError, check_choice
from keel.explain.explanation import Explanation, Table, bits, make_table, number, texts_of
from keel.explain.figures import legend_below
from keel.explain.inputs import check_finite, check_mask, check_names
from keel.functional import aggregate, k3
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Terms = Literal["log-ratio", "kl"]

LARGEST = 1e6
"""Nats of one token beyond which a number is a mask value or a mistake, and no log-ratio."""
NAMED_TICKS = 12
"""Tokens that a picture has room to name; of more, every second or third is named."""
CROWDED = 48
"""Letters beyond which the names are turned, so that they do not run into each other."""


@dataclass(frozen=True)
class _Terms:
    """Terms of one sequence of L tokens.

    Attributes:
        labels: Names of the tokens.
        value: KL terms or log-ratios `[L]`, in nats.
        mask: Tokens that count `[L]`, bool.
        k3: The k3 estimate of each token `[L]`; None where the terms are KLs already.
    """

    labels: list[str]
    value: Tensor
    mask: Tensor
    k3: Tensor | None

    @property
    def symbol(self) -> str:
        return "KL" if self.k3 is None else "Δ"

    def sum(self, x: Tensor) -> float:
        """Return the sum of `x` `[L]` over the tokens that count."""
        return aggregate(x, self.mask.double(), "token-sum").item()

    def mean(self, x: Tensor) -> float:
        """Return the mean of `x` `[L]` over the tokens that count."""
        return aggregate(x, self.mask.double(), "token-mean").item()

    def running(self, x: Tensor) -> Tensor:
        """Return the sum of `x` up to each token `[L]`."""
        return torch.where(self.mask, x, 0.0).cumsum(0)


def explain_sequence(
    values: Sequence[float] = (0.1, 0.5, 0.2, -0.1),
    *,
    mask: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
    terms: Terms = "log-ratio",
) -> Explanation:
    """Explain the KL of one sampled sequence: per token, the sum, and the masked mean.

    Args:
        values: One term per token `[L]`, in nats: log π(token) − log π_ref(token), or the KL of
            all tokens at its position.
        mask: 1 for each token that counts, 0 for a prompt, tool output or padding `[L]`.
        names: The tokens `[L]`; by default their positions.
        terms: What the values are: `log-ratio`, or `kl` for exact KLs, which are never negative.

    Examples:
        >>> round(explain_sequence([0.1, 0.5, 0.2, -0.1]).numbers["sum_nats"], 3)
        0.7
    """
    sequence = _read(values, mask, names, terms)
    total, mean = sequence.sum(sequence.value), sequence.mean(sequence.value)
    counted_tokens = int(sequence.mask.sum())
    return Explanation(
        f"A sequence of {number(total, 4)} nats, {number(mean, 4)} a token",
        *texts_of(f"sequence_{terms.replace('-', '_')}"),
        tables=(_token_table(sequence), _sequence_table(sequence)),
        meaning=_meaning(sequence, total),
        numbers={
            "terms": terms,
            "tokens": _token_numbers(sequence),
            "counted_tokens": counted_tokens,
            "sum_nats": total,
            "sum_bits": bits(total),
            "mean_nats": mean,
            "mean_bits": bits(mean),
            **_log_ratio_numbers(sequence, total),
        },
        draw=lambda figure: _draw(figure, sequence),
    )


def _read(
    values: Sequence[float], mask: Sequence[float] | None, names: Sequence[str] | None, terms: Terms
) -> _Terms:
    """Check the input, and return it as tensors; what a mask leaves out may hold any number."""
    check_choice("terms", terms, get_args(Terms))
    if not values:
        raise InputError("terms: empty; a sequence needs at least one token")
    counts = check_mask("mask", mask, "tokens", len(values))
    check_finite(**{f"token {i + 1}": x for i, x in enumerate(values) if counts[i]})
    for position, value in enumerate(values):
        if counts[position] and abs(value) > LARGEST:
            raise InputError(
                f"token {position + 1}: {value:g} nats is no log-ratio of a token; "
                "is it padding that --mask should leave out?"
            )
        if counts[position] and terms == "kl" and value < 0.0:
            raise InputError(
                f"token {position + 1}: {value:g} is negative, and no KL is; "
                "log-ratios may be: --terms log-ratio"
            )
    positions = [str(position + 1) for position in range(len(values))]
    labels = positions if names is None else check_names(names, len(values), "tokens")
    term = torch.tensor(values, dtype=torch.float64)
    low_variance = k3(term, torch.zeros_like(term)) if terms == "log-ratio" else None
    return _Terms(labels, term, torch.tensor(counts), low_variance)


def _token_numbers(sequence: _Terms) -> list[dict[str, Any]]:
    rows = []
    running = sequence.running(sequence.value).tolist()
    for position, name in enumerate(sequence.labels):
        row: dict[str, Any] = {
            "name": name,
            "counts": bool(sequence.mask[position]),
            "term_nats": sequence.value[position].item(),
            "running_sum_nats": running[position],
        }
        if sequence.k3 is not None:
            row["k3_nats"] = sequence.k3[position].item()
        rows.append(row)
    return rows


def _log_ratio_numbers(sequence: _Terms, total: float) -> dict[str, float]:
    """Return what log-ratios tell beside their sum and mean; nothing for KLs."""
    if sequence.k3 is None:
        return {}
    return {
        "k3_sum_nats": sequence.sum(sequence.k3),
        "k3_mean_nats": sequence.mean(sequence.k3),
        "likelihood_ratio": math.exp(total) if total < 700.0 else math.inf,
    }


def _token_table(sequence: _Terms) -> Table:
    columns = ["token", "counts", sequence.symbol, "in bits", "running sum"]
    if sequence.k3 is not None:
        columns.append("k3 ≥ 0")
    rows = []
    for token in _token_numbers(sequence):
        name, counts, value, *others = token.values()
        shown = others if counts else [math.nan] * len(others)
        rows.append((name, str(int(counts)), value, bits(value), *shown))
    return make_table("Token by token, in nats", columns, rows)


def _sequence_table(sequence: _Terms) -> Table:
    counted = f"{int(sequence.mask.sum())} of {len(sequence.labels)}"
    rows = [
        (f"{name} of {symbol}", x, bits(x), estimates)
        for symbol, values in ((sequence.symbol, sequence.value), ("k3", sequence.k3))
        if values is not None
        for name, x, estimates in (
            ("sum", sequence.sum(values), "KL(π‖π_ref) of whole sequences"),
            ("masked mean", sequence.mean(values), "KL(π‖π_ref) a token"),
        )
    ]
    title = f"The sequence, of which {counted} tokens count: one sample"
    return make_table(title, ("", "nats", "bits", "what it estimates"), rows, digits=5)


def _meaning(sequence: _Terms, total: float) -> str:
    if sequence.k3 is None:
        return (
            "Only the tokens are sampled here, not the KL at each of them: its average over "
            "sequences drawn from π is the KL of sequences, with less noise than log-ratios have."
        )
    ratio = f"{math.exp(total):.3g}" if abs(total) < 10.0 else f"e^{number(total, 1)}"
    text = (
        f"Exact: π makes these tokens {ratio} times as likely as π_ref does. As a KL it is one "
        f"sample. Δ and k3 have the same average over sequences drawn from π; here they say "
        f"{number(total, 4)} and {number(sequence.sum(sequence.k3), 4)}, and only more sequences "
        "can tell."
    )
    if total < 0.0:
        text += " A sample below 0 is no negative KL."
    return text


def _draw(figure: Figure, sequence: _Terms) -> None:
    left, right = figure.subplots(1, 2)
    positions = [position for position, counts in enumerate(sequence.mask.tolist()) if counts]
    for series, offset, color, name in (
        (sequence.value, -0.18, BLUE, sequence.symbol),
        (sequence.k3, 0.18, ORANGE, "k3, never negative"),
    ):
        if series is not None:
            label = f"{name}: sum {number(sequence.sum(series), 3)}"
            at = [position + offset for position in positions]
            left.bar(at, series[positions].tolist(), 0.36, color=color, label=label)
            running = sequence.running(series).tolist()
            right.plot(range(len(running)), running, "o-", color=color, linewidth=2)
    mean = sequence.mean(sequence.value)
    label = f"masked mean of {sequence.symbol}: {number(mean, 3)}"
    left.axhline(mean, color=GREEN, linewidth=2, label=label)
    for axes, title in ((left, "Token by token"), (right, "Summed up to each token")):
        axes.axhline(0.0, color=INK, linewidth=0.8)
        tidy(axes, title, "", "nats")
        _mark_tokens(axes, sequence)
    legend_below(figure, left)


def _mark_tokens(axes: Axes, sequence: _Terms) -> None:
    """Name the tokens where there is room, and shade those that do not count."""
    masked = [position for position, counts in enumerate(sequence.mask.tolist()) if not counts]
    for position in masked:
        label = "does not count" if position == masked[0] else None
        axes.axvspan(
            position - 0.5, position + 0.5, color=GREY, alpha=0.18, linewidth=0, label=label
        )
    length = len(sequence.labels)
    axes.set_xlim(-0.6, length - 0.4)
    every = math.ceil(length / NAMED_TICKS)
    named = sequence.labels[::every]
    axes.set_xticks(range(0, length, every), named)
    if max(map(len, named)) * len(named) > CROWDED:
        for text in axes.get_xticklabels():
            text.set(rotation=30, ha="right", rotation_mode="anchor")
    axes.grid(False, axis="x")
