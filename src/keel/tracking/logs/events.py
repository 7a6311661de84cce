"""TensorBoard's event files: scalars of any framework, and CleanRL's hyperparameters."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.errors import RunError, import_extra
from keel.tracking.logs.log import Log, Points
from keel.tracking.logs.names import MOST_NAMES, Names, recognize
from keel.tracking.logs.settings import of_cleanrl, of_markdown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PREFIX = "events.out.tfevents"
TITLE = "TensorBoard"
HYPERPARAMETERS = "hyperparameters/text_summary"
SECONDS = "time/seconds"
_NUMBERS, _TEXT = (1, 2, 3, 9), 7
_LONGEST_TEXT = 1 << 16


@dataclass
class _Scalar:
    """The values of one tag."""

    step: array[int] = field(default_factory=lambda: array("q"))
    wall_time: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class _Events:
    """What an event file holds."""

    scalars: dict[str, _Scalar] = field(default_factory=dict)
    hyperparameters: str = ""
    damage: list[str] = field(default_factory=list)


def read_events(
    path: Path, names: Names | None = None, wanted: frozenset[str] | None = None
) -> Log:
    """Read all scalars of an event file; each tag has its own steps.

    Args:
        path: The file.
        names: Whose names they are; by default they are recognized.
        wanted: Keel's names to keep; all by default.
    """
    events = _read(path)
    names = names or Names(recognize(events.scalars), wanted=wanted)
    points: dict[str, Points] = {}
    labels = {}
    nans = {}
    for tag, target in names.best(events.scalars).values():
        known, nan = _points(events.scalars[tag])
        points[target.name] = Points(known.step, target.convert(known.values))
        labels[target.name] = tag
        if len(nan):
            nans[target.name] = nan
    if not any(names.find(tag) for tag in events.scalars):
        listed = ", ".join(list(events.scalars)[:12]) or "none"
        raise RunError(f"{path}: no scalar in it that Keel knows; there are {listed}")
    if SECONDS not in points and names.is_wanted(SECONDS):
        points[SECONDS] = _clock(events.scalars)
    settings = of_cleanrl(of_markdown(events.hyperparameters)) if events.hyperparameters else {}
    rows = len({step for scalar in points.values() for step in scalar.step.tolist()})
    return Log(
        names.framework,
        TITLE,
        points,
        rows,
        labels,
        settings,
        names.unmatched,
        tuple(events.damage),
        nans,
    )


def _points(scalar: _Scalar) -> tuple[Points, NDArray[np.int64]]:
    """Return one value a step, and the steps of NaN.

    Several environments may end an episode at once: their mean counts.
    """
    import numpy as np

    steps = np.frombuffer(scalar.step, dtype=np.int64)
    values = np.frombuffer(scalar.values, dtype=np.float64)
    known = ~np.isnan(values)
    union, index = np.unique(steps[known], return_inverse=True)
    total = np.bincount(index, weights=values[known], minlength=len(union))
    points = Points(union, total / np.bincount(index, minlength=len(union)))
    return points, np.unique(steps[~known])


def _clock(scalars: Mapping[str, _Scalar]) -> Points:
    """Return the seconds since the first event, by step."""
    import numpy as np

    steps = np.concatenate([np.frombuffer(s.step, dtype=np.int64) for s in scalars.values()])
    times = np.concatenate([np.frombuffer(s.wall_time, dtype=np.float64) for s in scalars.values()])
    union, index = np.unique(steps, return_inverse=True)
    latest = np.full(len(union), -np.inf)
    np.maximum.at(latest, index, times)
    return Points(union, latest - times.min())


def _read(path: Path) -> _Events:
    """Read every scalar up to the first damage of the file, and say where that is."""
    loader = import_extra("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
    events = _Events()
    count = negative = 0
    try:
        for event in loader.EventFileLoader(str(path)).Load():
            count += 1
            for value in event.summary.value if event.HasField("summary") else ():
                if not value.HasField("tensor"):
                    continue
                if event.step < 0:
                    negative += 1
                else:
                    _add(events, event.step, event.wall_time, value)
        events.damage = _torn_records(path, count)
    except Exception as error:
        raise RunError(f"{path}: not an event file that can be read: {error}") from error
    if negative:
        events.damage.append(f"{negative:,} values with a negative step were dropped")
    return events


def _add(events: _Events, step: int, wall_time: float, value: Any) -> None:
    tensor = value.tensor
    if tensor.dtype in _NUMBERS:
        number = _number(tensor)
        if number is None:
            return
        scalar = events.scalars.get(value.tag)
        if scalar is None:
            if len(events.scalars) >= MOST_NAMES:
                return
            scalar = events.scalars[value.tag] = _Scalar()
        scalar.step.append(step)
        scalar.wall_time.append(wall_time)
        scalar.values.append(number)
    elif value.tag == HYPERPARAMETERS and tensor.dtype == _TEXT and tensor.string_val:
        events.hyperparameters = tensor.string_val[0][:_LONGEST_TEXT].decode("utf-8", "replace")


def _number(tensor: Any) -> float | None:
    """Return the value of a tensor with one number."""
    if tensor.dtype == 1 and len(tensor.float_val) == 1:
        return float(tensor.float_val[0])
    util = import_extra("tensorboard.util.tensor_util", "tensorboard")
    array = util.make_ndarray(tensor)
    return float(array.reshape(())) if array.size == 1 else None


def _torn_records(path: Path, events: int) -> list[str]:
    """Say what of an event file could not be read.

    A record is its length (8 bytes), a checksum (4), the event, and another checksum (4).

    Args:
        path: the file.
        events: number of events that were read.
    """
    size, at, records = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while size - at >= 12:
            file.seek(at)
            end = at + 16 + struct.unpack("<Q", file.read(8))[0]
            if end > size:
                break
            at, records = end, records + 1
    sentences = []
    if at < size:
        sentences.append(
            f"the file is cut off in record {records + 1:,}, at byte {at:,} of {size:,}"
        )
    if events < records:
        lost_records = records - events
        sentences.append(
            f"record {events + 1:,} is damaged; it and all after it are lost: {lost_records:,}"
        )
    return sentences
