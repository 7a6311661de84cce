"""The kinds of runs: their settings, and what opens the source of their experience."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config import anchored, check, from_dict
from keel.presets import preset, preset_for

if TYPE_CHECKING:
    from keel.training.checkpoint import Checkpoint
    from keel.training.session import Session

KINDS = {"language": "keel.apps.language.kind:KIND"}
"""Kinds of runs by the name that stands in place of an environment; all others are environments."""
MAY_CHANGE = (
    "total_steps",
    "checkpoints",
    "evaluation",
    "tag",
    "log",
    "doctor",
    "threads",
    "compile",
    "device",
)
"""What a resumed run may set anew."""


@dataclass(frozen=True)
class RunKind:
    """One kind of run."""

    read: Callable[..., Any]
    """(settings, base) to a configuration, strictly"""
    base: Callable[[Mapping[str, Any], str | None], Any]
    """(settings, name of a preset) to the configuration that settings go on top of"""
    check: Callable[[Any], None]
    """raises where settings do not go together"""
    anchored: Callable[[Any], Any]
    """with absolute paths, so that the run can be opened from anywhere"""
    title: Callable[[Any], str]
    """the environment or the task, as names of runs begin"""
    open: Callable[[Any, Checkpoint | None], Session]
    """of a new run: configuration, checkpoint whose weights it begins with"""
    reopen: Callable[[Any, Path, Checkpoint | None], Session]
    """of an interrupted run: configuration, folder, checkpoint"""


def kind_of(env: object) -> RunKind:
    """Return the kind of runs on an environment, by its name."""
    if isinstance(env, str) and env in KINDS:
        module, _, name = KINDS[env].partition(":")
        kind: RunKind = getattr(importlib.import_module(module), name)
        return kind
    return ENVIRONMENTS


def _base(settings: Mapping[str, Any], name: str | None) -> Any:
    if name:
        return preset(name)
    return preset_for(str(settings["env"]), str(settings.get("algo", "ppo")))[1]


def _open(config: Any, start_from: Checkpoint | None) -> Session:
    from keel.training.session import open_session

    if start_from is None:
        return open_session(config)
    from keel.training.reopen import saved_encoding

    return open_session(config, saved_encoding(start_from))


def _reopen(config: Any, path: Path, checkpoint: Checkpoint | None) -> Session:
    from keel.training.reopen import reopen_session

    return reopen_session(config, path, checkpoint)


ENVIRONMENTS = RunKind(
    read=from_dict,
    base=_base,
    check=check,
    anchored=anchored,
    title=lambda config: str(config.env),
    open=_open,
    reopen=_reopen,
)
