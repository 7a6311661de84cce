"""Hyperparameters that are set by hand while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keel.errors import InputError, check_choice
from keel.training.kinds import kind_of
from keel.training.loop import TrainState

SETTABLE = ("learning_rate", "clip", "entropy_coef", "max_kl")
"""What can be set between iterations."""


def check_changes(config: Any, changes: Mapping[str, float]) -> dict[str, float]:
    """Return values to be set; an `InputError` for what this run does not have, or cannot be.

    Args:
        config: of any kind of run.
        changes: values by name.
    """
    explore = getattr(config, "explore", None)
    for name, value in changes.items():
        check_choice("set", name, SETTABLE)
        section = "region" if explore is None or name != "entropy_coef" else "explore"
        kind_of(config.env).read({section: {name: value}}, config)
    if "clip" in changes and (config.algo == "trpo" or config.region.clip is None):
        raise InputError("clip: this run has none to set")
    bonus = explore is None or explore.entropy_coef > 0.0 or explore.entropy_floor is not None
    if "entropy_coef" in changes and not bonus:
        raise InputError(
            "entropy_coef: this run's loss has no entropy bonus; begin it with a small "
            "explore.entropy_coef above 0"
        )
    return {name: float(value) for name, value in changes.items()}


def apply_changes(state: TrainState, config: Any, changes: Mapping[str, float]) -> TrainState:
    """Return the state with values set; schedules leave them alone from now on.

    Args:
        state: between two iterations.
        config: of the run.
        changes: of `check_changes`.
    """
    if not changes:
        return state
    values = dict(changes)
    if "clip" in values:
        clip = values.pop("clip")
        values["clip_low"] = clip
        if config.region.clip_high is None:
            values["clip_high"] = clip
    by_hand = tuple(dict.fromkeys((*state.set_by_hand, *changes)))
    return state.replace(hparams=replace(state.hparams, **values), set_by_hand=by_hand)
