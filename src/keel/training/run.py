"""What `keel.train` returns: a run on disk, with its policy and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from keel.tracking.directory import read_record
from keel.tracking.reader import MetricsTable, last_values, read_metrics
from keel.training.evaluation import Score
from keel.training.policy import Policy, evaluate_policy, open_policy


@dataclass(frozen=True, repr=False)
class Run:
    """A run on disk."""

    path: Path
    """the folder of its seed"""
    trust_code: bool = False
    """whether code that its file names may be imported"""

    @cached_property
    def policy(self) -> Policy:
        """The policy of the best checkpoint, or of the last where no evaluation marked a best."""
        return open_policy(self.path, trust_code=self.trust_code)

    @property
    def metrics(self) -> MetricsTable:
        """The metrics so far: `run.metrics["train/kl_exact"]` is a column, `.step` its steps."""
        return read_metrics(self.path)

    def evaluate(
        self, episodes: int = 20, deterministic: bool = True, seed: int = 0, env: str | None = None
    ) -> Score:
        """Play whole episodes with the policy, in environments of their own.

        Args:
            episodes: number of episodes.
            deterministic: take the likeliest action in place of a sample.
            seed: of environments and actions.
            env: another environment than the run's own, by its name.
        """
        return evaluate_policy(
            self.policy, episodes=episodes, deterministic=deterministic, seed=seed, env=env
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a Run is finished and cannot be iterated over; for a loop over the iterations of a "
            "training, use `for iteration in keel.iterate(…)`"
        )

    def __repr__(self) -> str:
        status = read_record(self.path).get("status")
        newest = last_values(self.path, "eval/return_mean", "rollout/return_mean")
        evaluated, trained = newest.values
        score = f"{trained:,.1f} in training" if evaluated != evaluated else f"{evaluated:,.1f}"
        return f"Run({str(self.path)!r}, {status}, {newest.step or 0:,} steps, return {score})"
