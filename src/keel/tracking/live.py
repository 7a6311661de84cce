"""The live display of a training run; plain lines where there is no terminal."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from keel.errors import InputError
from keel.tracking.health import Breach, Health
from keel.tracking.progress import ResizableLive, is_interactive

BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 5.0
VERDICT_STYLES = {"healthy": "green", "watch": "yellow", "sick": "bold red"}
WATCHED = 2
"""Breaches that are shown while a run goes on."""


def sparkline(values: list[float], width: int = 32) -> str:
    """Return a line of block characters, with gaps for values that are not finite."""
    if len(values) > width:
        step = len(values) / width
        values = [values[int((i + 1) * step) - 1] for i in range(width)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((v - low) * scale)] if math.isfinite(v) else " " for v in values)


def gauge(value: float, bound: float, width: int = 16) -> Text:
    """Return a bar of the used share of a bound: green, yellow near the end, red over it."""
    share = value / bound if bound > 0 and math.isfinite(value) else 0.0
    filled = min(width, round(share * width))
    color = "red" if share > 1.0 else "yellow" if share > 0.8 else "green"
    return Text.assemble(("█" * filled, color), ("░" * (width - filled), "dim"), f" {share:4.0%}")


class OutputError(InputError):
    """Error of a run whose output has no reader: its pipe was closed, or its disk is full."""


NOT_STARTED = "nothing was trained, and no run was made"
STOPPED = "training stops here, and `keel resume` goes on with it"


def print_line(
    console: Console, line: str, style: str | None = None, *, else_told: str = STOPPED
) -> None:
    """Print one line of a run, or raise an `OutputError` if the output cannot be written.

    Args:
        console: where.
        line: the text.
        style: of rich.
        else_told: what becomes of the run if the line cannot be printed.
    """
    try:
        console.print(line, style=style, highlight=False, soft_wrap=True)
    except OSError as error:
        reason = error.strerror or "its reader has closed it"
        raise OutputError(
            f"the standard output cannot be written ({reason}): {else_told}"
        ) from error


class Display(AbstractContextManager["Display"]):
    """Live display of a run.

    Args:
        config: Settings of the run.
        title: The line above everything.
        console: Where it is drawn.
        quiet: Draw nothing.
        diagnose: Takes in the metrics of an iteration, and returns the doctor's newest verdict.
    """

    def __init__(
        self,
        config: Any,
        title: str,
        console: Console,
        quiet: bool,
        diagnose: Callable[[int, Mapping[str, float]], str] | None = None,
    ) -> None:
        self.config = config
        self.title = title
        self.console = console
        self.quiet = quiet
        self.returns: deque[float] = deque(maxlen=4096)
        self.searches = Searches()
        self.health = Health()
        self.diagnose = diagnose
        self.verdict = ""
        self.watched: set[str] = set()
        self.progress = Progress(
            TextColumn("{task.percentage:3.0f} %"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[left]}"),
        )
        self.task = self.progress.add_task("", total=config.total_steps, left="")
        self.live = ResizableLive(console=console, refresh_per_second=8, transient=False)
        self.shown_at = 0.0
        self.started = time.perf_counter()
        self.first_steps: int | None = None

    def __enter__(self) -> Display:
        if is_interactive(self.console) and not self.quiet:
            self.live.update(Text("preparing the first update …", style="dim"))
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live.is_started:
            self.live.stop()

    def update(self, steps: int, metrics: dict[str, float], done: bool) -> None:
        """Show the newest iteration."""
        self.returns.append(metrics.get("rollout/return_mean", math.nan))
        self.searches.append(metrics)
        self.health.update(steps, metrics)
        if self.first_steps is None:
            self.first_steps, self.started = steps, time.perf_counter()
        if self.quiet:
            return
        verdict = "" if self.diagnose is None else self.diagnose(steps, metrics)
        is_new, self.verdict = verdict != self.verdict, verdict
        if self.live.is_started:
            self.progress.update(self.task, completed=steps, left=self._left(steps))
            self.live.update(self._panel(steps, metrics))
            return
        if is_new and not done:  # the summary has the last one
            print_line(self.console, f"doctor: {verdict}", verdict_style(verdict))
        if done or time.perf_counter() - self.shown_at >= PLAIN_SECONDS:
            self.shown_at = time.perf_counter()
            line = plain_line(steps, self.config.total_steps, metrics, self.searches)
            print_line(self.console, line)
            if not done:  # the summary follows
                self._print_new_breaches()

    def _print_new_breaches(self) -> None:
        """Print each breach once in a log, and again if it comes back."""
        breaches = self.health.breaches()
        for line in watch_lines([b for b in breaches if b.metric not in self.watched]):
            print_line(self.console, line, "yellow")
        self.watched = {breach.metric for breach in breaches}

    def evaluating(self, newest: Any) -> None:
        """Show that the evaluation of an iteration begins; in a log, of the last one only."""
        if self.quiet:
            return
        steps, total = newest.steps, self.config.total_steps
        if self.live.is_started:
            self.progress.update(self.task, completed=steps, left="evaluating …")
            self.live.update(self._panel(steps, newest.metrics))
        elif newest.done:
            print_line(self.console, f"{steps:>9,}/{total:,}  evaluating …")

    def _left(self, steps: int) -> str:
        done = steps - (self.first_steps or 0)
        if done <= 0:
            return ""
        seconds = (time.perf_counter() - self.started) / done * (self.config.total_steps - steps)
        return f"{int(max(seconds, 0)) // 60}:{int(max(seconds, 0)) % 60:02d} left"

    def _panel(self, steps: int, metrics: dict[str, float]) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=14)
        table.add_column(no_wrap=True)
        rate = metrics.get("time/steps_per_second", math.nan)
        table.add_row("steps", f"{steps:,} of {self.config.total_steps:,}   {rate:,.0f}/s")
        score = metrics.get("rollout/return_mean", math.nan)
        table.add_row("return", f"{_number(score)}   {sparkline(list(self.returns))}")
        kl, bound = metrics.get("train/kl_step", math.nan), metrics.get("train/max_kl", math.nan)
        kl_text = f"{kl:.4f} of {bound:.4g} nats" if math.isfinite(kl) else "rejected"
        table.add_row("exact KL", Text.assemble(gauge(kl, bound), f"   {kl_text}"))
        entropy = metrics.get("train/entropy", math.nan)
        if self.searches.success:
            damping = metrics.get("train/damping", math.nan)
            table.add_row("line search", f"{self.searches}   damping {damping:.3g}")
            table.add_row("entropy", f"{entropy:,.2f}")
        else:
            clipped = metrics.get("train/clip_fraction", math.nan)
            table.add_row("clip / entropy", f"{clipped:.1%}   {_number(entropy)}")
        if "train/bc_coef" in metrics:
            table.add_row("demonstrations", _cloning(metrics))
        rollbacks = int(metrics.get("train/rollbacks", 0))
        if "train/explained_variance" in metrics:
            table.add_row("explained var.", f"{metrics['train/explained_variance']:.2f}")
        undone_label = "rejected" if self.searches.success else "walked back"
        table.add_row(undone_label, f"{rollbacks} update{'s' * (rollbacks != 1)}")
        watch_texts = (
            Text(line, style="yellow", no_wrap=True, overflow="ellipsis")
            for line in watch_lines(self.health.breaches())
        )
        diagnosis = (
            Text(f"doctor: {line}", verdict_style(line), no_wrap=True, overflow="ellipsis")
            for line in filter(None, [self.verdict])
        )
        title = Text(self.title, style="bold")
        return Group(title, self.progress, table, *diagnosis, *watch_texts)


def verdict_style(verdict: str) -> str:
    """Return the color of the doctor's verdict, which is the first word of its line."""
    return VERDICT_STYLES.get(verdict.partition(":")[0], "dim")


