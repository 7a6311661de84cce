"""The source of a run's experience: environments, or prompts of a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from keel.experience.batch import Experience
from keel.networks.agent import Agent
from keel.training.checkpoint import Checkpoint
from keel.training.loop import TrainState
from keel.types import HyperParams, UpdateReport

Metrics = dict[str, float]
Saved = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and plain data."""
ProgressCallback = Callable[[Metrics], None]
"""Called with metrics of work that comes before the first update, or after the last."""


class ExperienceSource(Protocol):
    """What a run learns from, with everything of it that changes while the run goes on.

    The loop calls `collect`, updates, and calls `after_update`. Between two iterations
    `state_dict` holds all that an interrupted run needs to go on as if it had not been interrupted.
    """

    @property
    def agent(self) -> Agent:
        """The agent that acts."""

    @property
    def score(self) -> str:
        """The metric of an evaluation by which a checkpoint is the best."""

    def prepare(self, state: TrainState, on_progress: ProgressCallback | None) -> TrainState:
        """Return the state that a new run begins with; a resumed one does without."""

    def collect(self, params: Tensor, hparams: HyperParams) -> Experience:
        """Sample with a frozen policy, and compute what its update learns from.

        Args:
            params: `[G, P]`.
            hparams: values in force.
        """

    def after_update(self, experience: Experience, params: Tensor, report: UpdateReport) -> Metrics:
        """Follow the policy to its new parameters, and return metrics."""

    def evaluate(self, params: Tensor) -> Metrics:
        """Evaluate the policy; raises `EvaluationStopped` if the process was asked to stop."""

    def draw_last_update(self, state: TrainState, path: Path) -> None:
        """Leave pictures of what no checkpoint holds, when the last update is made."""

    def conclude(
        self, params: Tensor, scores: Metrics, path: Path, on_progress: ProgressCallback | None
    ) -> Metrics:
        """Return more metrics for the last evaluation, and leave summaries in the run's folder."""

    def state_dict(self) -> Saved:
        """Return everything that a resumed run needs."""

    def load_state_dict(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; entries of others are passed over."""

    def warm_start(self, checkpoint: Checkpoint) -> Tensor:
        """Return the parameters `[G, P]` of another run's checkpoint, for a new run to begin with;
        an error where they do not fit."""

    def weights(self, params: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name, as a checkpoint holds them for acting."""

    def files(self, params: Tensor) -> dict[str, bytes]:
        """Return further files of a checkpoint, such as a model in the format of its library."""

    def close(self) -> None:
        """Release environments and processes."""
