"""Runs at given paths: Keel's own, and other libraries' logs, each with group and task."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keel.config.reading import rename_settings, setting_name
from keel.config.values import in_text
from keel.errors import InputError, KeelError
from keel.printing import printable
from keel.tracking import MetricsTable, read_config, read_metrics
from keel.tracking.directory import read_record
from keel.tracking.logs import Log, find_logs, read_log
from keel.tracking.logs.events import PREFIX as EVENTS
from keel.tracking.logs.reading import PROGRESS, RESULTS, SWIFT, recognize_format
from keel.tracking.logs.trainer_state import NAME as STATE
from keel.tracking.resume import flat

NEEDED = (
    "rollout/return_mean",
    "eval/return_mean",
    "train/loss",
    "train/policy_loss",
    "train/kl_exact",
    "train/approx_kl",
    "train/max_kl",
    "train/rollbacks",
    "train/non_finite_gradients",
    "error/non_finite_ratio_count",
    "time/seconds",
    "time/steps_per_second",
)
"""Metrics that a comparison reads beside the one it is about."""
CLEANRL = re.compile(r"(?P<env>.+)__(?P<name>.+)__(?P<seed>\d+)__\d+")
NAMELESS = {PROGRESS, RESULTS, SWIFT, STATE}
"""Names that every log of a framework has: the folder tells whose it is."""
IGNORED = {"seed", "tag", "log", "doctor", "threads"}
"""Fields of a configuration in which runs of one group may differ."""


@dataclass(frozen=True)
class Run:
    """A run, ready to be compared."""

    path: Path
    group: str
    task: str
    table: MetricsTable = field(repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """flat, by dotted name; empty where it is not known"""
    source: str = "keel"


def load_runs(
    sources: Sequence[str],
    *,
    by: str = "name",
    metric: str | None = None,
    mapping: Mapping[str, str] | None = None,
) -> list[Run]:
    """Load all runs at or below some paths.

    Args:
        sources: paths, or LABEL=PATH, which puts all runs below PATH into one group.
        by: what makes a group: `name` (of the folder), `tag`, or a field of the configuration.
        metric: a metric to read beside those that every comparison needs.
        mapping: columns of a CSV for `step` and for Keel's names; by default they are recognized.
    """
    names = dict.fromkeys((*NEEDED, *([metric] if metric else [])))
    runs: dict[Path, Run] = {}
    for source in sources:
        label, path = _split_label(source)
        files = list(find_logs(path))
        if not files:
            raise InputError(f"{path}: no run here; `keel runs` lists those there are")
        for file in files:
            run = _read(file, path, by, list(names), mapping)
            group, task = printable(label or run.group), printable(run.task)
            runs.setdefault(file.resolve(), replace(run, group=group, task=task))
    return _with_tasks(list(runs.values()))


def _split_label(source: str) -> tuple[str | None, Path]:
    path = Path(source)
    if path.exists():
        return None, path
    label, equals, rest = source.partition("=")
    if equals and label and Path(rest).exists():
        return label, Path(rest)
    raise InputError(f"{rest if equals else source}: no such run or file")


def _read(
    file: Path, root: Path, by: str, names: list[str], mapping: Mapping[str, str] | None
) -> Run:
    if recognize_format(file) == "keel":
        return _read_keel(file if file.is_dir() else file.parent, by, names)
    log = read_log(file, mapping, names)
    match = CLEANRL.fullmatch(file.parent.name)
    if match:
        return _foreign(file, match["name"], match["env"], log)
    folder = file.parent if file.name in NAMELESS or file.name.startswith(EVENTS) else file
    name = root.resolve().name if root != file else folder.stem
    return _foreign(file, re.sub(r"[-_]\d+$", "", name), "", log)


def _foreign(file: Path, group: str, task: str, log: Log) -> Run:
    return Run(file, group, task, log.table, source=log.framework)


def _read_keel(path: Path, by: str, names: list[str]) -> Run:
    table = read_metrics(path, names)
    try:
        config = dict(flat(_in_text(rename_settings(read_config(path)))))
    except KeelError:
        config = {}
    env = str(config.get("env", "")).rpartition(":")[2]  # without the module that registers it
    task = f"{env} {config['task']}" if "task" in config else env  # of a language model
    return Run(path, _group(path, by, config), task, table, config)


def _in_text(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings in one form, whichever version wrote them."""
    texts = {key: in_text(f"{prefix}{key}", value) for key, value in settings.items()}
    return {
        key: _in_text(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in texts.items()
    }


def _group(path: Path, by: str, config: Mapping[str, Any]) -> str:
    folder = path.resolve()
    if by == "name":
        return folder.parent.name
    if by == "tag":
        try:
            return str(read_record(path).get("tag") or folder.parent.name)
        except KeelError:
            return folder.parent.name
    by = setting_name(by)
    if by not in config:
        similar_names = [
            name for name in config if name.rpartition(".")[2] == by.rpartition(".")[2]
        ]
        hint = f"; did you mean {similar_names[0]!r}?" if similar_names else ""
        raise InputError(f"--by {by}: expected name, tag or a field of the configuration{hint}")
    return f"{by.rpartition('.')[2]}={config[by]}"


def _with_tasks(runs: list[Run]) -> list[Run]:
    """Give logs without an environment the only one that another run names."""
    tasks = {run.task for run in runs if run.task}
    if len(tasks) != 1:
        return runs
    (task,) = tasks
    return [run if run.task else replace(run, task=task) for run in runs]


def differences(a: Iterable[Run], b: Iterable[Run]) -> dict[str, tuple[str, str]]:
    """Return the fields in which two groups' configurations differ, with both values."""
    first, second = _values(a), _values(b)
    names = [name for name in {**first, **second} if name not in IGNORED]
    no_values: set[str] = set()
    return {
        name: (_join(first.get(name, no_values)), _join(second.get(name, no_values)))
        for name in names
        if first.get(name, no_values) != second.get(name, no_values)
    }


def _values(runs: Iterable[Run]) -> dict[str, set[str]]:
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.config.items():
            values.setdefault(name, set()).add(str(value))
    return values


def _join(values: set[str]) -> str:
    return ", ".join(sorted(values)) if values else "–"
