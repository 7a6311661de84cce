"""Checkpoints that are whole or not there: safetensors and JSON, hashed, fsynced, renamed.

    checkpoints/00012288/  weights.safetensors  state.safetensors  state.json  manifest.json
    checkpoints/last.json  checkpoints/best.json

A checkpoint is written into a hidden folder beside its place, the manifest (size and SHA-256 of
every file) last, then renamed. What is read must match its manifest; nothing is ever unpickled.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from keel import __version__
from keel.errors import InputError, KeelError
from keel.tracking.directory import CHECKPOINTS
from keel.tracking.files import is_disk_full, replace_file, sync_folder, write_synced
from keel.tracking.integrity import (
    MANIFEST,
    IntegrityError,
    dump_checked,
    dump_json,
    dump_manifest,
    is_intact,
    load_json,
    read_files,
    read_manifest,
)

WEIGHTS, STATE, DATA = "weights.safetensors", "state.safetensors", "state.json"
Pointer = Literal["best", "last"]
SCHEMA = 3
"""Schema of the checkpoints that are written."""


class CheckpointError(KeelError):
    """A checkpoint that cannot be written, or must not be loaded."""


class NewerSchemaError(CheckpointError):
    """A checkpoint of a newer Keel: there is no falling back from it to an older one."""


class CheckpointWarning(UserWarning):
    """The newest checkpoint was bad and an older one is used."""


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint."""

    step: int
    weights: dict[str, Tensor]
    """what a policy needs to act"""
    tensors: dict[str, Tensor]
    """the rest of the training state: optimizer, normalizers, generators"""
    data: dict[str, Any]
    """counters, controllers, spaces: plain data"""
    path: Path
    skipped: tuple[str, ...] = ()
    """newer checkpoints that were bad, and why"""


def _crash_point(name: str) -> None:
    """Mark a step of a save, where tests end the process."""


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    data: Mapping[str, Any],
    keep: int | None = None,
    protect: Collection[str] = (),
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write the checkpoint of `step`, make it the last one, and return its folder.

    Whatever happens, the previous checkpoint stays loadable; a failure is a `CheckpointError`.

    Args:
        directory: the run, or its `checkpoints`.
        step: number of the step, 0 or more.
        tensors: the training state beside the weights.
        weights: what a policy needs to act.
        data: counters, controllers, spaces: plain data.
        keep: number of the newest checkpoints that remain, besides the best; None for all.
        protect: names of folders that remain as well.
        more: further files under the same manifest: a model in the format of another library.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise InputError(f"expected step ≥ 0 and keep ≥ 1 (or None), got {step} and {keep}")
    root = _root(directory)
    contents = {
        **more,
        WEIGHTS: _serialize(weights),
        STATE: _serialize(tensors),
        DATA: dump_json(data),
    }
    header = {"schema": SCHEMA, "keel": __version__, "step": step}
    contents[MANIFEST] = dump_manifest(contents, header)
    size = sum(map(len, contents.values()))
    with _as_checkpoint_errors(root, size):
        root.mkdir(exist_ok=True)  # not its parents: a run that vanished is an error
        sweep(root)
        if shutil.disk_usage(root).free < size:
            raise _no_space(root, size)
        try:
            folder = _write(root, _name(step), contents)
            _point(root, "last", step)
        except BaseException:
            with suppress(OSError):  # the next start sweeps again
                sweep(root)
            raise
        _prune(root, step, keep, protect)
    return folder


def mark_best(directory: Path, step: int, score: float) -> None:
    """Point `best.json` to the checkpoint of `step`; it will not be pruned."""
    root = _root(directory)
    if not (root / _name(step)).is_dir():
        raise CheckpointError(f"{root / _name(step)}: no such checkpoint; save it first")
    with _as_checkpoint_errors(root, 0):
        _point(root, "best", step, score=score)


