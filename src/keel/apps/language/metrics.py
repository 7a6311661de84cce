"""Metrics of completions and of their advantages."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.apps.language.advantages import TokenTargets, named_arguments
from keel.apps.language.config import Language
from keel.apps.language.rewards import Scores
from keel.apps.language.tasks import Example
from keel.experience.completions import Completions
from keel.functional import explained_variance

if TYPE_CHECKING:
    from keel.apps.language.source import PromptSource


def completion_metrics(
    source: PromptSource,
    asked: list[Example],
    texts: list[str],
    completions: Completions,
    score: Tensor,
    valid: Tensor,
    scores: Scores,
) -> dict[str, float]:
    """Return how long, how good and how different completions are."""
    true = source.true_scores(asked, texts)
    lengths = completions.response_mask.sum(1)
    known = score[valid]
    group = source.config.sample.group
    metrics = {
        "rollout/return_mean": known.mean().item() if known.numel() else math.nan,
        "rollout/return_std": known.std(unbiased=False).item() if known.numel() else math.nan,
        "rollout/success": float(true.mean()),
        "rollout/length_mean": lengths.mean().item(),
        "rollout/ended": completions.ended.float().mean().item(),
        "rollout/episodes": float(len(asked)),
        "rollout/informative": _informative(score, valid, group),
        "rollout/failures": float(sum(scores.failures.values())),
        **{f"rollout/reward/{name}": value for name, value in scores.means().items()},
    }
    if source.tools is not None:
        report = source.tools.report()
        metrics["rollout/tool_calls"] = report.calls / len(asked)
        metrics["rollout/tool_failures"] = float(sum(report.failures.values()))
    return metrics


def _informative(score: Tensor, valid: Tensor, group: int) -> float:
    """The share of prompts whose completions scored differently; NaN where they are alone."""
    if group < 2:
        return math.nan
    table, good = score.reshape(-1, group), valid.reshape(-1, group)
    high = torch.where(good, table, -torch.inf).amax(1)
    low = torch.where(good, table, torch.inf).amin(1)
    return (high > low).float().mean().item()


def advantage_metrics(targets: TokenTargets, weight: Tensor, config: Language) -> dict[str, float]:
    """Return moments of advantages before they were normalized, and what the critic explains."""
    counts = weight > 0
    raw = targets.raw[counts]
    metrics = {
        "train/advantage_raw_mean": raw.mean().item() if raw.numel() else math.nan,
        "train/advantage_raw_std": raw.std(unbiased=False).item() if raw.numel() else math.nan,
    }
    if "value" in named_arguments(config.algo) and raw.numel():
        value = targets.target[counts] - raw
        metrics["train/explained_variance"] = explained_variance(
            value, targets.target[counts]
        ).item()
    return metrics
