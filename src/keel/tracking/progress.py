"""Progress of long work on stderr: a moving bar on a terminal, plain lines at intervals elsewhere.

`is_interactive` is the one place that decides between the two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from keel.printing import printable

PLAIN_SECONDS = 5.0
"""Seconds between two plain lines."""


def is_interactive(console: Console) -> bool:
    """Return whether a display may move the cursor of this console.

    False without a terminal (colors that `FORCE_COLOR` asks for in a file do not make one), on one
    that cannot move its cursor (`TERM=dumb`), and in continuous integration (`CI` is set), whose
    logs keep every redrawn line.

    Args:
        console: The console that would be drawn on.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
    only_colors = "FORCE_COLOR" in os.environ and not console.file.isatty()
    can_move = console.is_interactive and not console.is_dumb_terminal
    return can_move and not in_ci and not only_colors


class PipedConsole(Console):
    """A console for text from outside: what could steer the terminal is written out.

    Square brackets and names of emoji are text as well, not rich's markup: they may stand in the
    name of a folder. A closed pipe is left to `keel.cli`, where rich would exit with status 1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render to segments; rich's own control codes are segments of another kind."""
        for segment in super().render(renderable, options):
            if segment.control is None:
                segment = segment._replace(text=printable(segment.text))
            yield segment

    def on_broken_pipe(self) -> None:
        """Raise the error, so that the caller sees it."""
        raise BrokenPipeError


class Trimmed:
    """A renderable without the spaces at the end of its lines, which a narrower terminal wraps."""

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.content, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
            yield from line
            yield Segment.line()


class ResizableLive(Live):
    """A live display that leaves nothing on the screen when the terminal becomes narrower.

    Terminals wrap lines that no longer fit, so that a display of n lines covers more than n rows.
    Before it draws again, the rows that were added are erased.
    """

    def get_renderable(self) -> RenderableType:
        """Return what is drawn, without spaces at the end of lines."""
        return Trimmed(super().get_renderable())

    def refresh(self) -> None:
        """Draw the newest state, at the width that the terminal has now."""
        with self._lock:
            self._erase_wrapped_rows()
            super().refresh()
            lines = self.console.render_lines(self.get_renderable(), pad=False)
            visible = lines[: self.console.height]
            self._widths = [sum(part.cell_length for part in line) for line in visible]

    _widths: Sequence[int] = ()
    """Widths of the lines that were drawn last."""

    def _erase_wrapped_rows(self) -> None:
        width = max(1, self.console.width)
        added = sum(max(0, -(-length // width) - 1) for length in self._widths)
        if added and self.is_started:
            self.console.file.write(f"\r\x1b[{added}A\x1b[J")


class WorkProgress(AbstractContextManager["WorkProgress"]):
    """Show how much of a long piece of work is done.

    Args:
        title: What is being done, for example "keel land".
        total: Units of work.
        step: The first step, named before any work is done.
        console: Where to write; stderr by default, so that results on stdout stay clean.
        clock: Source of seconds, for tests.
    """

    def __init__(
        self,
        title: str,
        total: float,
        step: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total, self.step, self.done = title, total, step, 0.0
        self.console = console or Console(stderr=True, highlight=False)
        self._clock, self._begin, self._printed = clock, clock(), clock()
        self._bar: Progress | None = None

    def __enter__(self) -> WorkProgress:
        if is_interactive(self.console):
            columns = (
                SpinnerColumn(),
                TextColumn("{task.fields[title]}"),
                BarColumn(bar_width=30),
                TextColumn("{task.percentage:3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.description}", style="dim", markup=False),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._task = self._bar.add_task(self.step, total=self.total, title=self.title)
            self._bar.start()
        else:
            self._print_line()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, units: float, step: str) -> None:
        """Count units of work as done.

        Args:
            units: How many.
            step: The step they belong to, for example the name of a router.
        """
        self.done, self.step = min(self.total, self.done + units), step
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=step)
        elif self._clock() - self._printed >= PLAIN_SECONDS:
            self._print_line()

    def _print_line(self) -> None:
        self._printed = self._clock()
        share = self.done / self.total if self.total else 1.0
        minutes, seconds = divmod(int(self._printed - self._begin), 60)
        parts = [f"{share:.0%}", f"{minutes}:{seconds:02d}", *filter(None, [self.step])]
        line = f"{self.title}: {', '.join(parts)}"
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)
