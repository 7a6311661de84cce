"""Reads the logs of others as if they were Keel's: CSV and TensorBoard, in the registry's names.

SB3 and RLlib write `progress.csv`, SB3's monitor one line an episode, CleanRL TensorBoard events;
any other CSV can be read with a mapping from its columns to Keel's names.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keel.errors import InputError, need
from keel.runs.errors import RunError
from keel.runs.metrics import REGISTRY, canonical
from keel.runs.reader import MetricsTable

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


class Log(NamedTuple):
    """A log, and whose it is."""

    table: MetricsTable
    source: str


def is_log(path: Path) -> bool:
    """Whether this file is one that can be read here."""
    return path.suffix == ".csv" or path.name.startswith(EVENTS)


def read_log(path: Path, mapping: Mapping[str, str] | None = None) -> Log:
    """A CSV or an event file; `mapping` gives columns of a CSV for `step` and Keel's names."""
    if path.name.startswith(EVENTS):
        return _read_events(path)
    return _read_csv(path, mapping or {})


def _read_csv(path: Path, mapping: Mapping[str, str]) -> Log:
    columns, header = _columns(path)
    if mapping:
        return Log(_mapped(path, columns, mapping), "csv")
    if header.startswith("#") and {"r", "l"} <= columns.keys():
        return Log(_monitor(columns), "sb3")
    for name, source in STEPS.items():
        if name in columns:
            return Log(_table(columns[name], _known(columns, source)), source)
    if STEP in columns:  # what `keel runs export` wrote
        kept = {name: x for name, x in columns.items() if _registered(name)}
        return Log(_table(columns[STEP], kept), "keel")
    raise InputError(
        f"{path}: whose log is this? Its columns are {_shown(columns)}; say what they are: "
        "--map step=COLUMN rollout/return_mean=COLUMN"
    )


def _columns(path: Path) -> tuple[dict[str, list[float]], str]:
    """The columns, and the comment of a first line that is one."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    comment = lines.pop(0) if lines and lines[0].startswith("#") else ""
    rows = list(csv.reader(lines))
    if len(rows) < 2:
        raise RunError(f"{path}: no line of numbers in it")
    names = rows[0]
    whole = [row for row in rows[1:] if len(row) == len(names)]  # the last may be half written
    return {name: [_float(row[i]) for row in whole] for i, name in enumerate(names)}, comment


def _mapped(
    path: Path, columns: Mapping[str, list[float]], mapping: Mapping[str, str]
) -> MetricsTable:
    for name, column in mapping.items():
        if column not in columns:
            raise InputError(
                f"--map {name}={column}: {path} has no such column, only {_shown(columns)}"
            )
        if name != STEP and not _registered(name):
            raise InputError(f"--map {name}={column}: Keel has no metric {name!r}")
    if STEP not in mapping:
        raise InputError(f"--map: which column of {path} counts steps? --map step=COLUMN")
    kept = {name: columns[column] for name, column in mapping.items() if name != STEP}
    return _table(columns[mapping[STEP]], kept)


def _monitor(columns: Mapping[str, list[float]]) -> MetricsTable:
    """SB3's `monitor.csv`: return, length and time of every episode."""
    steps, total = [], 0.0
    for length in columns["l"]:
        total += length
        steps.append(total)
    kept = {"rollout/return_mean": columns["r"], "rollout/length_mean": columns["l"]}
    if "t" in columns:
        kept["time/seconds"] = columns["t"]
    return _table(steps, kept)


def _known(columns: Mapping[str, list[float]], source: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, values in columns.items():
        target = canonical(name, source)
        if target is not None:
            found.setdefault(target.name, [target.scale * x for x in values])
    return found


def _table(steps: Iterable[float], columns: Mapping[str, list[float]]) -> MetricsTable:
    """Sorted by step; lines without one are dropped."""
    import numpy as np

    step = np.array(list(steps), dtype=np.float64)
    known = np.isfinite(step)
    order = np.argsort(step[known], kind="stable")

    def sort(values: list[float]) -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64)[known][order]

    return MetricsTable(
        step=step[known][order].astype(np.int64),
        columns={name: sort(values) for name, values in columns.items()},
        ignored=int((~known).sum()),
    )


def _read_events(path: Path) -> Log:
    """All scalars of an event file; each tag has its own steps, so rows are the union of them."""
    import numpy as np

    points = _scalars(path)
    source = max(SOURCES, key=lambda s: sum(canonical(tag, s) is not None for tag in points))
    merged: dict[str, list[tuple[int, float]]] = {}
    for tag, found in points.items():
        target = canonical(tag, source)
        scale = 1.0 if target is None else target.scale
        name = tag if target is None else target.name
        if target is not None or _registered(tag):
            merged.setdefault(name, []).extend((s, scale * x) for s, _, x in found)
    if not merged:
        raise RunError(f"{path}: no scalar in it that Keel knows; there are {_shown(points)}")
    clock = _clock(points)
    at = {s: i for i, s in enumerate(sorted({s for found in merged.values() for s, _ in found}))}
    columns = {}
    for name, values in merged.items():
        # several environments may end an episode at one step: their mean stands there
        total, count = np.zeros(len(at)), np.zeros(len(at))
        index = [at[s] for s, _ in values]
        np.add.at(total, index, [x for _, x in values])
        np.add.at(count, index, 1.0)
        columns[name] = np.divide(total, count, out=np.full(len(at), np.nan), where=count > 0)
    columns.setdefault("time/seconds", np.array([clock.get(s, math.nan) for s in at]))
    return Log(MetricsTable(np.array(list(at), dtype=np.int64), columns), source)


def _clock(points: Mapping[str, list[tuple[int, float, float]]]) -> dict[int, float]:
    """Seconds since the first event, by step."""
    times: dict[int, float] = {}
    for found in points.values():
        for step, when, _ in found:
            times[step] = max(times.get(step, when), when)
    start = min((when for found in points.values() for _, when, _ in found), default=0.0)
    return {step: when - start for step, when in times.items()}


def _scalars(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, wall time, value) of every scalar, by tag; a torn end is where reading stops."""
    loader = need("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
    util = need("tensorboard.util.tensor_util", "tensorboard")
    points: dict[str, list[tuple[int, float, float]]] = {}
    try:
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value if event.HasField("summary") else ():
                if value.HasField("tensor") and value.tensor.dtype in (1, 2, 3, 9):
                    array = util.make_ndarray(value.tensor)
                    if array.size == 1:
                        point = (int(event.step), float(event.wall_time), float(array.reshape(())))
                        points.setdefault(value.tag, []).append(point)
    except Exception as error:
        raise RunError(f"{path}: not an event file that can be read: {error}") from error
    return points


def _registered(name: str) -> bool:
    known = name in REGISTRY or name.rpartition("/")[0] in REGISTRY
    return known or name.startswith("env/")


def _shown(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return ", ".join(listed[:12]) + more


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
