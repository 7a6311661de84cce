"""Comparing runs from Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from keel.compare.comparison import Comparison, compare
from keel.compare.sources import load_runs
from keel.compare.verdict import Criteria
from keel.errors import check_choice


def compare_runs(
    *runs: Any,
    by: str = "name",
    groups: Collection[str] = (),
    baseline: str | None = None,
    metric: str | None = None,
    steps: int | None = None,
    tail: float = 0.1,
    threshold: float | None = None,
    drop: float = 0.1,
    slowdown: float = 2.0,
    mapping: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare groups of runs over their seeds: keep, roll back, or not distinguishable.

    Args:
        *runs: what `keel.train` returns, folders of runs of Keel, or logs of Stable-Baselines3,
            CleanRL or RLlib; `"LABEL=PATH"` names a group.
        by: what makes a group: the run's name, its tag, or a setting (`"region.max_kl"`).
        groups: those to compare; by default all.
        baseline: the group that all others are compared with, by default the first.
        metric: by default evaluations where every run has them, else the return in training.
        steps: compare up to this step, by default to the end of the shortest run.
        tail: share of a run, at its end, that its score is averaged over.
        threshold: of steps to threshold, by default 90 % of the baseline's way.
        drop: roll back if worse by more than this share.
        slowdown: roll back if slower by more than this factor.
        mapping: columns of a CSV by Keel's names.

    Returns:
        The comparison; `print` shows its tables and verdicts.

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     small = dict(runs=runs, total_steps=256, num=2, rollout_steps=64, minibatch=64)
        ...     old = keel.train("CartPole-v1", name="old", **small)
        ...     new = keel.train("CartPole-v1", name="new", clip=0.1, **small)
        ...     comparison = keel.compare_runs(old, new, slowdown=1e9)
        >>> print(comparison)  # doctest: +ELLIPSIS
        CartPole-v1: eval/return_mean over the last steps up to 256
        ...
        new against old: not distinguishable
        ...
    """
    sources = [str(run) if isinstance(run, str | Path) else str(run.path) for run in runs]
    loaded = load_runs(sources, by=by, metric=metric, mapping=mapping)
    for group in groups:
        check_choice("groups", group, dict.fromkeys(run.group for run in loaded))
    return compare(
        [run for run in loaded if not groups or run.group in groups],
        baseline=baseline,
        metric=metric,
        steps=steps,
        tail=tail,
        threshold=threshold,
        criteria=Criteria(drop, slowdown),
    )
