"""From paths to runs: Keel's own, and the logs of others, each with its group and its task."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keel.config.renamed import rename_settings, setting_name
from keel.errors import InputError, KeelError
from keel.printing import printable
from keel.runs import MetricsTable, read_config, read_metrics
from keel.runs.directory import METRICS, read_record
from keel.runs.foreign import PROGRESS, is_log, read_log
from keel.runs.resume import flat

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
"""What a comparison reads of a run, beside the metric it is about."""
CLEANRL = re.compile(r"(?P<env>.+)__(?P<name>.+)__(?P<seed>\d+)__\d+")
IGNORED = {"seed", "tag", "log", "threads"}
"""Of a configuration: no reason for runs to differ."""


@dataclass(frozen=True)
class Run:
    """One run, ready to be compared."""

    path: Path
    group: str
    task: str
    table: MetricsTable = field(repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """flat, by dotted name; empty where it is not known"""
    source: str = "keel"


def load_runs(
    words: Sequence[str],
    *,
    by: str = "name",
    metric: str | None = None,
    mapping: Mapping[str, str] | None = None,
) -> list[Run]:
    """All runs that `words` name: paths, or LABEL=PATH, which puts all below PATH into one group.

    `by` is `name` (of the folder), `tag`, or a field of the configuration.
    """
    names = dict.fromkeys((*NEEDED, *([metric] if metric else [])))
    runs: dict[Path, Run] = {}
    for word in words:
        label, path = _labelled(word)
        found = list(_find(path))
        if not found:
            raise InputError(f"{path}: no run here; `keel runs` lists those there are")
        for place in found:
            run = _read(place, path, by, list(names), mapping)
            group, task = printable(label or run.group), printable(run.task)
            runs.setdefault(place.resolve(), replace(run, group=group, task=task))
    return _with_tasks(list(runs.values()))


def _labelled(word: str) -> tuple[str | None, Path]:
    path = Path(word)
    if path.exists():
        return None, path
    label, equals, rest = word.partition("=")
    if equals and label and Path(rest).exists():
        return label, Path(rest)
    raise InputError(f"{rest if equals else word}: no such run or file")


def _find(path: Path) -> Iterator[Path]:
    """What is a run, at `path` or below it: a Keel run, a CSV, an event file."""
    if path.is_file():
        yield path
        return
    if (path / METRICS).is_file():
        yield path
        return
    if (path / PROGRESS).is_file():
        yield path / PROGRESS
        return
    entries = sorted(path.iterdir())
    logs = [entry for entry in entries if entry.is_file() and is_log(entry)]
    if logs:
        yield from logs
        return
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            yield from _find(entry)


def _read(
    place: Path, asked: Path, by: str, names: list[str], mapping: Mapping[str, str] | None
) -> Run:
    if place.is_dir() or place.suffix == ".jsonl":
        return _read_keel(place if place.is_dir() else place.parent, by, names)
    log = read_log(place, mapping, names)
    folder = (
        place.parent if place.name == PROGRESS or (is_log(place) and place.suffix == "") else place
    )
    known = CLEANRL.fullmatch(place.parent.name)
    if known:
        return Run(place, known["name"], known["env"], log.table, source=log.source)
    name = asked.resolve().name if asked != place else folder.stem
    return Run(place, re.sub(r"[-_]\d+$", "", name), "", log.table, source=log.source)


def _read_keel(path: Path, by: str, names: list[str]) -> Run:
    table = read_metrics(path, names)
    try:
        config = dict(flat(rename_settings(read_config(path))))
    except KeelError:
        config = {}
    env = str(config.get("env", "")).rpartition(":")[2]  # without the module that registers it
    task = f"{env} {config['task']}" if "task" in config else env  # of a language model
    return Run(path, _group(path, by, config), task, table, config)


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
        near = [name for name in config if name.rpartition(".")[2] == by.rpartition(".")[2]]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"--by {by}: expected name, tag or a field of the configuration{hint}")
    return f"{by.rpartition('.')[2]}={config[by]}"


def _with_tasks(runs: list[Run]) -> list[Run]:
    """A log that does not say its environment belongs to the only one that is named."""
    tasks = {run.task for run in runs if run.task}
    if len(tasks) != 1:
        return runs
    (only,) = tasks
    return [run if run.task else replace(run, task=only) for run in runs]


def differences(a: Iterable[Run], b: Iterable[Run]) -> dict[str, tuple[str, str]]:
    """Fields of the configuration that differ between two groups, with their values in each."""
    first, second = _values(a), _values(b)
    names = [name for name in {**first, **second} if name not in IGNORED]
    nothing: set[str] = set()
    return {
        name: (_joined(first.get(name, nothing)), _joined(second.get(name, nothing)))
        for name in names
        if first.get(name, nothing) != second.get(name, nothing)
    }


def _values(runs: Iterable[Run]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.config.items():
            found.setdefault(name, set()).add(str(value))
    return found


def _joined(values: set[str]) -> str:
    return ", ".join(sorted(values)) if values else "–"
