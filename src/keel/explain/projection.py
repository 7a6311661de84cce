"""`keel explain projection`: what a policy of independent parts loses of a joint one."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from keel.explain.inputs import check_names, check_probabilities
from keel.functional import categorical_entropy, categorical_kl
from keel.look import BLUE, GREEN, GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

MAX_CELLS = 12
"""Rows or columns up to which a picture has room for the numbers."""


def explain_projection(
    joint: Sequence[Sequence[float]] = ((0.5, 0.1), (0.1, 0.3)),
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Explanation:
    """Explain KL(P‖Q) as what is lost when a joint distribution is known by its shadows only.

    Q is the product of the marginals of P: of all Q with independent parts it has the least
    KL(P‖Q), which is the mutual information of the parts.

    Args:
        joint: Probabilities of P `[R, C]`.
        rows: Names of the rows `[R]`.
        columns: Names of the columns `[C]`.

    Examples:
        >>> round(explain_projection(((0.5, 0.1), (0.1, 0.3))).numbers["kl_nats"], 4)
        0.1777
    """
    p = _check_joint(joint)
    row_names = check_names(rows, p.shape[0], "rows")
    column_names = check_names(columns, p.shape[1], "columns")
    row_sums, column_sums = p.sum(1), p.sum(0)
    q = row_sums[:, None] * column_sums[None, :]
    kl = _kl(p, q)
    h_joint, h_rows, h_columns = (_entropy(x) for x in (p, row_sums, column_sums))
    uniform = torch.full_like(p, 1.0 / p.numel())
    to_uniform, rest = _kl(p, uniform), _kl(q, uniform)
    return Explanation(
        f"Two shadows keep all but {number(kl, 4)} nats of the object",
        *texts_of("projection"),
        tables=(
            _matrix_table("The object P, and its shadows", p, row_names, column_names),
            _matrix_table("Q, rebuilt from the shadows", q, row_names, column_names),
            nats_table(
                "What is lost",
                ("entropy of the rows", h_rows),
                ("entropy of the columns", h_columns),
                ("entropy of P", h_joint),
                ("lost: KL(P‖Q), the mutual information", kl),
                ("KL(P‖uniform), another Q of independent parts", to_uniform),
                ("KL(P‖Q) + KL(Q‖uniform), the same", kl + rest),
            ),
        ),
        meaning=_meaning(kl, h_joint),
        numbers={
            "kl_nats": kl,
            "kl_bits": bits(kl),
            "entropy_joint_nats": h_joint,
            "entropy_rows_nats": h_rows,
            "entropy_columns_nats": h_columns,
            "kl_uniform_nats": to_uniform,
            "projection": q.tolist(),
        },
        draw=lambda figure: _draw(figure, p, q, row_names, column_names),
    )


def _check_joint(joint: Sequence[Sequence[float]]) -> Tensor:
    if not joint or len({len(row) for row in joint}) != 1:
        lengths = ", ".join(str(len(row)) for row in joint) or "none"
        raise InputError(f"P: expected rows of the same length, got lengths {lengths}")
    check_probabilities("P", [x for row in joint for x in row])
    return torch.tensor(joint, dtype=torch.float64)


def _kl(p: Tensor, q: Tensor) -> float:
    return categorical_kl(p.flatten().log(), q.flatten().log()).item()


def _entropy(p: Tensor) -> float:
    return categorical_entropy(p.flatten().log()).item()


def _matrix_table(title: str, x: Tensor, rows: list[str], columns: list[str]) -> Table:
    lines = torch.cat([x, x.sum(0, keepdim=True)])
    cells = [
        (name, *line.tolist(), line.sum().item())
        for name, line in zip([*rows, "sum"], lines, strict=True)
    ]
    return make_table(title, ("", *columns, "sum"), cells)


def _meaning(kl: float, h_joint: float) -> str:
    if kl < 1e-12:
        return "Nothing is lost: rows and columns are independent, and the shadows say it all."
    share = f" ({kl / h_joint:.0%} of the entropy of P)" if h_joint > 0.0 else ""
    return (
        f"The shadows lose {number(bits(kl), 4)} bits{share}: which row goes with which column. "
        "No other Q with independent parts comes closer to P; each loses KL(Q‖other) on top."
    )


def _draw(figure: Figure, p: Tensor, q: Tensor, rows: list[str], columns: list[str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    grid = figure.add_gridspec(
        2, 4, width_ratios=(1.0, 0.34, 1.0, 1.0), height_ratios=(0.32, 1.0), wspace=0.05
    )
    top = max(p.max().item(), q.max().item())
    target = figure.add_subplot(grid[1, 0])
    _heat(target, p, rows, columns, "Blues", (0.0, top))
    above = figure.add_subplot(grid[0, 0], sharex=target)
    above.set_title("The object P, and its two shadows", fontsize=10.5, color=INK)
    _label(above.bar(range(len(columns)), p.sum(0).tolist(), 0.75, color=BLUE), above)
    beside = figure.add_subplot(grid[1, 1], sharey=target)
    _label(beside.barh(range(len(rows)), p.sum(1).tolist(), 0.75, color=BLUE), beside)
    second, third = figure.add_subplot(grid[:, 2]), figure.add_subplot(grid[:, 3])
    _heat(second, q, rows, columns, "Blues", (0.0, top))
    second.set_title("Q, rebuilt from the shadows", fontsize=10.5, color=INK)
    terms = torch.where(p > 0.0, p * (p / q).log(), 0.0)
    size = max(terms.abs().max().item(), 1e-12)
    signs = LinearSegmentedColormap.from_list("signs", (GREY, "white", GREEN))
    _heat(third, terms, rows, columns, signs, (-size, size))
    third.set_title("What each cell adds, nats", fontsize=10.5, color=INK)


def _label(bars: BarContainer, axes: Axes) -> None:
    """Write the numbers on bars, and take away axes that say the same."""
    if len(bars) <= MAX_CELLS:
        axes.bar_label(bars, fmt="%.2f", label_type="center", color="white", fontsize=9)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _heat(
    axes: Axes,
    x: Tensor,
    rows: list[str],
    columns: list[str],
    colors: str | Colormap,
    span: tuple[float, float],
) -> None:
    axes.imshow(x.numpy(), cmap=colors, vmin=span[0], vmax=span[1], aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    if max(x.shape) > MAX_CELLS:
        return
    for r, line in enumerate(x.tolist()):
        for c, value in enumerate(line):
            is_dark = abs(value) > 0.55 * max(abs(span[0]), span[1])
            text = number(value, 3) if math.isfinite(value) else "–"
            axes.text(c, r, text, ha="center", va="center", color="white" if is_dark else INK)
