"""Reader of `metrics.jsonl`, also while it is being written and after a crash."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from keel.errors import RunError
from keel.tracking.directory import METRICS, missing_lines
from keel.tracking.files import write_file
from keel.tracking.integrity import damaged_lines, describe_lines, describe_missing
from keel.tracking.old_names import has_old_names, rename_metrics
from keel.tracking.writer import RESERVED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TAIL = 64 * 1024
"""Bytes of the file's end in which `last_values` looks."""


@dataclass(frozen=True)
class MetricsTable:
    """The metrics of a run, sorted by step; missing values are NaN, infinities are restored."""

    step: NDArray[np.int64]
    """`[n]`"""
    columns: dict[str, NDArray[np.float64]]
    """`[n]` each, by metric"""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """verdicts and reasons"""
    ignored: int = 0
    """lines that are no record: half written, damaged"""
    duplicates: int = 0
    """records written again later; the last one counts"""
    nonstandard: int = 0
    """bare NaN or Infinity, which strict JSON does not know, read as missing"""
    dropped: int = 0
    """records that a full disk swallowed"""
    missing: int = 0
    """lines that were there when the run ended"""
    damage: tuple[str, ...] = ()
    """sentences about what was left out, and where it stood"""

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.step)


def read_metrics(run: Path | str, names: Collection[str] | None = None) -> MetricsTable:
    """Return the metrics of a run (its directory, or the file itself).

    Args:
        run: The directory; lines that it had when it ended and has no more are noted as damage.
        names: Metrics to read, which is faster; all by default.
    """
    table = _read_table(_metrics_file(Path(run)), names)
    missing = missing_lines(Path(run)) if Path(run).is_dir() else 0
    if not missing:
        return table
    return replace(table, missing=missing, damage=(*table.damage, describe_missing(missing)))


def _read_table(path: Path, names: Collection[str] | None) -> MetricsTable:
    import numpy as np

    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error
    if names is not None and not has_old_names(data):
        quick = _read_some(data, names)
        if quick is not None:
            return quick
    records, damaged = _records(data)
    steps = sorted(records)
    rows = [records[step] for step in steps]
    written = dict.fromkeys(name for row in rows for name in row if name not in RESERVED)
    names = [name for name in written if names is None or name in names]
    textual = {name for name in names for row in rows if isinstance(row.get(name), str)}
    dropped = max((d for row in rows if isinstance(d := row.get("dropped"), int)), default=0)
    return MetricsTable(
        step=np.array(steps, dtype=np.int64),
        columns={
            name: np.array([_number(row, name) for row in rows], dtype=np.float64)
            for name in names
            if name not in textual
        },
        texts={name: [_text(row.get(name)) for row in rows] for name in names if name in textual},
        ignored=len(damaged.lines),
        duplicates=damaged.duplicates,
        nonstandard=damaged.nonstandard,
        dropped=dropped,
        damage=tuple(damaged.sentences(dropped)),
    )


class Latest(NamedTuple):
    """Records near the end of a run's metrics."""

    step: int | None
    """None before the first record"""
    values: list[float]
    """the last known value of each metric; NaN where there is none"""
    damaged: int
    """lines near the end that hold no record; the last one may just be half written"""


def last_values(run: Path | str, *names: str) -> Latest:
    """Return the last step, and the last known value of each metric near the end of the file.

    Args:
        run: the directory of the run, or the file itself.
        names: metrics.
    """
    records, damaged = _last_records(_metrics_file(Path(run)))
    values = dict.fromkeys(names, math.nan)
    for step in sorted(records):
        record_values = {name: _number(records[step], name) for name in names}
        values |= {name: value for name, value in record_values.items() if not math.isnan(value)}
    return Latest(max(records, default=None), list(values.values()), len(damaged.lines))


def last_step(run: Path | str) -> int:
    """Return the last step that metrics were written of; 0 if there are none."""
    path = Path(run) / METRICS
    return (last_values(path).step or 0) if path.is_file() else 0


def export_csv(run: Path | str, path: Path | str) -> MetricsTable:
    """Write the metrics as CSV: `step`, then one column a metric; missing values stay empty.

    Args:
        run: the directory of the run, or the file itself.
        path: the CSV file.

    Returns:
        What was written, and in its `damage` what could not be.
    """
    table = read_metrics(run)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["step", *table.columns, *table.texts])
    for i, step in enumerate(table.step):
        numbers = (column[i] for column in table.columns.values())
        cells = ["" if math.isnan(number) else repr(float(number)) for number in numbers]
        writer.writerow([step, *cells, *(texts[i] or "" for texts in table.texts.values())])
    write_file(Path(path), text.getvalue().encode(errors="replace"), make_folder=False)
    return table


def _metrics_file(run: Path) -> Path:
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise RunError(f"{path}: no metrics here")
    return path


