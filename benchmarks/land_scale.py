"""Tables and a picture of the ablation land-causes-large-returns.

keel ablate land-causes-large-returns --runs RUNS
python -m benchmarks.land scales --runs RUNS   into docs/data and docs/images
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from keel.ablate import Plan, plan_named
from keel.look import BLUE, GREY, INK, ORANGE, new_figure, tidy
from keel.tracking.drawing import write_png
from keel.tracking.reader import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PLAN = "land-causes-large-returns"
DATA, IMAGE = (
    ROOT / "docs/data/land-large-returns.json",
    ROOT / "docs/images/exploding-kl-large-returns.png",
)
METRICS = {
    "exact KL": "train/kl_exact",
    "k1": "train/kl_k1",
    "k3": "train/approx_kl",
    "clip fraction": "train/ratio_outside",
    "MSE": "train/value_loss",
    "entropy": "train/entropy",
    "welfare": "env/welfare",
}
TIMES = {"MSE": 2.0}
"""The note's value loss is a mean squared error, Keel's half of one."""
NOTE = ("*the note*", "", "", "", "4.93–5.69", "1", "567–14,000", "1.61", "")
PAIRS = (
    ("sound", "none", "batch"),
    ("sound, gradients clipped", "none-clipped", "batch-clipped"),
    ("sound, learning rate ×100", "rate-1e-2-none", "rate-1e-2-batch"),
    (
        "the same, full city, 30 months",
        "rate-1e-2-none-full-city",
        "rate-1e-2-batch-full-city",
    ),
    ("five actions", "five-none", "five-batch"),
    ("five actions, gradients clipped", "five-none-clipped", "five-batch-clipped"),
    ("wrong actor", "wrong-actor-none", "wrong-actor-batch"),
    ("wrong actor, gradients clipped", "wrong-actor-none-clipped", "wrong-actor-batch-clipped"),
    ("gradient descent instead of Adam", "descent-none", "descent-batch"),
    ("gradient descent, gradients clipped", "descent-none-clipped", "descent-batch-clipped"),
)
"""Title, variant without and with normalized advantages."""

Runs = dict[str, dict[str, list[list[float]]]]
"""Of every variant and metric: a list of updates for every seed."""


class Interval(NamedTuple):
    """A mean over seeds and half of its 95 % interval (Student's t)."""

    mean: float
    half: float

    def __str__(self) -> str:
        if math.isinf(self.mean):
            return "infinite"
        return _number(self.mean) if math.isnan(self.half) else (
            f"{_number(self.mean)} ± {_number(self.half)}"
        )  # fmt: skip


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values of several seeds, with its interval."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Interval(mean, math.nan)
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, float(half))


