"""Pictures of `keel explain kl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.explain.kl_estimates import Estimate
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_discrete(
    figure: Figure,
    labels: list[str],
    p: Sequence[float],
    q: Sequence[float],
    contributions: list[float],
    estimates: list[Estimate],
    exact: float,
) -> None:
    """Draw two distributions, what each outcome adds to KL(P‖Q), and estimates of it."""
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1.0, 1.0))
    positions = list(range(len(labels)))
    left.bar([x - 0.2 for x in positions], p, 0.4, color=BLUE, label="P, the world")
    left.bar([x + 0.2 for x in positions], q, 0.4, color=ORANGE, label="Q, the belief")
    left.legend(frameon=False, fontsize=9)
    _name_outcomes(tidy(left, "Two distributions", "", "probability"), labels)
    heights = [c if math.isfinite(c) else 0.0 for c in contributions]
    middle.bar(positions, heights, 0.6, color=[GREEN if c >= 0.0 else GREY for c in contributions])
    middle.axhline(0.0, color=INK, linewidth=0.8)
    _name_outcomes(tidy(middle, "What each outcome adds", "", "P·log(P/Q), nats"), labels)
    _draw_estimates(right, estimates, exact)


def draw_gaussian(
    figure: Figure,
    p: tuple[float, float],
    q: tuple[float, float],
    estimates: list[Estimate],
    exact: float,
) -> None:
    """Draw two Gaussians (mean, standard deviation), where their KL comes from, and estimates."""
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.25, 1.0, 1.0))
    low = min(mean - 4.0 * std for mean, std in (p, q))
    high = max(mean + 4.0 * std for mean, std in (p, q))
    x = torch.linspace(low, high, 600, dtype=torch.float64)
    log_p, log_q = log_density(x, *p), log_density(x, *q)
    for log_y, color, label in ((log_p, BLUE, "P, the world"), (log_q, ORANGE, "Q")):
        left.plot(x.numpy(), log_y.exp().numpy(), color=color, label=label, linewidth=2)
    left.legend(frameon=False, fontsize=9)
    tidy(left, "Two Gaussians", "x", "density")
    integrand = (log_p.exp() * (log_p - log_q)).numpy()
    middle.fill_between(x.numpy(), integrand, color=GREEN, alpha=0.6, linewidth=0)
    middle.axhline(0.0, color=INK, linewidth=0.8)
    tidy(middle, "What each x adds (its area is KL)", "x", "p·log(p/q)")
    _draw_estimates(right, estimates, exact)


def _draw_estimates(axes: Axes, estimates: list[Estimate], exact: float) -> None:
    finite = [e for e in estimates if math.isfinite(e.mean)]
    axes.errorbar(
        range(len(finite)),
        [e.mean for e in finite],
        yerr=[0.0 if math.isnan(e.standard_error) else 2.0 * e.standard_error for e in finite],
        fmt="o",
        color=BLUE,
        capsize=5,
        markersize=7,
    )
    if math.isfinite(exact):
        axes.axhline(exact, color=GREEN, linewidth=2, label="exact")
        axes.legend(frameon=False, fontsize=9)
    _name_outcomes(
        tidy(axes, "Estimates ± 2 standard errors", "", "nats"), [e.name for e in finite]
    )


def _name_outcomes(axes: Axes, labels: list[str]) -> None:
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(False, axis="x")
    axes.set_xlim(-0.6, len(labels) - 0.4)


def log_density(x: Tensor, mean: float, std: float) -> Tensor:
    """Return the log-density of a Gaussian at `x` `[N]`."""
    return -0.5 * ((x - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2.0 * math.pi)
