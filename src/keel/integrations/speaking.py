"""The doctor beside other people's trainers: it collects what they log, and speaks when it changes.

What a callback shares with every other one: rows in the names of the framework (and of Keel, where
the callback measured something itself), a diagnosis from time to time, one line when verdict or
cause change, and `doctor.json` at the end. Whatever goes wrong in here is one warning; a training
goes on, and ends as it would have.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.errors import RunWarning
from keel.tracking.directory import DOCTOR
from keel.tracking.files import replace_file
from keel.tracking.logs.log import Log, Row, collect
from keel.tracking.logs.names import Names, is_registered
from keel.tracking.metrics import Canonical

if TYPE_CHECKING:
    from keel.doctor.examine import Diagnosis

EVERY = 10
"""Rows between two looks."""
MEMORY = 2000
"""Newest rows that a look takes in."""
LAYOUT = "callback"


class Both(Names):
    """Names of a framework, and Keel's own beside them, which a callback measures."""

    def find(self, name: str) -> Canonical | None:
        """Return Keel's name of a metric; None if it has none."""
        found = super().find(name)
        if found is None and is_registered(name):
            found = self._found[name] = Canonical(name)
        return found


class Speaker:
    """The verdict of a training of another library, said whenever it changes."""

    def __init__(
        self,
        framework: str,
        *,
        every: int = EVERY,
        path: Path | str | None = None,
        ignore: tuple[str, ...] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Prepare to listen.

        Args:
            framework: Whose names the rows have, one of `keel.tracking.logs.FRAMEWORKS`.
            every: Rows between two looks; from the fourth one on.
            path: Folder or file of the last diagnosis; None: nothing is written.
            ignore: Rules that shall not speak.
            say: Takes each line.
        """
        self.settings: dict[str, Any] = {}
        """what is known of the training, by Keel's dotted names"""
        self.diagnosis: Diagnosis | None = None
        """the newest one"""
        self._framework, self._every, self._ignore = framework, max(1, every), ignore
        self._path = None if path is None else _file(Path(path))
        self._say = say
        self._rows: deque[Row] = deque(maxlen=MEMORY)
        self._count = 0
        self._last = ("", "")
        self._said: set[str] = set()
        self._failed = False

    @property
    def rows(self) -> list[Row]:
        """What was collected."""
        return list(self._rows)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Take in a row, and look every so many rows; a row at the step before joins it.

        Args:
            step: As the trainer counts; rules only compare them.
            values: By the names of the framework, or by Keel's; what is no number is left out.
        """
        self.guarded(lambda: self._add(step, values))

    def close(self) -> None:
        """Look once more, say it, and write the diagnosis."""
        self.guarded(self._close)

    def guarded(self, do: Callable[[], object]) -> None:
        """Do something for the doctor; after the first failure it is silent, and does no more."""
        if self._failed:
            return
        try:
            do()
        except Exception as error:
            self._failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            _warn(f"the doctor gave up, training goes on: {reason}")

    def diagnose(self) -> Diagnosis:
        """Return the diagnosis of the rows so far."""
        from keel.doctor.examine import examine

        return examine(log_of(self._rows, self._framework, self.settings), self._ignore)

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(x) for name, x in values.items() if _is_number(x)}
        if self._rows and self._rows[-1].step == step:
            self._rows[-1] = Row(step, {**self._rows[-1].values, **numbers})
            return
        self._rows.append(Row(step, numbers))
        self._count += 1
        if self._count % self._every == 0:
            self._look()

    def _look(self) -> None:
        from keel.doctor.text import verdict_line

        self.diagnosis = self.diagnose()
        first = self.diagnosis.findings[0].rule if self.diagnosis.findings else ""
        now, line = (self.diagnosis.verdict, first), verdict_line(self.diagnosis)
        if now != self._last and line not in self._said:
            self._said.add(line)
            self._say(f"keel doctor, step {self._rows[-1].step:,}: {line}")
        self._last = now  # numbers in a sentence change with every look, and are no news

    def _close(self) -> None:
        if not self._rows:
            return
        self._look()
        if self._path is not None and self.diagnosis is not None:
            data = json.dumps(self.diagnosis.as_dict(), allow_nan=False, indent=1)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, f"{data}\n".encode(errors="replace"))


def log_of(rows: Any, framework: str, settings: Mapping[str, Any]) -> Any:
    """Return rows as rules read them.

    Args:
        rows: In the names of the framework or Keel's, in the order of their steps.
        framework: Whose names they are.
        settings: By Keel's dotted names.
    """
    from keel.doctor.reading import as_run_log

    names = Both(framework)
    found = collect(rows, names)
    log = Log(
        framework,
        LAYOUT,
        found.points,
        found.rows,
        found.labels,
        settings,
        names.unmatched,
        tuple(found.damage),
        found.nans,
    )
    return as_run_log(log)


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that are numbers, texts or None; others are left out.

    Args:
        values: By Keel's dotted names.
    """
    kinds = bool | int | float | str
    return {k: v for k, v in values.items() if isinstance(v, kinds)}


def share_trained(parameters: Iterable[Any], optimizer: Any) -> float:
    """Return the share of parameters that an optimizer holds and that require gradients.

    Args:
        parameters: Of the policy.
        optimizer: With `param_groups`, as torch's have.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    counts = [(int(p.numel()), p.requires_grad and id(p) in held) for p in parameters]
    total = sum(size for size, _ in counts)
    trained = sum(size for size, is_trained in counts if is_trained)
    return float(trained / max(1, total))


class Moves:
    """How far parameters move between two looks; of large ones a part stands for all."""

    def __init__(self, parameters: Iterable[Any], part: int = 4096) -> None:
        """Remember where they are.

        Args:
            parameters: Of the policy.
            part: Numbers of each parameter that are looked at.
        """
        self._parameters, self._part = list(parameters), part
        self._before = self._look()

    def __call__(self) -> float | None:
        """Return ‖Δθ‖ / ‖θ‖ since the look before; None where there is nothing to look at."""
        before, self._before = self._before, self._look()
        size = sum(float(x.square().sum()) for x in before)
        if size == 0.0:
            return None
        pairs = zip(before, self._before, strict=True)
        moved: float = sum(float((x - y).square().sum()) for x, y in pairs)
        return math.sqrt(moved / size)

    def _look(self) -> list[Any]:
        return [p.detach().flatten()[: self._part].double().cpu().clone() for p in self._parameters]


def _file(path: Path) -> Path:
    return path if path.suffix == ".json" else path / DOCTOR


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    try:
        float(value)
        return True
    except (TypeError, ValueError):
        return False


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RunWarning, stacklevel=4)
    except RunWarning:
        return  # where warnings are errors, this one is none
