"""`keel explain kl`: what it costs to believe Q while the world follows P."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.errors import InputError
from keel.explain.explanation import (
    Explanation,
    Table,
    bits,
    make_table,
    nats_table,
    number,
    texts_of,
)
from keel.explain.inputs import check_distributions, check_names, check_positive
from keel.explain.kl_estimates import Estimate, estimate_kl, estimate_numbers, estimate_table
from keel.explain.kl_figures import Outcome, draw_discrete, draw_gaussian, log_density
from keel.explain.kl_sample import add_sample, compare_estimates, label_outcomes, read_sample
from keel.functional import (
    categorical_entropy,
    categorical_kl,
    gaussian_kl,
    jensen_shannon,
    total_variation,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUMMARY = {
    "KL(P‖Q)": "kl_nats",
    "KL(Q‖P), the other direction": "reverse_kl_nats",
    "entropy of P": "entropy_p_nats",
    "entropy of Q": "entropy_q_nats",
    "cross-entropy of P under Q": "cross_entropy_nats",
    "Jensen–Shannon (symmetric)": "jensen_shannon_nats",
}
"""Exact values in nats, by their names in a table."""
MAX_SAMPLES = 10_000_000


def explain_kl(
    p: Sequence[float],
    q: Sequence[float],
    *,
    names: Sequence[str] | None = None,
    samples: int = 1000,
    seed: int = 0,
    sample: Sequence[str] | None = None,
    digits: int | None = None,
) -> Explanation:
    """Explain KL(P‖Q) of two distributions over the same outcomes.

    Args:
        p: Probabilities of what happens `[A]`.
        q: Probabilities of what is expected `[A]`.
        names: Names of the outcomes `[A]`; by default those of the sample, or a, b, c …
        samples: Samples to draw from P for the estimators.
        seed: Seed of those samples.
        sample: Outcomes that were drawn already `[N]`, to estimate the KL from them as well.
        digits: Also round the logarithms of that estimate, as in a sum made by hand.

    Examples:
        >>> explain_kl([0.8, 0.2], [0.7, 0.3]).numbers["kl_nats"]
        0.02573...
    """
    if digits is not None and sample is None:
        raise InputError("digits: rounds the logarithms of a sample; give one with --sample")
    log_p, log_q = _read(p, q)
    labels = label_outcomes(names, sample, len(p))
    exact = _measures(log_p, log_q)
    forward, reverse = exact["kl_nats"], exact["reverse_kl_nats"]
    estimates = _sampled(log_p, log_q, samples, seed)
    outcomes = [Outcome(*x, _contribution(*x[1:])) for x in zip(labels, p, q, strict=True)]

    def picture(shown: list[Estimate]) -> Callable[[Figure], None]:
        return lambda figure: draw_discrete(figure, outcomes, shown, forward)

    plain = Explanation(
        f"KL(P‖Q) = {number(forward)} nats",
        *texts_of("kl"),
        tables=(
            _outcome_table(outcomes, in_order_of_sample=names is None),
            _summary_table(exact),
            estimate_table(estimates, samples, forward),
        ),
        meaning=_discrete_meaning(exact, outcomes),
        numbers={
            **exact,
            "outcomes": [outcome._asdict() for outcome in outcomes],
            **estimate_numbers(estimates, samples, seed),
        },
        draw=picture(estimates),
    )
    if sample is None:
        return plain
    given_sample = read_sample(sample, labels, log_p, log_q, digits)
    draw = picture(compare_estimates(given_sample, estimates, samples))
    return replace(add_sample(plain, given_sample, forward, reverse), draw=draw)


def _read(p: Sequence[float], q: Sequence[float]) -> list[Tensor]:
    """Return the log-probabilities of two distributions, checked."""
    check_distributions("P", p, "Q", q)
    return [torch.tensor(x, dtype=torch.float64).log() for x in (p, q)]


def _measures(log_p: Tensor, log_q: Tensor) -> dict[str, float]:
    """Return the exact values of two distributions, by name."""
    kls = categorical_kl(log_p, log_q), categorical_kl(log_q, log_p)
    entropies = categorical_entropy(log_p), categorical_entropy(log_q)
    return {
        **_headline(*(x.item() for x in (*kls, *entropies))),
        "total_variation": total_variation(log_p, log_q).item(),
        "jensen_shannon_nats": jensen_shannon(log_p, log_q).item(),
    }


def _sampled(log_p: Tensor, log_q: Tensor, samples: int, seed: int) -> list[Estimate]:
    """Return estimates of the KL from outcomes that are drawn from P."""
    _check_samples(samples)
    generator = torch.Generator().manual_seed(seed)
    indices = torch.multinomial(log_p.exp(), samples, replacement=True, generator=generator)
    return estimate_kl(log_p[indices], log_q[indices])


def explain_gaussian_kl(
    p: tuple[float, float], q: tuple[float, float], *, samples: int = 1000, seed: int = 0
) -> Explanation:
    """Explain KL(P‖Q) of two Gaussians.

    Args:
        p: mean and standard deviation of P.
        q: mean and standard deviation of Q.
        samples: number of samples to draw from P for the estimators.
        seed: of those samples.
    """
    for name, (_, sigma) in (("P", p), ("Q", q)):
        check_positive(f"{name} sigma", sigma)
    _check_samples(samples)
    (p_mean, p_log_std), (q_mean, q_log_std) = (_gaussian(*x) for x in (p, q))
    forward = gaussian_kl(p_mean, p_log_std, q_mean, q_log_std).item()
    reverse = gaussian_kl(q_mean, q_log_std, p_mean, p_log_std).item()
    shift = gaussian_kl(p_mean, q_log_std, q_mean, q_log_std).item()
    spread = gaussian_kl(p_mean, p_log_std, p_mean, q_log_std).item()
    h_p, h_q = (0.5 * math.log(2.0 * math.pi * math.e * sigma**2) for _, sigma in (p, q))
    generator = torch.Generator().manual_seed(seed)
    x = p[0] + p[1] * torch.randn(samples, generator=generator, dtype=torch.float64)
    estimates = estimate_kl(log_density(x, *p), log_density(x, *q))
    exact = _headline(forward, reverse, h_p, h_q)
    return Explanation(
        f"KL(P‖Q) = {number(forward)} nats",
        *texts_of("gaussian_kl"),
        tables=(
            nats_table(
                "Where it comes from",
                ("the means differ", shift),
                ("the spreads differ", spread),
                first="part",
            ),
            _summary_table(exact),
            estimate_table(estimates, samples, forward),
        ),
        meaning=_finite_meaning(forward),
        numbers={
            **exact,
            "kl_from_mean_nats": shift,
            "kl_from_spread_nats": spread,
            "p": {"mean": p[0], "std": p[1]},
            "q": {"mean": q[0], "std": q[1]},
            **estimate_numbers(estimates, samples, seed),
        },
        draw=lambda figure: draw_gaussian(figure, p, q, estimates, forward),
    )


def _check_samples(samples: int) -> None:
    if not 2 <= samples <= MAX_SAMPLES:
        raise InputError(f"samples: expected 2 to {MAX_SAMPLES:,}, got {samples}")


def _gaussian(mean: float, std: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([mean]).double(), torch.tensor([math.log(std)]).double()


def _contribution(p: float, q: float) -> float:
    return 0.0 if p == 0.0 else math.inf if q == 0.0 else p * math.log(p / q)


def _headline(forward: float, reverse: float, h_p: float, h_q: float) -> dict[str, float]:
    return {
        "kl_nats": forward,
        "observations_to_20_to_1": _observations(forward),
        "kl_bits": bits(forward),
        "reverse_kl_nats": reverse,
        "reverse_kl_bits": bits(reverse),
        "entropy_p_nats": h_p,
        "entropy_q_nats": h_q,
        "cross_entropy_nats": h_p + forward,
    }


def _outcome_table(outcomes: Sequence[Outcome], in_order_of_sample: bool) -> Table:
    title = "Outcome by outcome"
    names = [name for name, *_ in outcomes]
    if in_order_of_sample and names != check_names(None, len(names)):
        title += ", named in the order of the sample"
    rows = (
        (name, a, b, c / a if a > 0.0 else math.nan, number(c), number(bits(c)))
        for name, a, b, c in outcomes
    )
    return make_table(title, ("", "P", "Q", "log P/Q", "P·log P/Q", "in bits"), rows)


def _summary_table(exact: Mapping[str, float]) -> Table:
    rows: list[tuple[str, float, float | str]] = [
        (name, exact[key], bits(exact[key])) for name, key in SUMMARY.items() if key in exact
    ]
    if "total_variation" in exact:
        rows.append(("total variation (a probability)", exact["total_variation"], ""))
    return make_table("Exact values", ("", "nats", "bits"), rows, digits=5)


def _discrete_meaning(exact: Mapping[str, float], outcomes: Sequence[Outcome]) -> str:
    forward, h_p = exact["kl_nats"], exact["entropy_p_nats"]
    if math.isinf(forward):
        name, a = next((name, a) for name, a, b, _ in outcomes if a > 0 and b == 0)
        return (
            f"Infinite: Q says {name!r} can never happen, yet under P it happens "
            f"{a:.2%} of the time. No finite number of bits can encode the impossible."
        )
    text = _finite_meaning(forward)
    unseen = math.fsum(b for _, a, b, _ in outcomes if a == 0.0)
    if unseen > 0.0:
        text += f" P never samples what Q gives {unseen:.2%} of its mass, and k3 misses just that."
    if forward > 0.0:
        text += f" The best code for P needs {bits(h_p):.4f} bits, Q's needs "
        text += f"{bits(h_p + forward):.4f}."
    if math.isinf(exact["reverse_kl_nats"]):
        text += " The other direction is infinite: P rules out something that Q allows."
    return text


def _observations(kl: float) -> float:
    """Return the samples of P that make the likelihood ratio of P over Q 20, on average."""
    return math.inf if kl == 0.0 else math.ceil(math.log(20.0) / kl) if kl < math.inf else 1.0


def _finite_meaning(forward: float) -> str:
    if forward == 0.0:
        return "P and Q are the same distribution: using one for the other costs nothing."
    return (
        f"Using Q for P costs {number(bits(forward), 4)} bits an observation; after about "
        f"{_observations(forward):,.0f} observations the evidence for P over Q stands at 20 to 1."
    )
