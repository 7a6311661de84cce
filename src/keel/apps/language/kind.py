"""Runs on tokens, as the training loop knows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.apps.language.checks import check
from keel.apps.language.config import Language, anchored, from_dict
from keel.apps.language.presets import preset, preset_for
from keel.training.checkpoint import Checkpoint
from keel.training.kinds import RunKind
from keel.training.session import Session


def _base(settings: Mapping[str, Any], name: str | None) -> Language:
    if name:
        return preset(name)
    return preset_for(settings.get("task", Language().task), settings.get("algo"))


def _open(config: Language, start_from: Checkpoint | None = None) -> Session:
    from keel.apps.language.build import open_session

    return open_session(config)


def _reopen(config: Language, path: Path, checkpoint: Checkpoint | None) -> Session:
    return _open(config)


KIND = RunKind(
    read=from_dict,
    base=_base,
    check=check,
    anchored=anchored,
    title=lambda config: f"{config.env}-{config.task}",
    open=_open,
    reopen=_reopen,
)
