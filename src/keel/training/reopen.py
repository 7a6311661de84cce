"""The session of an interrupted run on environments: what was decided stays decided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from keel.config import Backend, Config
from keel.envs.space_data import Interface
from keel.errors import InputError
from keel.tracking.record import read_choices
from keel.training.checkpoint import Checkpoint
from keel.training.environments import INTERFACE
from keel.training.session import Session, open_session
from keel.types import ENCODING, FIRST_ENCODING

BACKENDS: dict[str, Backend] = {
    "gymnasium vector": "vector",
    "gymnasium sync": "sync",
    "gymnasium async": "async",
    "envpool": "envpool",
    "ale": "ale",
}
"""What environments call themselves, as `envs.backend` takes it."""


def reopen_session(config: Config, path: Path, checkpoint: Checkpoint | None) -> Session:
    """Make everything ready to go on with a run.

    Args:
        config: of the run.
        path: its folder.
        checkpoint: that it goes on from; None if it has none.
    """
    encoding = ENCODING if checkpoint is None else saved_encoding(checkpoint)
    session = open_session(_as_chosen(config, path), encoding)
    try:
        _check_demos(session, path)
    except BaseException:
        session.source.close()
        raise
    return session


def saved_encoding(checkpoint: Checkpoint) -> int:
    """Return how observations become numbers in a checkpoint; those of version 0.1 do not say."""
    if INTERFACE not in checkpoint.data:
        return FIRST_ENCODING
    return Interface.from_data(checkpoint.data[INTERFACE]).encoding


def _as_chosen(config: Config, path: Path) -> Config:
    """Return what was decided automatically: another backend would be another run."""
    chosen = read_choices(path)
    backend = BACKENDS.get(str(chosen.get("backend")), config.envs.backend)
    if config.envs.backend == "auto":
        config = replace(config, envs=replace(config.envs, backend=backend))
    if config.compile == "auto" and "compile" in chosen:
        config = replace(config, compile="on" if chosen["compile"] else "off")
    if config.threads == 0:
        config = replace(config, threads=int(str(chosen.get("threads", 0))))
    return config


def _check_demos(session: Session, path: Path) -> None:
    """Raise unless the run goes on with the demonstrations that it learned from."""
    before, now = read_choices(path).get("demos"), session.choices.get("demos")
    if before is not None and before != now:
        raise InputError(
            f"demos.path: {session.config.demos.path} has changed since {path} began; put back "
            "what was there, or start a new run"
        )
