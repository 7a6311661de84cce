"""Machine and software that a run was made with: `environment.json`."""

from __future__ import annotations

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

from keel import __version__
from keel.errors import RunWarning
from keel.resources import cores
from keel.tracking.manifest import is_intact

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
