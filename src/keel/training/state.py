"""What a run remembers between two iterations beside its source of experience."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.types import HyperParams, OptimizerState


@dataclass(frozen=True)
class TrainState:
    """Between two iterations."""

    steps: int
    iteration: int
    opt_state: OptimizerState
    hparams: HyperParams
    controllers: tuple[Mapping[str, float], ...]
    rollbacks: int = 0
    kl_exact_max: float = 0.0
    """the largest mean KL(old‖new) that any update kept"""
    best_return: float = -float("inf")
    """of any evaluation"""
    seconds: float = 0.0
    set_by_hand: tuple[str, ...] = ()
    """hyperparameters that were set between iterations: schedules leave them alone"""

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


SAVED = ("steps", "iteration", "rollbacks", "kl_exact_max", "best_return", "seconds")
"""Fields that a checkpoint holds as they are."""


def pack(state: TrainState, shuffle: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and plain data that `unpack` turns into the same state, bit for bit."""
    tensors = {f"opt_state/{name}": x for name, x in state.opt_state._asdict().items()}
    tensors["shuffle"] = shuffle.get_state()
    data = {name: getattr(state, name) for name in (*SAVED, "controllers", "set_by_hand")}
    return tensors, data | {"hparams": dataclasses.asdict(state.hparams)}


def unpack(
    fresh: TrainState,
    shuffle: torch.Generator,
    tensors: Mapping[str, Tensor],
    data: Mapping[str, Any],
) -> TrainState:
    """Return the state that `pack` saw, and put the generator back in place.

    Args:
        fresh: a new state of this run, whose device counts.
        shuffle: generator of the run.
        tensors: as `pack` returned them.
        data: as `pack` returned it; language runs of version 0.1 had no state of controllers.
    """
    shuffle.set_state(tensors["shuffle"])
    device = fresh.opt_state.params.device
    # copies, in torch's aligned memory: where numbers lie decides how products round
    opt_state = {k: x.to(device, copy=True) for k, x in part(tensors, "opt_state/").items()}
    return fresh.replace(
        **{name: data[name] for name in SAVED},
        opt_state=OptimizerState(**opt_state),
        hparams=HyperParams(**data["hparams"]),
        controllers=tuple(data.get("controllers", fresh.controllers)),
        set_by_hand=tuple(data.get("set_by_hand", ())),
    )


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under a prefix, without it."""
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def arrays(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, np.ndarray]:
    """Return the same as numpy arrays."""
    return {key: x.numpy() for key, x in part(tensors, prefix).items()}


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return arrays as tensors of their own under a prefix."""
    return {f"{prefix}{key}": torch.from_numpy(np.array(x, order="C")) for key, x in values.items()}


class Seeds(NamedTuple):
    """A seed for each consumer of randomness."""

    envs: int
    network: int
    actions: int
    shuffle: int
    evaluation: int


def derive_seeds(seed: int) -> Seeds:
    """Derive five independent seeds from one, by numpy's SeedSequence."""
    states = np.random.SeedSequence(seed).generate_state(len(Seeds._fields), np.uint32)
    return Seeds(*(int(state) for state in states))
