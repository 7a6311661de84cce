"""Can these numbers be true? Shares, magnitudes, KL, variance and counters outside of what exists.

One value is enough: what cannot be is a bug of the measurement, and nothing is concluded from it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keel.doctor.finding import Evidence, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import MASS, onset_of, present, readers_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series
from keel.tracking.metrics import REGISTRY

SHARES = (
    *(name for name, entry in REGISTRY.items() if entry.unit == "share"),
    "train/alpha",
    "train/line_search_success",
    "train/parameters_trained",
    "train/dead_units",
    "train/bc_share_used",
    "train/bc_share_at_cap",
    "train/coverage_80",
    "rollout/ended",
    "rollout/informative",
    "rollout/action_share_max",
    "rollout/reward_zero_share",
    "rollout/reward_clipped_share",
    "rollout/reward_share_max",
    "rollout/truncated_share",
    "rollout/bootstrap_error",
    "rollout/obs_dead_dims",
)
"""Metrics that are shares by their definition."""
DEVIATIONS = (
    "rollout/return_std",
    "rollout/reward_std",
    "rollout/reward_std_group",
    "eval/return_std",
    "train/advantage_std",
    "train/advantage_raw_std",
    "train/target_std",
    "train/value_std",
)
MAGNITUDES = (
    "train/gradient_norm",
    "train/policy_gradient_norm",
    "train/log_ratio_max",
    "train/ratio_min",
    "train/ratio_max",
    "train/ratio_mean",
    "train/gate_log_ratio",
    "train/sampler_gap",
    "train/sampler_gap_max",
    "train/sampler_ratio_mean",
    "train/cg_residual",
    "rollout/length_mean",
    "rollout/episodes",
)
COUNTERS = ("time/steps", "time/seconds", "train/rollbacks", "kl/spent_token")
"""Metrics that only grow within a run."""
EXACT = (
    "train/kl_exact",
    "train/kl_requested",
    "train/kl_step",
    "train/kl_reverse",
    "train/kl_max",
    "train/kl_p99",
    "kl/old_token",
    "kl/old_sequence",
    "kl/reference_token",
    "kl/reference_sequence",
    "kl/sampler_token",
)
"""KL in closed form: never negative (Gibbs)."""
ROUNDING = 1e-6
"""A negative KL that float32 explains: single rows of k3 round to ±6e-8."""


@rule(
    "share-outside-0-1",
    "thermometer",
    needs=("|".join(SHARES),),
    source="rldoctor, TRL and verl issues: fractions above 1",
)
def share_outside(log: RunLog) -> Finding | None:
    """Find a share that is negative or above 1."""
    for series in present(log, SHARES):
        outside = (series.values < -MASS) | (series.values > 1.0 + MASS)
        if not outside.any():
            continue
        worst = float(series.values[np.argmax(np.abs(series.values - 0.5))])
        in_percent = (series.values >= 0.0).all() and 1.0 < series.finite.max(initial=0.0) <= 100.0
        return Finding(
            cause=f"{series.label} cannot be {worst:.4g}: it is a share of the rows, so what it is "
            "divided by is not the number of rows that were counted",
            level="sick",
            evidence=(_impossible(series, outside, worst, "a share lies between 0 and 1", 1.0),),
            others=(
                Suspect(
                    "the metric is logged in percent",
                    f"divide by 100: {worst / 100:.3g} is plausible"
                    if in_percent
                    else "divide by 100: values are still outside of [0, 1], so it is not",
                ),
                Suspect(
                    "a sum over devices or minibatches is logged in place of a mean",
                    "train on one device with one minibatch: the value falls by their number",
                ),
            ),
            fix=Fix(
                f"Divide the count in {series.label} by the number of rows (or valid tokens) it "
                "was counted over; do not judge the run by it until then."
            ),
            confidence=0.95,
            suppresses=readers_of(log, series.name),
        )
    return None


@rule(
    "magnitude-negative",
    "thermometer",
    needs=("|".join((*DEVIATIONS, *MAGNITUDES)),),
    source="definition",
)
def magnitude_negative(log: RunLog) -> Finding | None:
    """Find a standard deviation, a norm, a ratio or a length below 0."""
    for series in present(log, (*DEVIATIONS, *MAGNITUDES)):
        outside = series.values < 0.0
        if not outside.any():
            continue
        worst = float(series.values.min())
        what = "standard deviation" if series.name in DEVIATIONS else "magnitude"
        return Finding(
            cause=f"{series.label} cannot be {worst:.4g}: a {what} is never negative",
            level="sick",
            evidence=(_impossible(series, outside, worst, f"a {what} is at least 0", 0.0),),
            others=(
                Suspect(
                    "a logarithm is logged in its place",
                    f"take exp of it: {np.exp(min(worst, 0.0)):.3g} should be plausible",
                ),
                Suspect(
                    "another column is read under this name",
                    "print the metric beside the step in the trainer and compare one row",
                ),
            ),
            fix=Fix(f"Look at how {series.label} is computed and named; it is not a {what}."),
            confidence=0.95,
            suppresses=readers_of(log, series.name),
        )
    return None


@rule(
    "kl-negative",
    "thermometer",
    needs=("|".join((*EXACT, "train/approx_kl")),),
    source="Gibbs' inequality; Schulman, Approximating KL divergence (k2, k3 ≥ 0); TRL, SB3 issues",
    suppresses=("kl-over-target", "kl-spikes", "steps-too-small", "clip-without-kl"),
    number=6,
)
def kl_negative(log: RunLog) -> Finding | None:
    """Find a KL, exact or by k2 or k3, below 0."""
    for series in present(log, (*EXACT, "train/approx_kl")):
        outside = series.values < -ROUNDING
        if not outside.any():
            continue
        worst, count = float(series.values.min()), int(outside.sum())
        estimated = series.name == "train/approx_kl"
        cause = (
            f"{series.label} is k1, the mean of log π_old − log π_new, which cancels: it is "
            f"{worst:.3g}, and k2 and k3 cannot be negative"
            if estimated
            else f"{series.label} cannot be {worst:.3g}: an exact KL is never negative, so one of "
            "its two distributions does not sum to 1"
        )
        stopping = estimated and log.setting("region.target_kl") is None
        return Finding(
            cause=cause,
            level="watch" if stopping else "sick",
            evidence=(
                _impossible(
                    series, outside, worst, f"{count} of {len(series)} values are negative", 0.0
                ),
            ),
            others=(
                Suspect(
                    "a mask or padding is applied to one of the two log-probs only",
                    "sum exp(log-prob) over all actions of one row, for both: each must be 1",
                ),
            ),
            fix=Fix(
                "Log k3, the mean of (r − 1) − log r, or the exact KL; stop updates by that one."
                if estimated
                else "Normalize both distributions under the same mask before taking the KL."
            ),
            confidence=0.9,
            suppresses=readers_of(log, series.name),
        )
    return None


@rule(
    "explained-variance-over-1",
    "thermometer",
    needs=("train/explained_variance",),
    source="definition: 1 − Var(R − V) / Var(R)",
    suppresses=("explained-variance-negative",),
)
def explained_variance_over_one(log: RunLog) -> Finding | None:
    """Find an explained variance above 1."""
    series = log["train/explained_variance"]
    outside = series.values > 1.0 + MASS
    if not outside.any():
        return None
    worst = float(series.values.max())
    return Finding(
        cause=f"{series.label} cannot be {worst:.4g}: variances are not negative, so it is at "
        "most 1; the metric is not 1 − Var(R − V) / Var(R)",
        level="sick",
        evidence=(_impossible(series, outside, worst, "at most 1 by its definition", 1.0),),
        others=(
            Suspect(
                "it is logged in percent",
                f"divide by 100: {worst / 100:.3g} is plausible where all values are below 100",
            ),
            Suspect(
                "the ratio of the variances is logged without the 1 − in front",
                f"1 − {worst:.3g} = {1 - worst:.3g}: does it rise while the value loss falls?",
            ),
        ),
        fix=Fix("Compute 1 − Var(R − V) / Var(R) over the rows of the rollout."),
        confidence=0.95,
        suppresses=readers_of(log, series.name),
    )


@rule(
    "counter-goes-back",
    "thermometer",
    needs=("|".join(COUNTERS),),
    source="definition; two runs in one log file",
    rows=2,
)
def counter_goes_back(log: RunLog) -> Finding | None:
    """Find a counter that falls: two runs, or a resumed one, in one log."""
    for series in present(log, COUNTERS):
        back = np.concatenate([[False], series.values[1:] < series.values[:-1] - 1e-9])
        if not back.any():
            continue
        i = int(np.flatnonzero(back)[0])
        before, after = float(series.values[i - 1]), float(series.values[i])
        return Finding(
            cause=f"the log holds more than one run: {series.label} falls from {before:g} to "
            f"{after:g}",
            level="watch",
            evidence=(
                _impossible(series, back, after, f"{before:g} stood in the row before", before),
            ),
            others=(
                Suspect(
                    "the run was resumed from an older checkpoint",
                    "compare with the steps of its checkpoints",
                ),
            ),
            fix=Fix("Write every run, and every resumed part, into a folder of its own."),
            confidence=0.85,
        )
    return None


def _impossible(
    series: Series, outside: NDArray[np.bool_], worst: float, text: str, threshold: float
) -> Evidence:
    """Return the evidence of values that cannot be."""
    return evidence(
        series,
        f"{worst:.6g} in {int(outside.sum())} of {len(series)} values; {text}",
        worst,
        threshold=threshold,
        source="by definition",
        onset=onset_of(series, outside),
    )
