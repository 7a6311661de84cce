"""Surrogates by name: what PPO minimises on single actions and on tokens, per element.

A surrogate is a function `(ratio, advantage, hparams)`: the ratio π_new/π_old and the advantage,
equally shaped, and `SurrogateHparams`. It returns the loss per element, as a tensor or as a
`Surrogate`, which also says what was cut off; averaging is Keel's. One of your own:

    @keel.register_loss("mine")
    def mine(ratio, advantage, hparams):
        return -torch.minimum(ratio * advantage, ratio.clamp(max=1 + hparams.clip_high) * advantage)

is `loss="mine"`, `region={"loss": mine}` or `--region.loss my_module:mine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from keel.errors import ShapeError
from keel.functional import surrogate as surrogates
from keel.functional.surrogate import Surrogate


class SurrogateHparams(NamedTuple):
    """What surrogates read beside ratio and advantage; tensors are 0-d, or of the ratio's shape."""

    clip_low: Tensor
    """ε below: the ratio is clipped at 1 − `clip_low`"""
    clip_high: Tensor
    """ε above: the ratio is clipped at 1 + `clip_high`"""
    dual_clip: float | None
    """bound on the loss of bad actions, times −A; None for none"""
    log_prob: Tensor
    """log π_new of the actions"""
    log_ratio: Tensor
    """logarithm of the ratio"""
    weight: Tensor
    """0 for elements that do not count"""


SurrogateFunction = Callable[[Tensor, Tensor, SurrogateHparams], Surrogate | Tensor]


def clip(ratio: Tensor, advantage: Tensor, hparams: SurrogateHparams) -> Surrogate:
    """Return PPO's clip; with `dual_clip` also bounded from above."""
    low, high, bound = hparams.clip_low, hparams.clip_high, hparams.dual_clip
    if bound is not None:
        return surrogates.dual_clip(ratio, advantage, low, high, bound)
    return surrogates.clip(ratio, advantage, low, high)


def symmetric(ratio: Tensor, advantage: Tensor, hparams: SurrogateHparams) -> Surrogate:
    """Return the clip to [1/(1+ε), 1+ε]."""
    return surrogates.symmetric_clip(ratio, advantage, hparams.clip_high)


def unclipped(ratio: Tensor, advantage: Tensor, hparams: SurrogateHparams) -> Surrogate:
    """Return −r·A."""
    return surrogates.unclipped(ratio, advantage)


def cispo(ratio: Tensor, advantage: Tensor, hparams: SurrogateHparams) -> Surrogate:
    """Return log-probs times a clipped weight (CISPO)."""
    low, high = hparams.clip_low, hparams.clip_high
    return surrogates.cispo(hparams.log_prob, ratio, advantage, low, high)


def sequence(ratio: Tensor, advantage: Tensor, hparams: SurrogateHparams) -> Surrogate:
    """Return the clip of one ratio per sequence (GSPO), rows `[B, L]`."""
    mean = surrogates.sequence_log_ratio(hparams.log_ratio, hparams.weight)
    return clip(mean.exp(), advantage, hparams)


def evaluate(
    function: SurrogateFunction, ratio: Tensor, advantage: Tensor, hparams: SurrogateHparams
) -> Surrogate:
    """Call a surrogate and check what it gives.

    Args:
        function: the surrogate.
        ratio: `[*lead]`.
        advantage: `[*lead]`.
        hparams: the rest.
    """
    result = function(ratio, advantage, hparams)
    if not isinstance(result, Surrogate):
        result = Surrogate(result, torch.zeros_like(ratio, dtype=torch.bool))
    for part, x in zip(("loss", "clipped"), result, strict=True):
        if not isinstance(x, Tensor) or x.shape != ratio.shape:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            name = getattr(function, "__qualname__", repr(function))
            raise ShapeError(
                f"region.loss {name}: expected a {part} per element, a tensor {list(ratio.shape)}, "
                f"got {got}; averaging is Keel's"
            )
    return result
