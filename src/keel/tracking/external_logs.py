"""Readers of other libraries' logs (CSV and TensorBoard), in the registry's names.

SB3 and RLlib write `progress.csv`, SB3's monitor one line an episode, CleanRL TensorBoard events;
any other CSV can be read with a mapping from its columns to Keel's names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keel.errors import InputError, RunError, import_extra
from keel.tracking.csv_columns import Columns, read_columns
from keel.tracking.integrity import describe_lines
from keel.tracking.metrics import REGISTRY, canonical
from keel.tracking.reader import MetricsTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROGRESS, EVENTS = "progress.csv", "events.out.tfevents"
STEP = "step"
STEPS = {
    "time/total_timesteps": "sb3",
    "num_env_steps_sampled_lifetime": "rllib",
    "timesteps_total": "rllib",
    "num_env_steps_sampled": "rllib",
}
"""Columns that count steps, and whose they are."""
SOURCES = ("sb3", "cleanrl", "rllib")
MONITOR = {"r": "rollout/return_mean", "l": "rollout/length_mean", "t": "time/seconds"}
"""Columns of SB3's `monitor.csv`: return, length and time of every episode."""
TOO_MANY = 2.0**63
"""Steps are 64-bit integers."""


class Log(NamedTuple):
    """A log, and the library that wrote it."""

    table: MetricsTable
    source: str


def is_log(path: Path) -> bool:
    """Return whether this file is one that can be read here."""
    return path.suffix == ".csv" or path.name.startswith(EVENTS)


def read_log(
    path: Path, mapping: Mapping[str, str] | None = None, names: Collection[str] | None = None
) -> Log:
    """Read a CSV or an event file; the table's `damage` says what had to be left out.

    Args:
        path: the file.
        mapping: columns of a CSV for `step` and for Keel's names; by default they are recognised.
        names: metrics to read of a CSV, which saves memory; all by default.
    """
    if path.name.startswith(EVENTS):
        return _read_events(path)
    return _read_csv(path, mapping or {}, names)


class _Layout(NamedTuple):
    """Layout of the metrics in a CSV."""

    source: str
    step: str
    """the column that counts steps, or that holds lengths of episodes"""
    columns: dict[str, tuple[str, float]]
    """the column of each metric, and the factor to its unit in Keel"""
    episodes: bool = False
    """whether a row is an episode, so that steps are the sum of lengths"""


def _read_csv(path: Path, mapping: Mapping[str, str], names: Collection[str] | None) -> Log:
    layouts: list[_Layout] = []

    def choose(header: list[str], comment: str) -> list[str]:
        layout = (
            _mapped_layout(path, header, mapping)
            if mapping
            else _recognize_layout(path, header, comment)
        )
        if names is not None:
            columns = {name: column for name, column in layout.columns.items() if name in names}
            layout = layout._replace(columns=columns)
        layouts.append(layout)
        return [layout.step, *(column for column, _ in layout.columns.values())]

    read = read_columns(path, choose)
    (layout,) = layouts
    columns = {
        name: read.values[column] if scale == 1.0 else scale * read.values[column]
        for name, (column, scale) in layout.columns.items()
    }
    return Log(_table(read.values[layout.step], columns, read, layout.episodes), layout.source)


def _recognize_layout(path: Path, header: list[str], comment: str) -> _Layout:
    """Recognize the library that wrote a log by the names of its columns."""
    if comment and {"r", "l"} <= set(header):  # SB3's `monitor.csv`
        columns = {name: (column, 1.0) for column, name in MONITOR.items() if column in header}
        return _Layout("sb3", "l", columns, episodes=True)
    for column, source in STEPS.items():
        if column in header:
            columns = {}
            for name in header:
                if (target := canonical(name, source)) is not None:
                    columns.setdefault(target.name, (name, target.scale))
            return _Layout(source, column, columns)
    if STEP in header:  # what `keel runs export` wrote
        columns = {name: (name, 1.0) for name in header if _is_registered(name)}
        return _Layout("keel", STEP, columns)
    raise InputError(
        f"{path}: whose log is this? Its columns are {_list_names(header)}; say what they are: "
        "--map step=COLUMN rollout/return_mean=COLUMN"
    )


def _mapped_layout(path: Path, header: list[str], mapping: Mapping[str, str]) -> _Layout:
    for name, column in mapping.items():
        if column not in header:
            raise InputError(
                f"--map {name}={column}: {path} has no such column, only {_list_names(header)}"
            )
        if name != STEP and not _is_registered(name):
            raise InputError(f"--map {name}={column}: Keel has no metric {name!r}")
    if STEP not in mapping:
        raise InputError(f"--map: which column of {path} counts steps? --map step=COLUMN")
    columns = {name: (column, 1.0) for name, column in mapping.items() if name != STEP}
    return _Layout("csv", mapping[STEP], columns)


