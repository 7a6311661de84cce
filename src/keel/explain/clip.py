"""`keel explain clip`: what the clipped surrogate does to one sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.errors import InputError
from keel.explain.explanation import Explanation, make_table, texts_of
from keel.explain.inputs import check_finite, check_positive
from keel.functional.surrogate import Surrogate, clip, dual_clip
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLE = {
    "ratio π_new/π_old": "ratio",
    "ratio after the clip": "clipped_ratio",
    "loss without the clip: −r·A": "unclipped_loss",
    "loss with the clipped ratio": "clipped_loss",
    "loss, the larger of the two": "loss",
    "gradient in r": "gradient",
}
"""Numbers of the sample, by their names in the table."""


def explain_clip(
    ratio: float = 2.0,
    advantage: float = 1.0,
    *,
    low: float = 0.2,
    high: float | None = None,
    dual: float | None = None,
) -> Explanation:
    """Explain PPO's clip at one ratio and advantage.

    Args:
        ratio: π_new/π_old of the action.
        advantage: of the action.
        low: the ratio is clipped at 1 − low.
        high: the ratio is clipped at 1 + high; by default `low`.
        dual: bound of the dual clip for negative advantages; None for no dual clip.

    Examples:
        >>> explain_clip(2.0, 1.0).numbers["loss"]
        -1.2
    """
    upper = low if high is None else high
    _check(ratio, advantage, low, upper, dual)

    def surrogate(r: Tensor, a: Tensor) -> Surrogate:
        return clip(r, a, low, upper) if dual is None else dual_clip(r, a, low, upper, dual)

    leaf = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    result = surrogate(leaf, torch.tensor(advantage, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    bounded = min(max(ratio, 1.0 - low), 1.0 + upper)
    clipped = bool(result.clipped)
    numbers = {
        "ratio": ratio,
        "advantage": advantage,
        "clip_low": low,
        "clip_high": upper,
        "clipped_ratio": bounded,
        "unclipped_loss": -ratio * advantage,
        "clipped_loss": -bounded * advantage,
        "loss": result.loss.item(),
        "gradient": gradient.item(),
    }
    rows = [(name, numbers[key]) for name, key in SAMPLE.items()]
    if dual is not None:
        rows.insert(4, ("dual clip's ceiling for A < 0", -dual * advantage))
    return Explanation(
        f"The clip at ratio {ratio:g}, advantage {advantage:g}",
        *texts_of("clip"),
        tables=(make_table("This sample", ("", ""), rows),),
        meaning=_meaning(ratio, advantage, low, upper, clipped),
        numbers=numbers | {"clipped": clipped},
        draw=lambda figure: _draw(figure, surrogate, ratio, advantage, low, upper),
    )


def _check(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> None:
    check_positive("ratio", ratio)
    check_finite(advantage=advantage)
    check_positive("clip", low)
    if low >= 1.0:
        raise InputError(f"clip: expected a number below 1, got {low:g}; 1 − clip bounds a ratio")
    check_positive("clip-high", high)
    if dual is not None and dual <= 1.0:
        raise InputError(f"dual: expected a number above 1, got {dual:g}")


def _meaning(ratio: float, advantage: float, low: float, high: float, clipped: bool) -> str:
    if advantage == 0.0:
        return "An advantage of 0 teaches nothing: loss and gradient are 0 at any ratio."
    if clipped:
        goal = "likelier" if advantage > 0 else "rarer"
        return (
            f"Clipped: the action is already {goal} than the clip asks for, so this sample is "
            "silent. Nothing pushes the ratio back either."
        )
    if 1.0 - low <= ratio <= 1.0 + high:
        return "Inside the clip range: the sample counts in full, as without a clip."
    return (
        "Outside the range, but on the wrong side: the policy moved against this sample, so the "
        "clip leaves the full gradient to bring it back."
    )


def _draw(
    figure: Figure,
    surrogate: Callable[[Tensor, Tensor], Surrogate],
    ratio: float,
    advantage: float,
    low: float,
    high: float,
) -> None:
    size = abs(advantage) or 1.0
    grid = torch.linspace(0.0, max(2.5, 1.2 * ratio), 400, dtype=torch.float64)
    for axes, sign in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        a = torch.full_like(grid, sign * size)
        loss = surrogate(grid, a).loss
        axes.axvspan(1.0 - low, 1.0 + high, color=GREEN, alpha=0.10, label="clip range")
        axes.plot(grid, -grid * sign * size, "--", color=GREY, label="without the clip")
        axes.plot(grid, loss, color=BLUE if sign > 0 else ORANGE, linewidth=2.2, label="loss")
        if sign * advantage > 0:
            point = surrogate(torch.tensor(ratio).double(), torch.tensor(advantage).double()).loss
            axes.plot([ratio], [point], "o", color=INK, markersize=8, label="this sample")
        kind = "good action, A > 0" if sign > 0 else "bad action, A < 0"
        tidy(axes, kind, "ratio π_new/π_old", "loss")
        axes.legend(frameon=False, fontsize=9)
