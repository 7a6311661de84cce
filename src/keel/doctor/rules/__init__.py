"""The rules, a module a family; importing this package registers them all.

A rule is one function of at most 60 lines that reads a `RunLog` and returns a `Finding` or None. It
never guesses: what it reads is declared in `needs`, and without that it is listed as skipped. Its
threshold is the registry's, or stands as a constant beside it with its source.
"""

from __future__ import annotations

from keel.doctor.rules import (
    consistency,
    consistency_learning,
    consistency_reference,
    consistency_sampler,
    critic,
    critic_targets,
    exploration,
    exploration_actions,
    exploration_growth,
    language,
    language_drift,
    numerics,
    reward,
    reward_course,
    reward_environment,
    reward_imitation,
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

__all__ = [
    "consistency",
    "consistency_learning",
    "consistency_reference",
    "consistency_sampler",
    "critic",
    "critic_targets",
    "exploration",
    "exploration_actions",
    "exploration_growth",
    "language",
    "language_drift",
    "numerics",
    "reward",
    "reward_course",
    "reward_environment",
    "reward_imitation",
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
