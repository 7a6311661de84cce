"""`keel explain estimators`: the gradient certificate as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.explain.explanation import Explanation, Table, number, texts_of
from keel.functional import Certificate, certificate
from keel.look import GREEN, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def explain_estimators(*, actions: int = 6, policies: int = 16, seed: int = 0) -> Explanation:
    """Certify every KL estimator in reward and loss, on- and off-policy.

    Args:
        actions: number of actions of the random policies.
        policies: number of random policies.
        seed: of the policies.
    """
    rows = certificate(actions=actions, policies=policies, seed=seed)
    placements = dict.fromkeys((row.placement, row.sampling) for row in rows)
    return Explanation(
        "What each KL estimator really descends",
        *texts_of("estimators"),
        tables=tuple(
            Table(
                f"In the {placement}, {sampling}",
                ("estimator", "descends", "cosine", "grad. bias", "value bias", ""),
                tuple(_cells(row) for row in rows if (row.placement, row.sampling) == key),
            )
            for key in placements
            for placement, sampling in (key,)
        ),
        meaning=(
            "Use k1 in the reward; weighted_k2, ratio_k3, straight_through or the exact KL in the "
            "loss. k1 in the loss does nothing on-policy, and off-policy it drives π away from the "
            "policy that sampled; k3 in the loss descends the other direction, KL(π_ref‖π). The "
            "exact KL of a state in its own reward teaches that state's action nothing; it only "
            "charges the actions that led there."
        ),
        numbers={"certificate": [row._asdict() for row in rows]},
        draw=lambda figure: _draw(figure, rows),
    )


def _cells(row: Certificate) -> tuple[str, ...]:
    return (
        row.estimator,
        row.descends,
        number(row.cosine, 3),
        _share(row.gradient_bias),
        _share(row.value_bias),
        "right" if row.right else "",
    )


def _share(bias: float) -> str:
    return "0" if bias < 1e-9 else f"{bias:.0%}"


def _draw(figure: Figure, rows: list[Certificate]) -> None:
    for axes, placement in zip(figure.subplots(1, 2, sharex=True), ("reward", "loss"), strict=True):
        certificates = [row for row in rows if row.placement == placement][::-1]
        colors = [GREEN if row.right else ORANGE for row in certificates]
        axes.barh(range(len(certificates)), [row.cosine for row in certificates], color=colors)
        labels = [
            f"{row.estimator}, {row.sampling.removesuffix('-policy')}" for row in certificates
        ]
        axes.set_yticks(range(len(certificates)), labels)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        axes.set_xlim(-1.05, 1.05)
        for position, row in enumerate(certificates):
            if row.cosine == 0.0:
                axes.text(0.03, position, "no gradient", va="center", fontsize=7.5, color=ORANGE)
        tidy(axes, f"in the {placement}", "worst cosine to ∇KL(π‖π_ref)", "").grid(False, axis="y")
        axes.tick_params(labelsize=7.5)
