"""Everything a run must remember, as one value: what is not in here cannot be resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.envs import ObsNormalizer, RewardNormalizer
from keel.types import HyperParams, OptimizerState

WINDOW = 100
"""Episodes over which the training return is averaged."""


@dataclass(frozen=True)
class TrainState:
    """Between two iterations."""

    steps: int
    iteration: int
    opt_state: OptimizerState
    hparams: HyperParams
    controllers: tuple[Mapping[str, float], ...]
    obs_normalizer: ObsNormalizer | None
    reward_normalizer: RewardNormalizer | None
    temperature: float = 1.0
    """at which the next rollout is sampled; `hparams.temperature` is where it goes"""
    rollbacks: int = 0
    kl_exact_max: float = 0.0
    """the largest mean KL(old‖new) that any update kept"""
    best_return: float = -float("inf")
    """of any evaluation"""
    returns: tuple[float, ...] = ()
    """the last episodes' raw returns, at most `WINDOW`"""
    lengths: tuple[int, ...] = ()
    seconds: float = 0.0

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def pack(
    state: TrainState,
    actions: np.random.Generator,
    shuffle: torch.Generator,
    obs: Mapping[str, np.ndarray],
    memory: Mapping[str, np.ndarray],
    envs: tuple[Mapping[str, np.ndarray], Mapping[str, Any]] | None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain data that `unpack` turns into the same state, bit for bit."""
    tensors = {f"opt_state/{name}": x for name, x in state.opt_state._asdict().items()}
    tensors["shuffle"] = shuffle.get_state()
    tensors |= {f"obs/{key}": torch.from_numpy(np.ascontiguousarray(x)) for key, x in obs.items()}
    tensors |= {f"hidden_state/{key}": torch.from_numpy(np.array(x)) for key, x in memory.items()}
    for name in ("obs_normalizer", "reward_normalizer"):
        normalizer = getattr(state, name)
        if normalizer is not None:
            exported = normalizer.export()
            tensors |= {f"{name}/{k}": torch.from_numpy(np.array(x)) for k, x in exported.items()}
    data: dict[str, Any] = {
        "steps": state.steps,
        "iteration": state.iteration,
        "hparams": dataclasses.asdict(state.hparams),
        "temperature": state.temperature,
        "controllers": [dict(c) for c in state.controllers],
        "rollbacks": state.rollbacks,
        "kl_exact_max": state.kl_exact_max,
        "best_return": state.best_return,
        "returns": list(state.returns),
        "lengths": list(state.lengths),
        "seconds": state.seconds,
        "actions": actions.bit_generator.state,
        "envs": None,
    }
    if envs is not None:
        tensors |= {f"envs/{k}": torch.from_numpy(np.array(x)) for k, x in envs[0].items()}
        data["envs"] = dict(envs[1])
    return tensors, data


def unpack(fresh: TrainState, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> TrainState:
    """The state that `pack` saw; `fresh` says which normalizers there are."""
    obs, reward = fresh.obs_normalizer, fresh.reward_normalizer
    return TrainState(
        steps=data["steps"],
        iteration=data["iteration"],
        opt_state=OptimizerState(**part(tensors, "opt_state/")),
        hparams=HyperParams(**data["hparams"]),
        controllers=tuple(data["controllers"]),
        obs_normalizer=None if obs is None else obs.restore(arrays(tensors, "obs_normalizer/")),
        reward_normalizer=(
            None if reward is None else reward.restore(arrays(tensors, "reward_normalizer/"))
        ),
        temperature=data.get("temperature", data["hparams"]["temperature"]),  # version 0.1 had one
        rollbacks=data["rollbacks"],
        kl_exact_max=data["kl_exact_max"],
        best_return=data["best_return"],
        returns=tuple(data["returns"]),
        lengths=tuple(data["lengths"]),
        seconds=data["seconds"],
    )


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}


def arrays(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, np.ndarray]:
    """The same as numpy arrays."""
    return {key: x.numpy() for key, x in part(tensors, prefix).items()}
