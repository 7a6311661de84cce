"""A sample that the user names: what its log-ratios average to, and which KL that estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keel.errors import InputError, check_choice
from keel.explain.explanation import Explanation, Table, number
from keel.explain.inputs import check_names
from keel.explain.kl_estimates import Estimate, estimate_from
from keel.functional import k1, k3

MAX_DIGITS = 15


@dataclass(frozen=True)
class GivenSample:
    """Estimates from outcomes that the user names.

    Attributes:
        outcomes: The outcomes, in their order.
        k1: Mean of log P − log Q.
        k3: Mean of Q/P − 1 + log P − log Q.
        flipped: Mean of log Q − log P.
        rounded: The same from logarithms of `digits` digits; None unless asked for.
        digits: Digits of those logarithms.
        samples_needed: Samples of P for a k1 whose standard error is as small as KL(P‖Q) itself.
    """

    outcomes: list[str]
    k1: Estimate
    k3: Estimate
    flipped: Estimate
    rounded: Estimate | None
    digits: int | None
    samples_needed: float


def label_outcomes(
    names: Sequence[str] | None, sample: Sequence[str] | None, outcomes: int
) -> list[str]:
    """Return the names of the outcomes; without `names`, a sample may name them in its order."""
    labels = check_names(names, outcomes)
    if sample is None:
        return labels
    duplicates = [name for name in labels if labels.count(name) > 1]
    if duplicates:
        raise InputError(
            f"names: {duplicates[0]!r} names two outcomes; a sample needs different names"
        )
    if names is None:
        first_seen = list(dict.fromkeys(name.strip() for name in sample))
        if len(first_seen) == outcomes and not set(first_seen) & set(labels):
            return first_seen
    return labels


def read_sample(
    sample: Sequence[str],
    labels: Sequence[str],
    log_p: Tensor,
    log_q: Tensor,
    digits: int | None = None,
) -> GivenSample:
    """Return what a sample says about KL(P‖Q).

    Args:
        sample: Names of the outcomes that were drawn `[N]`.
        labels: Names of all outcomes `[A]`.
        log_p: Logarithms of P `[A]`.
        log_q: Logarithms of Q `[A]`.
        digits: Round each logarithm to that many digits as well, as in a sum made by hand.
    """
    outcomes = [name.strip() for name in sample]
    if not any(outcomes):
        raise InputError("sample: empty; expected names of outcomes separated by commas")
    if digits is not None and not 0 <= digits <= MAX_DIGITS:
        raise InputError(f"digits: expected 0 to {MAX_DIGITS}, got {digits}")
    indices = [labels.index(_check_outcome(name, labels)) for name in outcomes]
    p, q = log_p[indices], log_q[indices]
    for name, log_probability in zip(outcomes, p.tolist(), strict=True):
        if math.isinf(log_probability):
            raise InputError(f"sample: {name!r} has probability 0 under P, so P cannot draw it")
    return GivenSample(
        outcomes=outcomes,
        k1=estimate_from("k1", k1(p, q)),
        k3=estimate_from("k3", k3(p, q)),
        flipped=estimate_from("log Q − log P", k1(q, p)),
        rounded=None if digits is None else _rounded(p, q, digits),
        digits=digits,
        samples_needed=_samples_needed(log_p, log_q),
    )


def _check_outcome(name: str, labels: Sequence[str]) -> str:
    if name not in labels and list(labels) == check_names(None, len(labels)):
        raise InputError(
            f"sample: {name!r} is not one of {', '.join(labels)}; name the outcomes with --names"
        )
    return check_choice("sample", name, labels)


def _rounded(log_p: Tensor, log_q: Tensor, digits: int) -> Estimate:
    p, q = (torch.round(x, decimals=digits) for x in (log_p, log_q))
    return estimate_from(f"logs of {digits} digits", q - p)


def _samples_needed(log_p: Tensor, log_q: Tensor) -> float:
    """Return n with sd_P(log P − log Q) / √n = KL(P‖Q); infinite or NaN where there is none."""
    p = log_p.exp()
    ratio = torch.where(p > 0.0, log_p - log_q, 0.0)
    kl = (p * ratio).sum().item()
    variance = (p * ratio**2).sum().item() - kl**2
    return math.inf if kl <= 0.0 else math.ceil(variance / kl**2) if kl < math.inf else math.nan


def add_sample(
    explanation: Explanation, sample: GivenSample, forward: float, reverse: float
) -> Explanation:
    """Return the explanation of a KL with what a sample says about it.

    Args:
        explanation: The explanation without the sample.
        sample: Estimates from the sample.
        forward: The exact KL(P‖Q).
        reverse: The exact KL(Q‖P).
    """
    return replace(
        explanation,
        tables=(*explanation.tables, _sample_table(sample, forward, reverse)),
        meaning=explanation.meaning + _sample_meaning(sample, forward),
        numbers={**explanation.numbers, "sample": _sample_numbers(sample)},
    )


def _sample_numbers(sample: GivenSample) -> dict[str, object]:
    """Return the estimates as data."""
    estimates = {"k1": sample.k1, "k3": sample.k3, "log_q_minus_log_p": sample.flipped}
    numbers: dict[str, object] = {
        "outcomes": sample.outcomes,
        "count": len(sample.outcomes),
        **{name: estimate.numbers() for name, estimate in estimates.items()},
        "samples_until_error_is_kl": sample.samples_needed,
    }
    if sample.rounded is not None:
        rounded: dict[str, object] = {"digits": sample.digits, **sample.rounded.numbers()}
        numbers["rounded_log_q_minus_log_p"] = rounded
    return numbers


def _sample_table(sample: GivenSample, forward: float, reverse: float) -> Table:
    """Return the estimates beside the exact values, and which KL they estimate by who drew."""
    rows = [
        ("log P − log Q, or k1", *_cells(sample.k1), "KL(P‖Q)", "−KL(Q‖P)"),
        ("log Q − log P", *_cells(sample.flipped), "−KL(P‖Q)", "KL(Q‖P)"),
    ]
    if sample.rounded is not None:
        name = f"  with logs of {sample.digits} digits"
        rows.append((name, *_cells(sample.rounded), "−KL(P‖Q)", "KL(Q‖P)"))
    rows += [
        ("k3", *_cells(sample.k3), "KL(P‖Q)", ""),
        ("exact KL(P‖Q)", number(forward), "", "", ""),
        ("exact KL(Q‖P)", number(reverse), "", "", ""),
    ]
    title = f"Your sample of {len(sample.outcomes)}, and what it estimates"
    columns = ("mean of", "nats", "std. error", "drawn from P", "drawn from Q")
    return Table(title, columns, tuple(rows))


def _cells(estimate: Estimate) -> tuple[str, str]:
    error = estimate.standard_error
    return number(estimate.mean), "–" if math.isnan(error) else f"± {number(error)}"


def compare_estimates(
    sample: GivenSample, drawn_estimates: Sequence[Estimate], samples: int
) -> list[Estimate]:
    """Return k1 and k3 of a sample and of the `samples` that were drawn, named for a picture."""
    by_count = (
        (f"your {len(sample.outcomes):,}", (sample.k1, sample.k3)),
        (f"{samples:,}", [estimate for estimate in drawn_estimates if estimate.name != "k2"]),
    )
    return [
        replace(estimate, name=f"{estimate.name}\n{count}")
        for count, estimates in by_count
        for estimate in estimates
    ]


def _sample_meaning(sample: GivenSample, forward: float) -> str:
    """Return how far a sample of this size can be trusted, in words."""
    count, mean, error = len(sample.outcomes), sample.k1.mean, sample.k1.standard_error
    if math.isinf(mean):
        return " Your sample holds an outcome that Q rules out, so its estimate is infinite."
    if count == 1:
        return " One sample has no standard error: it says nothing about how far off it is."
    text = f" Your {count} samples say {number(mean, 4)} ± {number(error, 4)}"
    text += f" where KL(P‖Q) is {number(forward, 4)}"
    if abs(mean) < 2.0 * error:
        text += ", too few to tell even the sign"
    if count < sample.samples_needed < math.inf:
        needed = f"{sample.samples_needed:,.0f}"
        text += f"; about {needed} bring the standard error down to the KL itself"
    return text + "."
