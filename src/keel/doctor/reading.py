"""Logs at a path, as `RunLog`s."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.config.reading import rename_settings
from keel.config.values import in_text
from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog, from_table
from keel.errors import InputError, KeelError, check_choice
from keel.tracking.config_file import read_config
from keel.tracking.directory import METRICS
from keel.tracking.reader import read_metrics
from keel.tracking.resume import flat

LAYOUTS = ("metrics.jsonl",)
FRAMEWORKS = ("keel", "sb3", "cleanrl", "trl", "verl", "openrlhf", "rllib", "rsl_rl", "swift")


def needed_names() -> list[str]:
    """Return the metrics that rules say they need."""
    needs = (need for rule in RULES.values() for entry in rule.needs for need in entry.split("|"))
    return list(dict.fromkeys(need for need in needs if not need.startswith(SETTING)))


def read_logs(
    path: Path | str,
    *,
    layout: str | None = None,
    framework: str | None = None,
    mapping: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
) -> list[RunLog]:
    """Return the logs of all runs at a path or below it.

    Args:
        path: A run, a file of metrics, or a folder of runs.
        layout: How the file is laid out; by default it is recognized.
        framework: Who wrote it; by default it is recognized.
        mapping: Columns by Keel's names of metrics.
        names: Metrics to read; all by default.
    """
    if framework is not None:
        check_choice("--framework", framework, FRAMEWORKS)
    if str(path) == "-":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / METRICS
            path.write_bytes(sys.stdin.buffer.read())
            return [replace(log, path=None) for log in read_logs(path, framework=framework)]
    path = Path(path)
    if layout is not None:
        check_choice("--format", layout, LAYOUTS)
    if not path.exists():
        raise InputError(f"{path}: no such run or log")
    logs = [_read(found, names) for found in _find(path)]
    if not logs:
        raise InputError(f"{path}: no run or log here")
    if framework is not None:
        logs = [replace(log, framework=framework) for log in logs]
    return logs


def _find(path: Path) -> Iterator[Path]:
    if path.is_file() or (path / METRICS).is_file():
        yield path
        return
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            yield from _find(entry)


def _read(path: Path, names: Collection[str] | None) -> RunLog:
    table = read_metrics(path, names)
    return from_table(table, "keel", METRICS, settings=_settings(path), path=path)


def _settings(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    try:
        data = dict(flat(rename_settings(read_config(folder))))
    except KeelError:
        return {}
    return {name: in_text(name, value) for name, value in data.items()}
