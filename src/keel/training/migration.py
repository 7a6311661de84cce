"""From what older versions of Keel saved in a checkpoint to what is saved today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

PREFIXES = {
    "optimum/": "opt_state/",
    "obs_normaliser/": "obs_normalizer/",
    "reward_normaliser/": "reward_normalizer/",
    "memory/": "hidden_state/",
}
"""Tensors of older versions, and what they are called today."""

Saved = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and plain data of a checkpoint."""


def rename(tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> Saved:
    """Give what older versions saved the names of today.

    Args:
        tensors: The training state beside the weights.
        data: Counters, controllers, spaces.
    """
    renamed = dict(data)
    if "knobs" in renamed:
        renamed["hparams"] = renamed.pop("knobs")
    return {_today(name): x for name, x in tensors.items()}, renamed


def _today(name: str) -> str:
    for old, new in PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


MIGRATIONS: dict[int, Callable[[Mapping[str, Tensor], Mapping[str, Any]], Saved]] = {
    1: rename,
    2: rename,
}
"""From schema n to n + 1."""