def _table(
    steps: NDArray[np.float64],
    columns: dict[str, NDArray[np.float64]],
    read: Columns,
    lengths: bool,
) -> MetricsTable:
    """Sort by step; rows without a step that can be counted are dropped and noted as damage.

    Args:
        steps: `[rows]`, or lengths of episodes, whose sum the steps are.
        columns: `[rows]` each, by metric.
        read: where the rows stand, and what was dropped already.
        lengths: whether `steps` are lengths.
    """
    import numpy as np

    good = np.isfinite(steps) & (steps >= 0.0) & (steps < TOO_MANY)
    problem = "without a length of its episode" if lengths else "without a step below 2^63"
    damage = [*read.damage, *describe_lines(read.lines[~good].tolist(), problem)]
    if not good.all():
        steps = steps[good]
        columns = {name: values[good] for name, values in columns.items()}
    if lengths:
        steps = np.cumsum(steps)
    if (steps[1:] < steps[:-1]).any():
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        columns = {name: values[order] for name, values in columns.items()}
    dropped = int((~good).sum())
    return MetricsTable(steps.astype(np.int64), columns, ignored=dropped, damage=tuple(damage))


def _read_events(path: Path) -> Log:
    """Read all scalars of an event file; each tag has its own steps, so rows are their union."""
    import numpy as np

    points, damage = _scalars(path)
    source = max(SOURCES, key=lambda s: sum(canonical(tag, s) is not None for tag in points))
    merged: dict[str, list[tuple[int, float]]] = {}
    for tag, events in points.items():
        target = canonical(tag, source)
        scale = 1.0 if target is None else target.scale
        name = tag if target is None else target.name
        if target is not None or _is_registered(tag):
            merged.setdefault(name, []).extend((s, scale * x) for s, _, x in events)
    if not merged:
        raise RunError(f"{path}: no scalar in it that Keel knows; there are {_list_names(points)}")
    clock = _clock(points)
    at = {s: i for i, s in enumerate(sorted({s for events in merged.values() for s, _ in events}))}
    columns = {}
    for name, values in merged.items():
        # several environments may end an episode at one step: their mean stands there
        total, count = np.zeros(len(at)), np.zeros(len(at))
        index = [at[s] for s, _ in values]
        np.add.at(total, index, [x for _, x in values])
        np.add.at(count, index, 1.0)
        columns[name] = np.divide(total, count, out=np.full(len(at), np.nan), where=count > 0)
    columns.setdefault("time/seconds", np.array([clock.get(s, math.nan) for s in at]))
    table = MetricsTable(np.array(list(at), dtype=np.int64), columns, damage=tuple(damage))
    return Log(table, source)


def _clock(points: Mapping[str, list[tuple[int, float, float]]]) -> dict[int, float]:
    """Return the seconds since the first event, by step."""
    times: dict[int, float] = {}
    for events in points.values():
        for step, wall_time, _ in events:
            times[step] = max(times.get(step, wall_time), wall_time)
    start = min(
        (wall_time for events in points.values() for _, wall_time, _ in events), default=0.0
    )
    return {step: wall_time - start for step, wall_time in times.items()}


Points = dict[str, list[tuple[int, float, float]]]
"""(step, wall time, value) of every scalar, by tag."""


def _scalars(path: Path) -> tuple[Points, list[str]]:
    """Read every scalar up to the first damage of the file, and say where that is."""
    loader = import_extra("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
    util = import_extra("tensorboard.util.tensor_util", "tensorboard")
    points: Points = {}
    events = negative = 0
    try:
        for event in loader.EventFileLoader(str(path)).Load():
            events += 1
            for value in event.summary.value if event.HasField("summary") else ():
                if value.HasField("tensor") and value.tensor.dtype in (1, 2, 3, 9):
                    array = util.make_ndarray(value.tensor)
                    if array.size != 1:
                        continue
                    point = (int(event.step), float(event.wall_time), float(array.reshape(())))
                    if point[0] < 0:
                        negative += 1
                    else:
                        points.setdefault(value.tag, []).append(point)
        damage = _torn_records(path, events)
    except Exception as error:
        raise RunError(f"{path}: not an event file that can be read: {error}") from error
    if negative:
        damage.append(f"{negative:,} values with a negative step were dropped")
    return points, damage


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


def _is_registered(name: str) -> bool:
    is_metric = name in REGISTRY or name.rpartition("/")[0] in REGISTRY
    return is_metric or name.startswith("env/")


def _list_names(names: Iterable[str]) -> str:
    listed = list(names)
    suffix = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return ", ".join(listed[:12]) + suffix