def sweep(directory: Path) -> list[str]:
    """Remove what crashed saves left behind; a checkpoint that was being replaced comes back.

    For the process that owns the run (it holds the lock); readers leave drafts alone.
    """
    root, swept = _root(directory), []
    for path in sorted(root.glob(".*.*")):
        replaced = re.fullmatch(r"\.(\d{8,})\.old", path.name)
        if replaced and not (root / replaced[1]).exists():
            path.rename(root / replaced[1])
        elif replaced or re.fullmatch(r"\.(\d{8,}|(best|last)\.json\.\d+)\.tmp", path.name):
            _remove(path)
        else:
            continue
        swept.append(path.name)
    return swept


def load(path: Path | str, step: int | Pointer | None = None) -> Checkpoint:
    """Load a checkpoint.

    A checkpoint that is named by its step, by "best" or by its folder is loaded or an error, never
    replaced by another.

    Args:
        path: a run, its `checkpoints`, or the folder of one checkpoint.
        step: of the checkpoint, or "best" or "last". None: the last good one; where a newer one is
            damaged, an older one is used, with a `CheckpointWarning` and the reasons in `.skipped`.
    """
    path = Path(path)
    if re.fullmatch(r"\d{8,}", path.name):
        return _read(path)
    root = _root(path)
    folders = _folders(root)
    if not folders:
        raise CheckpointError(f"{root}: there is no checkpoint")
    if step is None:
        return _read_newest(root, folders)
    target = _target(root, step) if isinstance(step, str) else step
    if target not in folders:
        available = ", ".join(map(str, sorted(folders)))
        raise CheckpointError(f"{root}: no checkpoint of step {step}; there are: {available}")
    return _read(folders[target])


def newest_step(directory: Path) -> int | None:
    """Return the step of the newest checkpoint of a run, by its folder's name; None without one."""
    return max(_folders(_root(directory)), default=None)


