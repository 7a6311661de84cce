"""The configuration of what a run leaves behind: evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from keel.config import bounds


@dataclass(frozen=True)
class Evaluation:
    """Evaluation episodes beside training, in environments of their own."""

    every: int = 0
    """Agent steps between evaluations; 0: only at the end."""
    episodes: int = 10
    """Episodes per evaluation; 0: no evaluations at all."""
    deterministic: bool = True
    """Take the likeliest action, in place of sampling."""
    max_episode_steps: int = 0
    """Agent steps after which an episode that has not ended is cut, with a warning, and counted in
    `eval/episodes_cut`; 0: the environment's own time limit, or 27,000 where it has none."""


@dataclass(frozen=True)
class Checkpoints:
    """What is kept for resuming."""

    every: Annotated[int, bounds.ABOVE_0] = 100_000
    """Agent steps between checkpoints; the last and the best are always kept."""
    keep: Annotated[int, bounds.ABOVE_0] = 3
    """How many of the others to keep."""
