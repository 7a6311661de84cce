"""Comparison as tables of text, for the terminal and for the page alike."""

from __future__ import annotations

import math
from typing import NamedTuple

from keel.compare.comparison import Comparison, Group, Pair
from keel.compare.verdict import percent
from keel.functional import Interval


class Table(NamedTuple):
    """Column titles and rows; all but the first column are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def title(comparison: Comparison) -> str:
    """Return one line about what is compared."""
    tasks = ", ".join(task or "unnamed environment" for task in comparison.tasks)
    steps = " / ".join(f"{end:,}" for end in dict.fromkeys(comparison.horizon.values()))
    return f"{tasks}: {comparison.metric} over the last steps up to {steps}"


def scores(comparison: Comparison) -> Table:
    """Tabulate what each group earned."""
    several_tasks = len(comparison.tasks) > 1
    iqm = "IQM / baseline" if several_tasks else "IQM"
    columns = ["group", "runs", iqm, f"{comparison.criteria.confidence:.0%} interval"]
    for task in comparison.tasks:
        name = f" {task}" if several_tasks else ""
        columns += [f"area{name}", f"steps to {number(comparison.thresholds[task])}{name}"]
    rows = []
    for group in comparison.groups:
        estimate = number(float(group.iqm.estimate))
        row = [group.name, str(len(group.runs)), estimate, interval(group.iqm)]
        for task in comparison.tasks:
            count, steps = group.reached[task]
            total = len(group.scores[task])
            row += [number(group.auc[task]), _steps(count, total, steps)]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def costs(comparison: Comparison) -> Table:
    """Tabulate the cost of each group and its stability."""
    columns = (
        "group",
        "steps/s",
        "loss variance",
        "non-finite",
        "roll-backs",
        "worst KL",
        "of bound",
    )
    return Table(columns, tuple(_cost(group) for group in comparison.groups))


def _cost(group: Group) -> tuple[str, ...]:
    stability = group.stability
    return (
        group.name,
        number(1.0 / group.seconds_per_step if group.seconds_per_step else math.nan),
        number(stability.loss_variance),
        number(stability.non_finite),
        number(stability.rollbacks),
        number(stability.worst_kl),
        "–" if math.isnan(stability.worst_share) else f"{stability.worst_share:.0%}",
    )


def changes(pair: Pair) -> Table:
    """Tabulate the fields of the configuration that differ."""
    rows = tuple((name, old, new) for name, (old, new) in pair.changes.items())
    return Table(("setting", pair.baseline, pair.variant), rows)


def interval(ends: Interval) -> str:
    """Format both ends of an interval."""
    return f"{number(float(ends.low))} … {number(float(ends.high))}"


def signed(share: float) -> str:
    """Format a change in per cent, with its sign."""
    return ("+" if share > 0 else "") + percent(share)


def number(x: float) -> str:
    """Format a number with as many digits as are worth reading."""
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    size = abs(x)
    text = f"{x:,.0f}" if size >= 1000 or x == int(x) else f"{x:.3g}" if size < 100 else f"{x:.1f}"
    return text.replace("-", "−")


def _steps(count: int, total: int, steps: float) -> str:
    if not count:
        return f"none of {total}"
    return number(steps) if count == total else f"{number(steps)} ({count} of {total})"


def text(comparison: Comparison) -> str:
    """Return the whole comparison as plain text."""
    parts = [title(comparison), *(_aligned(x) for x in (scores(comparison), costs(comparison)))]
    for pair in comparison.pairs:
        better = percent(float(pair.better.estimate))
        reasons = (*pair.verdict.reasons, f"better in {better} of pairs of runs")
        verdict = f"{pair.variant} against {pair.baseline}: {pair.verdict.decision}"
        parts.append("\n".join([verdict, *(f"  {reason}" for reason in reasons)]))
        if pair.changes:
            parts.append(_aligned(changes(pair)))
    return "\n\n".join([*parts, *comparison.notes])


def _aligned(table: Table) -> str:
    """Return a table with columns of spaces, the first to the left."""
    lines = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
