"""Settings of demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from keel.config import bounds


@dataclass(frozen=True)
class Demonstrations:
    """Demonstrations: behavior cloning beside the run's own experience.

    `coef` times the mean of −log π of what was shown is added to the loss of the policy, inside of
    the same trust region.
    """

    path: str = ""
    """A folder that `keel demos record` wrote, or minari:ID; empty: no demonstrations."""
    episodes: Annotated[int | None, bounds.AT_LEAST_1] = None
    """Only so many of their episodes, the first."""
    loss: Literal["plain", "filtered", "weighted"] = "plain"
    """`plain` takes all that was shown alike; `filtered` what earned more than the critic expects;
    `weighted` gives it the weight exp(A / temperature), A being that difference over its rms."""
    temperature: Annotated[float, bounds.ABOVE_0] = 1.0
    """Temperature of the weights."""
    cap: Annotated[float, bounds.ABOVE_0] = 20.0
    """The largest weight."""
    coef: float = 1.0
    """Weight of the loss on demonstrations."""
    control: Literal["fixed", "decay", "adaptive"] = "adaptive"
    """`decay` multiplies `coef` by `decay` after every update; `adaptive` lowers it while
    demonstrations pull harder than `max_ratio` allows or against what the reward teaches, and
    raises it again when they no longer do."""
    steer: Literal["gradient", "loss"] = "gradient"
    """Ratio that `adaptive` and the warning go by: of the gradients' norms, with their cosine, or
    of the losses, of which PPO's is near 0 whatever it teaches."""
    max_ratio: Annotated[float, bounds.ABOVE_0] = 1.0
    """The largest ratio of cloning to PPO that `adaptive` lets be."""
    coef_min: float = 0.01
    """Lower end of `decay` and `adaptive`."""
    decay: Annotated[float, bounds.SHARE] = 0.99
    """Factor on `coef` after every update, under control `decay`."""