def _last_records(path: Path) -> tuple[dict[int, dict[str, Any]], _Damaged]:
    with path.open("rb") as file:
        size, tail = file.seek(0, io.SEEK_END), TAIL
        while True:  # lines of many agents are long: look further back until one is whole
            start = max(size - tail, 0)
            file.seek(start)
            data = file.read()
            records, damaged = _records(data.partition(b"\n")[2] if start else data)
            if records or start == 0:
                return records, damaged
            tail *= 8


@dataclass
class _Damaged:
    """Content of a file that is no plain record."""

    lines: list[int] = field(default_factory=list)
    """numbers of lines that are no record or not as they were written, from 1"""
    duplicates: int = 0
    nonstandard: int = 0

    def sentences(self, dropped: int) -> list[str]:
        """Describe the damage in sentences; `dropped` lines were never written."""
        sentences = describe_lines(self.lines, "without a record of metrics")
        if self.duplicates:
            sentences.append(
                f"{self.duplicates:,} steps stand there twice; the last of each counts"
            )
        if self.nonstandard:
            sentences.append(f"{self.nonstandard:,} bare NaN or Infinity were read as missing")
        if dropped:
            sentences.append(f"{dropped:,} lines were never written: the disk was full")
        return sentences


def _records(data: bytes) -> tuple[dict[int, dict[str, Any]], _Damaged]:
    """Return records by step, the last of each winning, and what was no plain record."""
    records: dict[int, dict[str, Any]] = {}
    damaged = _Damaged()

    def bare(_: str) -> None:
        damaged.nonstandard += 1

    lines, old = data.split(b"\n"), has_old_names(data)
    changed = damaged_lines(lines)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=bare)
            step = record["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.lines.append(i + 1)
            continue
        if type(step) is not int or not 0 <= step < 2**63 or i in changed:
            damaged.lines.append(i + 1)
            continue
        damaged.duplicates += step in records
        records[step] = rename_metrics(record) if old else record
    return records, damaged


def _read_some(data: bytes, names: Collection[str]) -> MetricsTable | None:
    """Return the table with nothing but `names`; None if a line is damaged or duplicated.

    A line has a hundred metrics; msgspec skips the others twenty times faster than `json` reads
    them.
    """
    import msgspec
    import numpy as np

    if damaged_lines(data.split(b"\n")):
        return None
    columns = {f"m{i}": name for i, name in enumerate(names)}
    line = msgspec.defstruct(
        "Line",
        [
            ("step", int),
            ("flags", dict[str, str] | None, None),
            ("dropped", int, 0),
            *((attribute, float | None, None) for attribute in columns),
        ],
        rename=columns,
        gc=False,
    )
    try:
        lines: list[Any] = msgspec.json.Decoder(line).decode_lines(data)
    except msgspec.MsgspecError:  # half written, damaged, or words among the numbers
        return None
    steps = [x.step for x in lines]
    if sorted(set(steps)) != steps or not all(0 <= x < 2**63 for x in steps[:1] + steps[-1:]):
        return None

    values = np.array([steps], dtype=np.float64).T
    if columns:
        rows = list(map(attrgetter("step", *columns), lines))
        values = np.array(rows, dtype=np.float64).reshape(len(rows), len(columns) + 1)
    places = {name: i for i, name in enumerate(columns.values(), 1)}
    if b'inf"' in data:
        _restore_infinities(values, places, [line.flags for line in lines])
    dropped = max((x.dropped for x in lines), default=0)
    table = {name: values[:, i].copy() for name, i in places.items()}
    return MetricsTable(
        step=np.array(steps, dtype=np.int64),
        columns={name: column for name, column in table.items() if not np.isnan(column).all()},
        dropped=dropped,
        damage=tuple(_Damaged().sentences(dropped)),
    )


def _restore_infinities(
    values: NDArray[np.float64],
    places: Mapping[str, int],
    flags: Sequence[Mapping[str, str] | None],
) -> None:
    """Put the infinities back, which strict JSON does not know.

    Args:
        values: `[lines, columns]`, NaN where a line has none.
        places: The column of each metric.
        flags: Those of each line.
    """
    for row, named in enumerate(flags):
        for name, flag in (named or {}).items():
            place = places.get(name)
            if place is not None and flag in _FLAGGED and math.isnan(values[row, place]):
                values[row, place] = _FLAGGED[flag]


_FLAGGED = {"inf": math.inf, "-inf": -math.inf}


def _number(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    if value is None:
        flags = record.get("flags")
        flag = flags.get(name) if isinstance(flags, dict) else None
        return _FLAGGED.get(str(flag), math.nan)
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _text(value: object) -> str | None:
    """Return a text that can be encoded: lone surrogates, as in JSON, become question marks."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else None
