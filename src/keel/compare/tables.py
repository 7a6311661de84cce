"""A comparison as tables of words, for the terminal and for the page alike."""

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


def title(found: Comparison) -> str:
    """What is compared, in one line."""
    where = ", ".join(task or "unnamed environment" for task in found.tasks)
    steps = " / ".join(f"{end:,}" for end in dict.fromkeys(found.horizon.values()))
    return f"{where}: {found.metric} over the last steps up to {steps}"


def scores(found: Comparison) -> Table:
    """What each group earned."""
    several = len(found.tasks) > 1
    iqm = "IQM / baseline" if several else "IQM"
    columns = ["group", "runs", iqm, f"{found.criteria.confidence:.0%} interval"]
    for task in found.tasks:
        name = f" {task}" if several else ""
        columns += [f"area{name}", f"steps to {number(found.thresholds[task])}{name}"]
    rows = []
    for group in found.groups:
        row = [
            group.name,
            str(len(group.runs)),
            number(float(group.iqm.estimate)),
            interval(group.iqm),
        ]
        for task in found.tasks:
            count, steps = group.reached[task]
            of = len(group.scores[task])
            row += [number(group.auc[task]), _steps(count, of, steps)]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def costs(found: Comparison) -> Table:
    """What each group cost, and how calmly it went."""
    columns = (
        "group",
        "steps/s",
        "loss variance",
        "non-finite",
        "roll-backs",
        "worst KL",
        "of bound",
    )
    return Table(columns, tuple(_cost(group) for group in found.groups))


def _cost(group: Group) -> tuple[str, ...]:
    calm = group.stability
    return (
        group.name,
        number(1.0 / group.seconds_per_step if group.seconds_per_step else math.nan),
        number(calm.loss_variance),
        number(calm.non_finite),
        number(calm.rollbacks),
        number(calm.worst_kl),
        "–" if math.isnan(calm.worst_share) else f"{calm.worst_share:.0%}",
    )


def pairs(found: Comparison) -> Table:
    """Every variant against the baseline."""
    rows = tuple(
        (
            f"{pair.variant} against {pair.baseline}",
            signed(pair.effect.estimate),
            f"{signed(pair.effect.low)} … {signed(pair.effect.high)}",
            percent(float(pair.better.estimate)),
            pair.verdict.decision,
        )
        for pair in found.pairs
    )
    columns = ("pair", "change", "95 % interval", "better in", "verdict")
    level = f"{found.criteria.confidence:.0%} interval"
    return Table(tuple(level if x == "95 % interval" else x for x in columns), rows)


def changes(pair: Pair) -> Table:
    """Fields of the configuration that differ."""
    rows = tuple((name, old, new) for name, (old, new) in pair.changes.items())
    return Table(("setting", pair.baseline, pair.variant), rows)


def interval(ends: Interval) -> str:
    """Both ends."""
    return f"{number(float(ends.low))} … {number(float(ends.high))}"


def signed(share: float) -> str:
    """A change in per cent."""
    return ("+" if share > 0 else "") + percent(share)


def number(x: float) -> str:
    """As many digits as are worth reading."""
    if math.isnan(x):
        return "–"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    size = abs(x)
    text = f"{x:,.0f}" if size >= 1000 or x == int(x) else f"{x:.3g}" if size < 100 else f"{x:.1f}"
    return text.replace("-", "−")


def _steps(count: int, of: int, steps: float) -> str:
    if not count:
        return f"none of {of}"
    return number(steps) if count == of else f"{number(steps)} ({count} of {of})"
