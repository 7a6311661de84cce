"""Settings, machine and software of a run, recorded when it begins.

The last line of `config.yaml` tells whether the others are as Keel wrote them. `environment.json`
says which versions, threads and choices the run was made with.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from keel import __version__
from keel.errors import InputError, RunError, RunWarning
from keel.resources import cores
from keel.tracking.files import read_regular
from keel.tracking.integrity import CHECKSUM, is_intact

CONFIG, RECORD = "config.yaml", "run.json"
MAX_BRACKETS = 1000
"""Lists and mappings that the configuration of a run may hold."""
_SEAL_START = b"# sha256"
_SEAL = _SEAL_START + b" of the lines above: "


def dump_config(config: Mapping[str, Any]) -> bytes:
    """Return the content of `config.yaml`, with the hash of its lines in the last one."""
    content = dump_yaml(config).encode()
    return content + _SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n"


def dump_yaml(config: Mapping[str, Any]) -> str:
    """Return plain data as YAML; anything else is an `InputError`."""
    try:
        text: str = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise InputError(f"config: only plain data can be stored: {error}") from error
    return text


def read_config(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """Return `config.yaml` of a run as plain data: tags are an error and nothing is executed.

    Args:
        path: the folder of the run.
        strict: whether a file that was edited or damaged after Keel wrote it is an error (a run
            that goes on must go on as it began), and not only a warning.
    """
    file = path / CONFIG
    try:
        content = read_regular(file)
        if content.count(b"[") + content.count(b"{") > MAX_BRACKETS:
            raise ValueError(f"more than {MAX_BRACKETS} brackets")  # nested, they take YAML minutes
        config = yaml.safe_load(content.decode("utf-8"))
    except Exception as error:  # PyYAML has errors of many kinds
        raise RunError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RunError(f"{file}: expected names and values")
    if not _is_unchanged(file, content):
        if strict:
            raise RunError(
                f"{_problem(file)}; put it back, or start a new run with `keel train --config "
                "FILE` (what a resumed run may change has flags: `keel resume --help`)"
            )
        warnings.warn(_problem(file), RunWarning, stacklevel=2)
    return config


def warn_if_changed(file: Path) -> None:
    """Warn where a file of settings came from a run and is not as that run wrote it."""
    if file.is_file() and not _is_unchanged(file, file.read_bytes()):
        warnings.warn(f"{_problem(file)}; used as it is", RunWarning, stacklevel=2)


def _problem(file: Path) -> str:
    return f"{file}: not as Keel wrote it: edited or damaged"


def _is_unchanged(file: Path, content: bytes) -> bool:
    """Return whether a file fits its last line.

    Without such a line it is not from a run, or from one of an older Keel, whose `run.json` has no
    checksum either; beside one that has, it was cut.
    """
    body, seal, digest = content.rpartition(_SEAL)
    if seal:
        return digest.strip().decode("ascii", "replace") == hashlib.sha256(body).hexdigest()
    return _SEAL_START not in content and not _record_has_checksum(file.with_name(RECORD))


def _record_has_checksum(path: Path) -> bool:
    try:
        record = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and CHECKSUM in record


PACKAGES = ("torch", "numpy", "gymnasium", "safetensors", "envpool", "ale-py", "mujoco")


def describe_environment(choices: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describe versions, git commit, machine and threads; `choices` are what Keel decided.

    Bit-exact resume needs the choices (backend, compile, device), so they are kept with the run.
    """
    return {
        "keel": __version__,
        "python": platform.python_version(),
        "packages": _versions(),
        "git": _git(Path.cwd()),
        "machine": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "cpus_usable": cores(),
        },
        "threads": _threads(),
        "command": sys.argv,
        "choices": dict(choices or {}),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _threads() -> dict[str, int | str | None]:
    torch = sys.modules.get("torch")  # asked only if it is there: reading runs must stay quick
    return {
        "torch": None if torch is None else torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the user's project, and whether files differ from it, or None."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changed is None else bool(changed)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def read_choices(run: Path) -> dict[str, Any]:
    """Return what was decided automatically when a run began.

    A file that is missing or damaged is a warning, because the choices are then made anew.
    """
    path = run / "environment.json"
    try:
        stored = json.loads(path.read_bytes())
        choices = stored["choices"] if is_intact(stored) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        choices = None
    if isinstance(choices, dict):
        return choices
    warnings.warn(
        f"{path}: missing, edited or damaged; backend, threads and compilation are chosen anew",
        RunWarning,
        stacklevel=2,
    )
    return {}
