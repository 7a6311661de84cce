"""`keel explain trust-region`: is a new policy inside the bound, and how much of it may stay?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.errors import InputError
from keel.explain.explanation import Explanation, Table, make_table, number, texts_of
from keel.explain.inputs import check_distributions, check_names, check_positive
from keel.functional import categorical_kl, walk_back
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIP = 0.2


def explain_trust_region(
    old: Sequence[float] = (0.4, 0.3, 0.2, 0.1),
    new: Sequence[float] = (0.45, 0.35, 0.15, 0.05),
    *,
    max_kl: float = 0.01,
    names: Sequence[str] | None = None,
) -> Explanation:
    """Explain a bound on KL(old‖new), and what is kept of a step that breaks it.

    Args:
        old: probabilities before the update `[A]`.
        new: probabilities that the update asks for `[A]`.
        max_kl: the bound, in nats.
        names: of the actions `[A]`.

    Examples:
        >>> round(explain_trust_region(max_kl=0.01).numbers["kl_requested_nats"], 4)
        0.0335
    """
    check_distributions("old policy", old, "new policy", new)
    if min(*old, *new, 1.0) <= 0.0:
        raise InputError("trust-region: every action needs some probability in both policies")
    check_positive("max-kl", max_kl)
    labels = check_names(names, len(old))
    before, after = (torch.tensor(x, dtype=torch.float64).log() for x in (old, new))
    result = walk_back(lambda share: _kl_along(before, after, share).reshape(1), max_kl)
    fraction, kl, requested = result.fraction.item(), result.kl.item(), result.requested.item()
    kept_policy = _along(before, after, fraction).softmax(-1)
    reverse = categorical_kl(after, before).item()
    return Explanation(
        f"KL {number(requested, 4)} asked for, {max_kl:g} allowed",
        *texts_of("trust_region"),
        tables=(
            _policy_table(labels, old, new, kept_policy.tolist()),
            make_table(
                "The trust region",
                ("", ""),
                (
                    ("KL(old‖new) asked for, nats", requested),
                    ("the bound, nats", max_kl),
                    ("share of the step kept", number(fraction, 4)),
                    ("KL(old‖new) kept, nats", kl),
                    ("KL(new‖old) asked for, nats", reverse),
                ),
                digits=5,
            ),
        ),
        meaning=_meaning(requested, fraction, kl, max_kl),
        numbers={
            "kl_requested_nats": requested,
            "reverse_kl_nats": reverse,
            "max_kl": max_kl,
            "inside": requested <= max_kl,
            "fraction_kept": fraction,
            "kl_kept_nats": kl,
            "kept_policy": dict(zip(labels, kept_policy.tolist(), strict=True)),
        },
        draw=lambda figure: _draw(figure, before, after, fraction, max_kl, labels),
    )


def _policy_table(labels: Sequence[str], *policies: Sequence[float]) -> Table:
    rows = (
        (name, a, b, number(b / a, 3), "outside" if abs(b / a - 1.0) > CLIP else "", c)
        for name, a, b, c in zip(labels, *policies, strict=True)
    )
    columns = ("action", "old", "asked for", "ratio", f"clip {CLIP:g}?", "kept")
    return make_table("The policies", columns, rows)


def _along(before: Tensor, after: Tensor, share: float | Tensor) -> Tensor:
    """Return logits a `share` of the way: the parameters that an update would move."""
    return before + share * (after - before)


def _kl_along(before: Tensor, after: Tensor, share: float | Tensor) -> Tensor:
    return categorical_kl(before, _along(before, after, share))


def _meaning(requested: float, fraction: float, kl: float, bound: float) -> str:
    if requested <= bound:
        return f"Inside: the update spends {requested / bound:.0%} of its KL budget and stands."
    return (
        f"Outside: {requested / bound:.3g} times the bound. Keel keeps {fraction:.1%} of the step, "
        f"which costs {number(kl)} nats. KL grows with the square of the step, so "
        f"{fraction:.0%} of the step is only {kl / requested:.0%} of the KL."
    )


def _draw(
    figure: Figure,
    before: Tensor,
    after: Tensor,
    fraction: float,
    bound: float,
    labels: Sequence[str],
) -> None:
    left, right = figure.subplots(1, 2)
    shares = torch.linspace(0.0, 1.0, 101).tolist()
    curve = [_kl_along(before, after, share).item() for share in shares]
    left.axhspan(0.0, bound, color=GREEN, alpha=0.12, label="trust region")
    left.axhline(bound, color=GREEN, linewidth=1.5)
    left.plot(shares, curve, color=BLUE, linewidth=2.2, label="exact KL(old‖new)")
    left.plot(
        shares, [curve[-1] * s * s for s in shares], "--", color=GREY, label="square of the step"
    )
    left.plot([1.0], [curve[-1]], "X", color=ORANGE, markersize=10, label="asked for")
    kept_kl = _kl_along(before, after, fraction)
    left.plot([fraction], [kept_kl], "o", color=INK, markersize=8, label="kept")
    left.legend(frameon=False, fontsize=9)
    tidy(left, "Walking back along the step", "share of the step", "nats")
    kept_logits = _along(before, after, fraction)
    series = ((before, GREY, "old"), (kept_logits, BLUE, "kept"), (after, ORANGE, "asked for"))
    for index, (logits, color, name) in enumerate(series):
        positions = [x + 0.27 * (index - 1) for x in range(len(labels))]
        right.bar(positions, logits.softmax(-1).tolist(), 0.27, color=color, label=name)
    right.set_xticks(range(len(labels)), labels)
    right.legend(frameon=False, fontsize=9)
    tidy(right, "The policies", "", "probability").grid(False, axis="x")
