"""Evaluation of a policy on prompts it has never been trained on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.apps.language.source import PromptSource
from keel.apps.language.tasks import Example
from keel.experience.completions import Sampling
from keel.training.persist import EvaluationStopped
from keel.training.signals import stop_requested

AT_ONCE = 256
"""Prompts completed together."""


class Verdict(NamedTuple):
    """Completions of held-out prompts, one each, with their scores."""

    texts: list[str]
    scores: np.ndarray
    """by the task's own judgement, `[N]`"""
    rewards: np.ndarray
    """by what is trained for; NaN where that failed"""
    lengths: list[int]
    """tokens that the policy wrote"""

    @property
    def success(self) -> float:
        """Mean score."""
        return float(self.scores.mean())

    def metrics(self) -> dict[str, float]:
        """Return metrics as the registry names them."""
        finite = self.rewards[np.isfinite(self.rewards)]
        return {
            "eval/success": self.success,
            "eval/return_mean": float(finite.mean()) if finite.size else float("nan"),
            "eval/return_std": float(finite.std()) if finite.size else float("nan"),
            "eval/length_mean": float(np.mean(self.lengths)),
            "eval/episodes": float(len(self.texts)),
        }


def judge(
    source: PromptSource, params: Tensor, examples: list[Example], *, greedy: bool | None = None
) -> Verdict:
    """Complete every prompt once; depends on parameters and prompts alone.

    Raises `EvaluationStopped` if the process was asked to stop.
    """
    config = source.config.evaluation
    greedy = config.greedy if greedy is None else greedy
    sampling = source.sampling
    if greedy:
        sampling = Sampling(sampling.max_new_tokens, temperature=0.0)
    rng = torch.Generator(source.device).manual_seed(source.seeds.evaluation)
    texts: list[str] = []
    lengths: list[int] = []
    for start in range(0, len(examples), AT_ONCE):
        if stop_requested():
            raise EvaluationStopped
        part = examples[start : start + AT_ONCE]
        completions = source.complete(params, part, rng, sampling=sampling)
        texts += source.texts(completions)
        lengths += completions.response_mask.sum(1).long().tolist()
    if source.tools is not None:
        source.tools.report()  # what was asked here is none of training's business
    rewards = source.rewards(examples, texts, lengths).score
    return Verdict(texts, source.true_scores(examples, texts), rewards, lengths)
