"""Recognize and read the log of any framework, and find logs in folders."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keel.errors import InputError, RunError, check_choice
from keel.tracking.directory import METRICS
from keel.tracking.integrity import has_checksum
from keel.tracking.logs import csv_logs, events, layouts, trainer_state
from keel.tracking.logs.keel_runs import is_run, read_run
from keel.tracking.logs.layouts import LAYOUTS, TITLES, parse_json, step_name, with_steps
from keel.tracking.logs.log import Log, Row, collect
from keel.tracking.logs.names import FRAMEWORKS, GENERIC, Names, keel_name, recognize
from keel.tracking.logs.settings import of_agent, of_arguments, of_rllib
from keel.tracking.logs.text import parts_of, read_lines

PROGRESS, RESULTS, SWIFT = "progress.csv", "result.json", "logging.jsonl"
FORMATS = ("keel", "csv", "events", "trainer_state", *LAYOUTS)
"""Formats that can be forced; the last ones are layouts of text."""
TEXTS = (".log", ".txt", ".out", ".jsonl", ".csv", ".json")
"""Ends of names of files that are looked into."""
PART = 1 << 21
"""Characters in which a text is looked at for what it holds."""
LOOKED_AT = 32
"""Parts of a text that are looked at in a search of a folder."""
DEEPEST = 12
_BEGINNING = 1 << 16
_CSV_CELL = re.compile(r"[^{}:]{0,300}")


@dataclass(frozen=True)
class Choice:
    """How to read a log; None: as it is recognized."""

    layout: str | None = None
    """one of `FORMATS`"""
    framework: str | None = None
    mapping: Mapping[str, str] | None = None
    """names in the log, by Keel's names and `step`"""
    wanted: frozenset[str] | None = None
    """Keel's names to read; all by default"""


def read_log(
    path: Path,
    mapping: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
    *,
    layout: str | None = None,
    framework: str | None = None,
) -> Log:
    """Read the log of a run; its `damage` says what had to be left out.

    Args:
        path: A file, or the folder of a run of Keel.
        mapping: Names in the log for `step` and for Keel's names; by default they are recognized.
        names: Metrics to read, with those of their agents, which saves time; all by default.
        layout: One of `FORMATS`; by default it is recognized.
        framework: One of `FRAMEWORKS`; by default it is recognized.
    """
    if layout is not None:
        check_choice("layout", layout, FORMATS)
    if framework is not None:
        check_choice("framework", framework, FRAMEWORKS)
    wanted = None if names is None else frozenset(names)
    choice = Choice(layout, framework, mapping, wanted)
    read = _READERS.get(layout or recognize_format(path), _read_text)
    return read(path, choice)


def recognize_format(path: Path) -> str:
    """Return one of `FORMATS`, or `text` where the lines have to tell.

    Args:
        path: A file, or the folder of a run of Keel.
    """
    if path.is_dir():
        if not is_run(path):
            raise InputError(f"{path}: a folder without {METRICS} is no run of Keel")
        return "keel"
    if path.name.startswith(events.PREFIX):
        return "events"
    beginning = _beginning(path)
    first, _, rest = beginning.partition("\n")
    if trainer_state.is_trainer_state(beginning) or path.name == trainer_state.NAME:
        return "trainer_state"
    if first.startswith('{"step"') and (path.name == METRICS or _has_checksum(first)):
        return "keel"
    return "csv" if path.suffix == ".csv" or _is_csv(first, rest) else "text"


def _has_checksum(line: str) -> bool:
    return has_checksum(line.rstrip().encode(errors="replace"))


def _beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_BEGINNING).decode("utf-8", "replace").removeprefix("\ufeff")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error


def _is_csv(first: str, rest: str) -> bool:
    """Return whether two lines look like a header and as many cells."""
    if first.startswith("#"):
        first, _, rest = rest.partition("\n")
    names, cells = first.strip().split(","), rest.partition("\n")[0].strip().split(",")
    if len(names) < 2 or len(names) != len(cells):
        return False
    return bool(names[0]) and all(_CSV_CELL.fullmatch(cell) for cell in (*names, *cells))


def _read_keel(path: Path, choice: Choice) -> Log:
    return read_run(path, choice.wanted)


def _read_csv(path: Path, choice: Choice) -> Log:
    log = csv_logs.read_csv(
        path, framework=choice.framework, mapping=choice.mapping, wanted=choice.wanted
    )
    if log.framework != "rllib":
        return log
    parameters = path.with_name("params.json")
    text = _beginning(parameters) if parameters.is_file() else ""
    return replace(log, settings=of_rllib(parse_json(text) or {}))


def _read_events(path: Path, choice: Choice) -> Log:
    if choice.mapping:
        csv_logs.check_mapping({**choice.mapping, csv_logs.STEP: ""}, str(path))
    names = None
    if choice.mapping or choice.framework:
        names = Names(choice.framework or GENERIC, choice.mapping or {}, choice.wanted)
    log = events.read_events(path, names, choice.wanted)
    return replace(log, settings=of_agent(path)) if log.framework == "rsl_rl" else log


def _read_state(path: Path, choice: Choice) -> Log:
    framework = choice.framework or "trl"
    names = Names(framework, choice.mapping or {}, choice.wanted)
    collected = collect(trainer_state.read_trainer_state(path), names)
    if not collected.rows:
        raise InputError(f"{path}: no metrics that Keel knows in it; {_names_seen(names)}")
    return Log(
        framework,
        trainer_state.NAME,
        collected.points,
        collected.rows,
        collected.labels,
        of_arguments(path),
        names.unmatched,
        tuple(collected.damage),
        collected.nans,
    )


