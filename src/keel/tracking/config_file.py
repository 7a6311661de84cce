"""`config.yaml` of a run: its last line tells whether the others are as Keel wrote them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from keel.errors import InputError, RunError, RunWarning
from keel.tracking.files import read_regular
from keel.tracking.manifest import CHECKSUM

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