def factor(more: Sequence[float], less: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean over seeds of `more` / `less`, and its 95 % interval."""
    mean, half = interval([math.log(a / b) for a, b in zip(more, less, strict=True)])
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def scales(runs: Path) -> None:
    """Write the numbers, the tables and the picture from finished runs."""
    plan = plan_named(PLAN)
    assert plan is not None
    read = _read(plan, runs)
    DATA.write_text(json.dumps(_plain(read), indent=1) + "\n")
    lines = [*_figures(plan, read), "", *_normalization(read)]
    DATA.with_suffix(".md").write_text("\n".join(lines) + "\n")
    _draw(plan, read)
    print(DATA.with_suffix(".md").read_text())


def _read(plan: Plan, runs: Path) -> Runs:
    read: Runs = {}
    for cell in plan.cells:
        tables = [read_metrics(runs / plan.name / cell.name / f"seed-{s}") for s in plan.seeds]
        read[cell.name] = {
            title: [[TIMES.get(title, 1.0) * float(x) for x in table[name]] for table in tables]
            for title, name in METRICS.items()
        }
    return read


def _by_seed(read: Runs, cell: str, title: str) -> list[float]:
    """The mean over updates, of every seed; updates in which no game ended have no welfare."""
    means = []
    for updates in read[cell][title]:
        known = [x for x in updates if not math.isnan(x)]
        means.append(statistics.fmean(known) if known else math.nan)
    return means


def _figures(plan: Plan, read: Runs) -> list[str]:
    updates = len(next(iter(read.values()))["k3"][0])
    lines = [
        f"Means over {updates} updates, then over {len(plan.seeds)} seeds, with 95 % intervals "
        "(Student's t). The largest KL is that of any update of any seed; MSE is the note's value "
        "loss, Keel's is half of it.",
        "",
        "| variant | exact KL | largest | " + " | ".join([*METRICS][1:]) + " |",
        "|---|" + "---:|" * (len(METRICS) + 1),
        "| " + " | ".join(NOTE) + " |",
    ]
    for cell, metrics in read.items():
        shown = {title: str(interval(_by_seed(read, cell, title))) for title in METRICS}
        largest = max(max(updates) for updates in metrics["exact KL"])
        first, *rest = shown.values()
        words = [cell, first, "infinite" if math.isinf(largest) else _number(largest), *rest]
        lines.append("| " + " | ".join(words) + " |")
    return lines


def _normalization(read: Runs) -> list[str]:
    lines = [
        "The KL without normalization over the KL with it, of the same seeds (k3 where the exact "
        "KL is infinite), and the difference of clip fraction and welfare:",
        "",
        "| replay | KL, none | KL, batch | factor (95 %) | clip fraction | welfare |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, none, batch in PAIRS:
        kl = "k3" if math.isinf(read[batch]["exact KL"][0][0]) else "exact KL"
        a, b = (_by_seed(read, cell, kl) for cell in (none, batch))
        mean, low, high = factor(a, b)
        changes = [
            str(interval([x - y for x, y in zip(*both, strict=True)]))
            for name in ("clip fraction", "welfare")
            for both in [[_by_seed(read, cell, name) for cell in (none, batch)]]
        ]
        words = [title, _number(statistics.fmean(a)), _number(statistics.fmean(b))]
        words += [f"{_factor(mean)} ({_factor(low)} to {_factor(high)})", *changes]
        lines.append("| " + " | ".join(words) + " |")
    return lines


def _draw(plan: Plan, read: Runs) -> None:
    """What the note would have logged, and the share of ratios outside of the clip range."""
    names = list(read)[::-1]
    figure = new_figure(10.0, 0.26 * len(names) + 1.2)
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("k3, what the note logs as KL", "clip fraction")
    for axes, key, title in zip(panels, ("k3", "clip fraction"), titles, strict=True):
        tidy(axes, title, "", "")
        for row, name in enumerate(names):
            mean, half = interval(_by_seed(read, name, key))
            shown = ORANGE if "five" in name else INK if "wrong" in name else BLUE
            error = None if math.isnan(half) else min(half, 0.99 * mean)
            axes.errorbar(mean, row, xerr=error, fmt="o", color=shown, ms=4, lw=1.2)
        axes.set_yticks(np.arange(len(names)), names, fontsize=8)
        axes.grid(axis="y", color=GREY, alpha=0.2)
    panels[0].set_xscale("log")
    panels[0].axvspan(4.93, 5.69, color=ORANGE, alpha=0.25, lw=0)
    place = (6.5, len(names) - 0.4)
    panels[0].annotate("the note: 4.93 to 5.69", place, fontsize=8, color=ORANGE)
    write_png(figure, IMAGE)


def _plain(read: Runs) -> dict[str, Any]:
    """As JSON has it: what is infinite is a word, what is missing null."""

    def word(x: float) -> float | str | None:
        return "infinite" if math.isinf(x) else None if math.isnan(x) else x

    return {
        cell: {title: [[word(x) for x in one] for one in seeds] for title, seeds in found.items()}
        for cell, found in read.items()
    }


def _factor(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3f}" if x < 10 else f"{x:.3g}"


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"