def _read_text(path: Path, choice: Choice) -> Log:
    """Read a text in two passes: the first one ends as soon as there are metrics in it."""
    if choice.mapping:
        csv_logs.check_mapping(choice.mapping, str(path))
    seen = _look_into(path, choice)
    if seen is None:
        forced = f" as {TITLES[choice.layout]}" if choice.layout else ""
        raise InputError(
            f"{path}: no metrics that Keel knows in it{forced}; name its layout (--format), its "
            "framework (--framework) or its metrics (--map)"
        )
    layout, framework, sample = seen
    names = Names(framework, _metrics_of(choice), choice.wanted)
    step = (choice.mapping or {}).get(csv_logs.STEP) or step_name(sample, names)
    rows = with_steps(LAYOUTS[layout](read_lines(path)), step)
    collected = collect(rows, names)
    settings: dict[str, Any] = {}
    if framework == "rllib":
        first = next((data for line in read_lines(path) if (data := parse_json(line))), {})
        settings = of_rllib(first.get("config") or {})
    elif framework == "rsl_rl":
        settings = of_agent(path)
    elif framework in ("trl", "swift"):
        settings = of_arguments(path)
    return Log(
        framework,
        TITLES[layout],
        collected.points,
        collected.rows,
        collected.labels,
        settings,
        names.unmatched,
        tuple(collected.damage),
        collected.nans,
    )


def _metrics_of(choice: Choice) -> dict[str, str]:
    """Return the mapping without the steps."""
    return {n: theirs for n, theirs in (choice.mapping or {}).items() if n != csv_logs.STEP}


def _look_into(
    path: Path, choice: Choice, parts: int | None = None
) -> tuple[str, str, list[Row]] | None:
    """Return layout, framework and the first rows of a text; None where there is no metric.

    Args:
        path: The text.
        choice: What is known already.
        parts: Parts of it to look at; all by default.
    """
    candidates = [choice.layout] if choice.layout in LAYOUTS else list(LAYOUTS)
    for number, part in enumerate(parts_of(read_lines(path), PART)):
        if number == parts:
            return None
        scored = []
        for layout in candidates:
            rows = list(LAYOUTS[layout](part))
            framework = choice.framework or layouts.FRAMEWORKS.get(layout) or _owner(rows)
            scored.append((_score(rows, framework, choice), layout, framework, rows))
        best = max(scored, key=lambda entry: entry[0])
        if best[0] > 0:
            return best[1:]
    return None


def _owner(rows: list[Row]) -> str:
    return recognize(name for row in rows for name in row.values)


def _score(rows: list[Row], framework: str, choice: Choice) -> int:
    """Return how many values of some rows are metrics."""
    if mapping := choice.mapping:
        theirs = set(mapping.values())
        return sum(name in theirs for row in rows for name in row.values)
    return sum(keel_name(name, framework) is not None for row in rows for name in row.values)


def _names_seen(names: Names) -> str:
    return f"there are {csv_logs.listed(list(names.unmatched))}" if names.unmatched else "none"


_READERS = {
    "keel": _read_keel,
    "csv": _read_csv,
    "events": _read_events,
    "trainer_state": _read_state,
}


def find_logs(path: Path) -> Iterator[Path]:
    """Yield every log at a path or below it: files, and folders of runs of Keel.

    Of several logs of one run in a folder the fullest is taken. Texts are looked into where a
    folder has nothing else.

    Args:
        path: A file or a folder.
    """
    yield from _find(path, DEEPEST, set())


def _find(path: Path, deepest: int, visited: set[Path]) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    real = path.resolve()
    if real in visited or deepest < 0 or not path.is_dir():
        return
    visited.add(real)
    if is_run(path):
        yield path
        return
    entries = sorted(path.iterdir())
    files = [entry for entry in entries if entry.is_file()]
    if structured := _structured(path, files):
        yield from structured
        return
    found = False
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            for log in _find(entry, deepest - 1, visited):
                found = True
                yield log
    if not found:
        yield from (file for file in files if _is_telling(file))


def _structured(folder: Path, files: list[Path]) -> list[Path]:
    """Return the logs of a folder whose names tell what they are."""
    names = {file.name: file for file in files}
    for name in (PROGRESS, SWIFT, trainer_state.NAME, RESULTS):
        if name in names:
            return [names[name]]
    checkpoints = [
        (int(entry.name.rpartition("-")[2]), entry / trainer_state.NAME)
        for entry in folder.glob("checkpoint-*")
        if entry.name.rpartition("-")[2].isdecimal() and (entry / trainer_state.NAME).is_file()
    ]
    if checkpoints:
        return [max(checkpoints)[1]]
    if written := [file for file in files if file.name.startswith(events.PREFIX)]:
        return written
    return [file for file in files if file.suffix == ".csv"]


def _is_telling(file: Path) -> bool:
    """Return whether there are metrics in a text."""
    if file.suffix not in TEXTS:
        return False
    try:
        kind = recognize_format(file)
        if kind in ("keel", "trainer_state"):
            return True
        return _look_into(file, Choice(), LOOKED_AT) is not None
    except RunError:
        return False
