"""The directory of a run, `runs/NAME/seed-0/`: made whole or not at all, and locked while open.

config.yaml  environment.json  run.json (name, seed, tag, status)
metrics.jsonl  checkpoints/  lock
"""

from __future__ import annotations

import errno
import json
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from keel.errors import InputError, RunError, RunWarning
from keel.tracking.files import (
    acquire_lock,
    is_disk_full,
    read_regular,
    release_lock,
    replace_file,
    write_synced,
)
from keel.tracking.integrity import describe_missing, dump_checked, is_intact
from keel.tracking.record import (
    CONFIG,
    RECORD,
    describe_environment,
    dump_config,
    dump_yaml,
    read_config,
)

ENVIRONMENT = "environment.json"
METRICS, CHECKPOINTS, DOCTOR = "metrics.jsonl", "checkpoints", "doctor.json"
LINES = "lines"
"""Key in `run.json` of the number of lines of metrics when the run ended."""

Status = Literal["finished", "stopped", "failed"]


class RunDirectory:
    """An open run: this process holds its lock until `close`.

    Made by `create` or `resume`; a context manager, which records how the run ended.
    """

    def __init__(self, path: Path, new_parents: Iterable[Path] = ()) -> None:
        self.path = path
        self._open = True
        self._new_parents = tuple(new_parents)
        """folders above it that were made for it, the innermost first"""

    @property
    def metrics(self) -> Path:
        """File of the metrics."""
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / CHECKPOINTS

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str,
        seed: int = 0,
        *,
        config: Mapping[str, Any],
        tag: str | None = None,
        choices: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """Make `root/name/seed-SEED` and lock it; a run that is already there is never touched.

        The folder is prepared under another name and renamed, so that no half-made one remains.

        Args:
            root: the folder of all runs.
            name: of the run.
            seed: of the run, 0 or more.
            config: plain data.
            tag: a label of the user's own.
            choices: decisions that Keel made by itself; recorded in `environment.json`.
        """
        if seed < 0:
            raise InputError(f"seed: expected 0 or more, got {seed}")
        path = Path(root) / check_name(name) / f"seed-{seed}"
        record = {"name": name, "seed": seed, "tag": tag, "created": _now(), "status": "running"}
        new_parents = _missing_parents(path.parent)
        with _created_atomically(path) as draft:
            write_synced(draft / CONFIG, dump_config(config))
            write_synced(draft / ENVIRONMENT, dump_checked(describe_environment(choices)))
            write_synced(draft / RECORD, dump_checked(record))
            (draft / CHECKPOINTS).mkdir()
            acquire_lock(draft)
        return cls(path, new_parents)

    @classmethod
    def resume(
        cls,
        path: Path | str,
        *,
        config: Mapping[str, Any] | None = None,
        stored: Mapping[str, Any] | None = None,
        may_change: Collection[str] = (),
    ) -> RunDirectory:
        """Open a run again and lock it.

        Args:
            path: the folder of the run.
            config: the new configuration, which is compared with the stored one and then written.
            stored: the stored configuration, with fields that did not exist when it was written;
                by default that of the file.
            may_change: dotted names of fields, or their beginnings, that may differ.
        """
        path = Path(path)
        record = read_record(path)
        if missing := missing_lines(path, record):
            _warn(f"{path / METRICS}: {describe_missing(missing)}")
        if config is not None:
            from keel.tracking.resume import check_config

            as_stored = yaml.safe_load(dump_yaml(config))  # tuples are lists there
            before = read_config(path) if stored is None else yaml.safe_load(dump_yaml(stored))
            check_config(before, as_stored, may_change)
        with _as_run_errors(path):
            acquire_lock(path)
            run = cls(path)
            try:
                config = read_config(path) if config is None else config
                replace_file(path / CONFIG, dump_config(config))
                resumed = [*record.get("resumed", []), _now()]
                run._record({**record, "status": "running", "resumed": resumed})
            except BaseException:
                release_lock(path)
                raise
        return run

    def close(self, status: Status = "finished") -> None:
        """Record how the run ended and release the lock; a second call does nothing.

        Args:
            status: finished, stopped or failed.
        """
        if not self._open:
            return
        self._open = False
        with suppress(OSError, RunError):  # vanished or full: there is nothing to record it in
            lines = count_lines(self.metrics)
            self._record({**read_record(self.path), "status": status, LINES: lines})
        with suppress(OSError):
            release_lock(self.path)

    def discard(self) -> None:
        """Remove a run in which nothing has happened, with the folders that were made for it."""
        self._open = False
        with suppress(OSError):
            release_lock(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self._new_parents)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = kind is not None and not issubclass(kind, Exception)
        self.close("finished" if kind is None else "stopped" if stopped else "failed")

    def _record(self, record: Mapping[str, Any]) -> None:
        replace_file(self.path / RECORD, dump_checked(record))


@contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Make the folder of a group of runs (an ablation, a study) and lock it for the block.

    At the end the folder and the parents that were made for it are removed if they are empty.

    Args:
        path: the folder; a `RunError` says why it cannot be used, or which process holds it.
    """
    new_folders = _missing_parents(path)
    try:
        with _as_run_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            acquire_lock(path)
        try:
            yield
        finally:
            with suppress(OSError):
                release_lock(path)
    finally:
        _remove_empty(new_folders)


def has_trained(run: Path) -> bool:
    """Return whether a run left metrics, a checkpoint, or the numbers that stopped it."""
    metrics = run / METRICS
    written = metrics.is_file() and metrics.stat().st_size > 0
    saved = next((run / CHECKPOINTS).glob("*"), None) or next(run.glob("*.safetensors"), None)
    return written or saved is not None


def run_name(env: str, algo: str, root: Path | str | None = None) -> str:
    """Return `ENV-ALGO-YYYYMMDD-HHMMSS` in safe characters.

    Args:
        env: name of the environment.
        algo: name of the algorithm.
        root: folder of all runs; the name gets a number if there is such a run already.
    """
    name = _safe(f"{env}-{algo}-{time.strftime('%Y%m%d-%H%M%S')}")
    number, unique = 2, name
    while root is not None and (Path(root) / unique).exists():
        number, unique = number + 1, f"{name}-{number}"
    return unique


def check_name(name: str) -> str:
    """Return `name` if it is a safe folder name, else raise an `InputError` that suggests one."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}", name):
        return name
    raise InputError(
        f"run name {name!r}: use letters, digits, '.', '_' and '-', at most 120 and no dot first; "
        f"for example {_safe(name)!r}"
    )


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:120] or "run"


def find_run(path: Path) -> Path:
    """Return the folder of a seed: `path` itself, or the only `seed-*` in it."""
    if (path / RECORD).is_file() or not path.is_dir():
        read_record(path)
        return path
    seeds = sorted(record.parent for record in path.glob(f"seed-*/{RECORD}"))
    if len(seeds) > 1:
        raise InputError(f"{path}: has several seeds; choose one: {', '.join(map(str, seeds))}")
    if not seeds:
        read_record(path)  # raises: not a run
    return seeds[0]


def read_record(path: Path) -> dict[str, Any]:
    """Return `run.json` of a run; a `RunError` if there is no run."""
    if not path.is_dir():
        raise RunError(f"{path}: no such run; `keel runs` lists those there are")
    try:
        record = json.loads(read_regular(path / RECORD))
    except FileNotFoundError:
        raise RunError(f"{path}: not a run, it has no {RECORD}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path / RECORD}: cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise RunError(f"{path / RECORD}: expected an object")
    if not is_intact(record):
        _warn(f"{path / RECORD}: not as Keel wrote it: edited or damaged")
    return record


def count_lines(path: Path) -> int:
    """Return how many lines a file has; 0 if there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def missing_lines(path: Path, record: Mapping[str, Any] | None = None) -> int:
    """Return how many lines of metrics a run had when it ended and has no more.

    Args:
        path: The folder of the run.
        record: Its `run.json`, if that was read already. One that cannot be read, that an older
            Keel wrote, or of a run that has not ended counts as complete.
    """
    try:
        record = read_record(path) if record is None else record
        lines = record.get(LINES)
        if record.get("status") == "running" or type(lines) is not int:
            return 0
        return max(lines - count_lines(path / METRICS), 0)
    except (OSError, RunError):
        return 0


def _warn(problem: str) -> None:
    warnings.warn(problem, RunWarning, stacklevel=3)


@contextmanager
def _created_atomically(path: Path) -> Iterator[Path]:
    """Yield a draft folder that becomes `path` at the end, or is removed with its new parents."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    new_parents = _missing_parents(path.parent)
    try:
        with _as_run_errors(path):
            if path.is_dir() and any(path.iterdir()):
                raise RunError(_exists_message(path))
            draft.mkdir(parents=True)
            yield draft
            draft.rename(path)  # fails if a run came into being there meanwhile
    except BaseException:
        with suppress(OSError):
            release_lock(draft)
        shutil.rmtree(draft, ignore_errors=True)
        _remove_empty(new_parents)
        raise


def _missing_parents(path: Path) -> list[Path]:
    """List `path` and its parents as far as they do not exist, the innermost first."""
    with _as_run_errors(path):
        return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not empty: another process uses it by now
            folder.rmdir()


@contextmanager
def _as_run_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a `RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and path.is_dir():
            raise RunError(_exists_message(path)) from error
        hint = "free some space" if is_disk_full(error) else "choose a writable --runs directory"
        raise RunError(f"{path}: cannot be written ({error.strerror}); {hint}") from error


def _exists_message(path: Path) -> str:
    return f"{path}: exists already; continue it with `keel resume {path}` or choose another --name"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