def check_shapes(what: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a `CheckpointError` unless names, shapes and dtypes are the same."""

    def describe(tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return {
            name: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in tensors.items()
        }

    check_same(what, describe(saved), describe(expected))


def check_same(what: str, saved: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise a `CheckpointError` that names both sides of what differs: spaces, shapes."""
    absent = "absent"
    differing = [
        f"{name}: the checkpoint has {saved.get(name, absent)}, "
        f"this run has {expected.get(name, absent)}"
        for name in {**saved, **expected}
        if saved.get(name, absent) != expected.get(name, absent)
    ]
    if differing:
        raise CheckpointError(f"{what} do not fit:\n  " + "\n  ".join(differing))


def _serialize(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as safetensors: on the CPU, dense, each with a storage of its own."""
    dense_tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        storage = dense.untyped_storage()
        owns_storage = storage.nbytes() == dense.nbytes and storage.data_ptr() not in storages
        dense_tensors[name] = dense if owns_storage else dense.clone()
        storages.add(storage.data_ptr())
    return safetensors.torch.save(dense_tensors)


def _write(root: Path, name: str, contents: Mapping[str, bytes]) -> Path:
    folder, draft, replaced = root / name, root / f".{name}.tmp", root / f".{name}.old"
    draft.mkdir()
    for file, content in contents.items():
        write_synced(draft / file, content, _crash_point)
    sync_folder(draft)
    if folder.exists():  # it steps aside, and comes back if the next line is never reached
        _crash_point("step aside")
        folder.rename(replaced)
    _crash_point("publish")
    draft.rename(folder)
    _crash_point("sync the folder")
    sync_folder(root)
    if replaced.exists():
        _crash_point("remove the replaced one")
        _remove(replaced)
    return folder


def _point(root: Path, pointer: Pointer, step: int, **fields: float) -> None:
    content = dump_checked({"checkpoint": _name(step), "step": step, **fields})
    replace_file(root / f"{pointer}.json", content, _crash_point)


def _target(root: Path, pointer: str) -> int | None:
    """Return the step that a pointer names; None if there is none, or (a warning) it is damaged."""
    path = root / f"{pointer}.json"
    try:
        record = load_json(path.read_bytes())
        step = record.get("step") if is_intact(record) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        step = None
    if isinstance(step, int):
        return step
    warnings.warn(f"{path}: edited or damaged, and not used", CheckpointWarning, stacklevel=3)
    return None


def _prune(root: Path, step: int, keep: int | None, protect: Collection[str]) -> None:
    if keep is None:
        return
    # A step beyond this one was left behind when the run went back: older than all others.
    by_age = sorted(_folders(root), key=lambda saved_step: (saved_step <= step, saved_step))
    protected_steps = {step, _target(root, "best")}
    for old in by_age[:-keep]:
        name = _name(old)
        if old not in protected_steps and name not in protect:
            _crash_point(f"remove {name}")
            condemned = (root / name).rename(root / f".{name}.tmp")
            _crash_point(f"empty {name}")
            _remove(condemned)


def _read_newest(root: Path, folders: Mapping[int, Path]) -> Checkpoint:
    last = _target(root, "last")
    by_age = sorted(folders, key=lambda step: (last is None or step <= last, step))
    skipped: list[str] = []
    for step in reversed(by_age):
        try:
            checkpoint = _read(folders[step])
        except NewerSchemaError:
            raise
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        if skipped:
            text = "; ".join(skipped) + f"; continuing from the older one of step {step}"
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        return replace(checkpoint, skipped=tuple(skipped))
    raise CheckpointError(f"{root}: no checkpoint can be used: " + "; ".join(skipped))


def _read(folder: Path) -> Checkpoint:
    try:
        manifest = read_manifest(folder)
        schema, step = manifest.get("schema"), manifest.get("step")
        if not (isinstance(schema, int) and isinstance(step, int) and _name(step) in folder.name):
            raise IntegrityError(f"{MANIFEST} does not belong to this folder")
        if schema > SCHEMA:
            raise NewerSchemaError(
                f"{folder}: written by keel {manifest.get('keel')} in schema {schema}; this is "
                f"keel {__version__}, which reads up to {SCHEMA}: upgrade Keel"
            )
        contents = read_files(folder, manifest, (WEIGHTS, STATE, DATA))
        weights, tensors = (safetensors.torch.load(contents[name]) for name in (WEIGHTS, STATE))
        checkpoint = Checkpoint(step, weights, tensors, load_json(contents[DATA]), folder)
    except (ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    except KeyError as error:  # safetensors looks dtypes up by name
        raise CheckpointError(f"{folder}: this torch has no tensors of type {error}") from error
    return _migrate(checkpoint, schema)


def _migrate(checkpoint: Checkpoint, schema: int) -> Checkpoint:
    if schema == SCHEMA:
        return checkpoint
    from keel.training.migration import MIGRATIONS

    for version in range(schema, SCHEMA):
        if version not in MIGRATIONS:
            raise CheckpointError(f"{checkpoint.path}: schema {schema} is too old to be read")
        tensors, data = MIGRATIONS[version](checkpoint.tensors, checkpoint.data)
        checkpoint = replace(checkpoint, tensors=tensors, data=data)
    return checkpoint


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _root(directory: Path) -> Path:
    return directory if directory.name == CHECKPOINTS else directory / CHECKPOINTS


def _name(step: int) -> str:
    return f"{step:08d}"


def _folders(root: Path) -> dict[int, Path]:
    """Return the checkpoints by step; one that was being replaced when a save crashed counts."""
    folders: dict[int, Path] = {}
    for path in sorted(root.glob("*")) if root.is_dir() else []:
        match = re.fullmatch(r"(\d{8,})|\.(\d{8,})\.old", path.name)
        if match and (match[1] or not (root / match[2]).exists()):
            folders[int(match[1] or match[2])] = path
    return folders


def _no_space(root: Path, size: int) -> CheckpointError:
    saved = newest_step(root)
    previous = (
        "there is no checkpoint yet"
        if saved is None
        else f"the previous checkpoint, of step {saved}, is intact"
    )
    return CheckpointError(
        f"{root}: the disk is full: the checkpoint needs {size} bytes, "
        f"{shutil.disk_usage(root).free} are free; {previous}"
    )


@contextmanager
def _as_checkpoint_errors(root: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise _no_space(root, size) from error
        raise CheckpointError(f"{root}: cannot be written: {error.strerror or error}") from error