def watch_lines(breaches: list[Breach]) -> list[str]:
    """Return a line for each of the first breaches; the last says how many more there are."""
    lines = [f"watch: {breach}" for breach in breaches[:WATCHED]]
    hidden = len(breaches) - len(lines)
    return [*lines[:-1], f"{lines[-1]}, and {hidden} more"] if hidden else lines


def print_health(console: Console, breaches: list[Breach]) -> None:
    """Print what was outside of its healthy range, with what that means."""
    for breach in breaches:
        share = f", {breach.outside} of the last {breach.window} updates" * (breach.until is None)
        console.print(
            f"watch: {breach}{share}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )
        _, _, meaning = breach.note.partition(": ")
        if meaning:
            console.print(
                f"  {meaning}", style="dim", highlight=False, markup=False, soft_wrap=True
            )
    if not breaches:
        console.print("health: nothing to watch", highlight=False)


class Searches:
    """Success rate (LS_OK) and step fraction (StepFrac) of the last line searches."""

    def __init__(self, memory: int = 20) -> None:
        self.success: deque[float] = deque(maxlen=memory)
        self.fractions: deque[float] = deque(maxlen=memory)

    def append(self, metrics: dict[str, float]) -> None:
        """Remember an update with a line search; others are ignored."""
        if "train/line_search_success" in metrics:
            self.success.append(metrics["train/line_search_success"])
            self.fractions.append(metrics["train/step_fraction"])

    def __str__(self) -> str:
        success_rate, step_fraction = (sum(x) / len(x) for x in (self.success, self.fractions))
        return f"LS_OK {success_rate:.0%}   StepFrac {step_fraction:.2f}"


def plain_line(
    steps: int, total: int, metrics: dict[str, float], searches: Searches | None = None
) -> str:
    """Return one line for a log file."""
    get = metrics.get
    method_text = f"clip {get('train/clip_fraction', math.nan):.2f}"
    undone_label = "walked back"
    if searches is not None and searches.success:
        method_text, undone_label = str(searches).replace("   ", "  "), "rejected"
    explained = ""
    if "train/explained_variance" in metrics:  # there is a critic
        explained = f"ev {metrics['train/explained_variance']:.2f}  "
    line = (
        f"{steps:>9,}/{total:,}  return {_number(get('rollout/return_mean', math.nan))}  "
        f"KL {get('train/kl_step', math.nan):.4f}/{get('train/max_kl', math.nan):.4g}  "
        f"{method_text}  "
        f"entropy {get('train/entropy', math.nan):.2f}  "
        f"{explained}"
        f"{undone_label} {int(get('train/rollbacks', 0))}  "
        f"{get('time/steps_per_second', math.nan):,.0f} steps/s"
    )
    if "train/bc_coef" in metrics:
        line += f"  {_cloning(metrics)}"
    if "eval/return_mean" in metrics:
        line += f"  evaluation {_number(metrics['eval/return_mean'])}"
    return line


def _cloning(metrics: dict[str, float]) -> str:
    """Return coefficient, gradient ratio and cosine of demonstrations as text."""
    coef, gradient_ratio, cosine = (
        metrics.get(f"train/bc_{name}", math.nan) for name in ("coef", "gradient_ratio", "cosine")
    )
    return f"bc {coef:.2g}  pull {gradient_ratio:.2g}  cosine {cosine:+.2f}"


def _number(value: float) -> str:
    return "–" if not math.isfinite(value) else f"{value:,.1f}"
