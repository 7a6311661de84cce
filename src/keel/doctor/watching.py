"""The doctor beside a run that goes on, and at its end: never in its way.

Whatever goes wrong in here is one warning; a run goes on, and ends as it would have.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from keel.config import to_dict
from keel.config.values import in_text
from keel.doctor.examine import Diagnosis, examine
from keel.doctor.run_log import from_table
from keel.doctor.text import verdict_line
from keel.errors import RunWarning
from keel.printing import printable
from keel.tracking.directory import DOCTOR
from keel.tracking.files import replace_file
from keel.tracking.reader import MetricsTable
from keel.tracking.resume import flat

MEMORY = 1000
"""Newest iterations that the live verdict looks at."""
FIRST_SECONDS = 5.0
"""Seconds before the first look."""
SHARE = 0.004
"""Share of the time that looks take at most; the pause grows with what the last one cost."""


class Watching:
    """The verdict of a run that goes on, looked at again from time to time.

    Args:
        config: Settings of the run.
        clock: Source of seconds.
    """

    def __init__(self, config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._settings = settings_of(config)
        self._newest: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MEMORY)
        self._clock = clock
        self._next = clock() + FIRST_SECONDS
        self._line = ""
        self._failed = False

    def __call__(self, steps: int, metrics: Mapping[str, float]) -> str:
        """Take in an iteration, and return the newest verdict; empty before the first."""
        self._newest.append((steps, metrics))
        if self._clock() >= self._next:
            started = self._clock()
            self._line = self._look()
            ended = self._clock()
            pause = max(FIRST_SECONDS, (ended - started) / SHARE)
            self._next = math.inf if self._failed else ended + pause
        return self._line

    def _look(self) -> str:
        try:
            return verdict_line(self.diagnose())
        except Exception as error:
            self._failed = True
            return f"none: {_reason(error)}"

    def diagnose(self) -> Diagnosis:
        """Return the diagnosis of the iterations so far."""
        step = np.array([steps for steps, _ in self._newest], dtype=np.int64)
        names = dict.fromkeys(name for _, metrics in self._newest for name in metrics)
        columns = {
            name: np.array([float(m.get(name, math.nan)) for _, m in self._newest])
            for name in names
        }
        table = MetricsTable(step, columns)
        return examine(from_table(table, "keel", "live", settings=self._settings))


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings of a run by their dotted names, as rules read them."""
    return {name: in_text(name, value) for name, value in flat(to_dict(config))}


def write_diagnosis(run: Path) -> None:
    """Write `doctor.json` of a run; what goes wrong is one warning."""
    from keel.doctor.reading import needed_names, read_logs

    try:
        (log,) = read_logs(run, names=needed_names())
        if log.rows:
            data = json.dumps(examine(log).as_dict(), allow_nan=False, indent=1)
            replace_file(run / DOCTOR, f"{data}\n".encode(errors="replace"))
    except Exception as error:
        with suppress(RunWarning):  # where warnings are errors, this one is none
            warnings.warn(f"{run}: was not diagnosed: {_reason(error)}", RunWarning, stacklevel=2)


def read_verdict(run: Path) -> tuple[str, str] | None:
    """Return verdict and sentence of a run that was diagnosed; None where there is none."""
    try:
        data = json.loads((run / DOCTOR).read_bytes())
        return printable(str(data["verdict"])), printable(str(data["sentence"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
