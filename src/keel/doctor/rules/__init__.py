"""The rules, a module a family; importing this package registers them all.

A rule is one function of at most 60 lines that reads a `RunLog` and returns a `Finding` or None. It
never guesses: what it reads is declared in `needs`, and without that it is listed as skipped. Its
threshold is the registry's, or stands as a constant beside it with its source.
"""

from __future__ import annotations

from keel.doctor.rules import (
    consistency,
    consistency_learning,
    consistency_penalty,
    consistency_ratio,
    consistency_reference,
    consistency_sampler,
    consistency_surprise,
    critic,
    critic_loss,
    critic_targets,
    exploration,
    exploration_actions,
    exploration_growth,
    exploration_noise,
    language,
    language_drift,
    language_learning,
    numerics,
    reward,
    reward_course,
    reward_environment,
    reward_imitation,
    reward_objective,
    statistics,
    thermometer,
    thermometer_constants,
    thermometer_identities,
    thermometer_sums,
    trust_region,
    trust_region_certificate,
    trust_region_drift,
    trust_region_natural,
    trust_region_ratios,
    trust_region_steps,
)

OPTIONAL = (
    "env",
    "rollout/reward",
    "rollout/length_limit",
    "train/bc_cosine",
    "train/clip_range",
    "train/improvement_predicted",
    "train/kl_first_epoch",
    "train/kl_tried",
)
"""Metrics that rules read where they are there, beside those they need; the first two stand for all
that an environment measures, and for every reward function."""

__all__ = [
    "consistency",
    "consistency_learning",
    "consistency_penalty",
    "consistency_ratio",
    "consistency_reference",
    "consistency_sampler",
    "consistency_surprise",
    "critic",
    "critic_loss",
    "critic_targets",
    "exploration",
    "exploration_actions",
    "exploration_growth",
    "exploration_noise",
    "language",
    "language_drift",
    "language_learning",
    "numerics",
    "reward",
    "reward_course",
    "reward_environment",
    "reward_imitation",
    "reward_objective",
    "statistics",
    "thermometer",
    "thermometer_constants",
    "thermometer_identities",
    "thermometer_sums",
    "trust_region",
    "trust_region_certificate",
    "trust_region_drift",
    "trust_region_natural",
    "trust_region_ratios",
    "trust_region_steps",
]
