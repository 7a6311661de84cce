"""What log-probs and ratios add up to: 1 in expectation, whichever the policies are."""

from __future__ import annotations

from dataclasses import replace

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.consistency import REGION
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align, breach

MEAN_WATCH, MEAN_SICK = 0.2, 1.0
"""|mean ratio − 1|: it is 1 in expectation whatever the step; healthy runs of Keel reach 0.05."""


@rule(
    "ratio-mean-off",
    "consistency",
    needs=("train/ratio_mean|train/kl_k1",),
    source="importance sampling: E_old[π_new/π_old] = 1; research notes, N0",
    number=2,
)
def ratio_mean_off(log: RunLog) -> Finding | None:
    """Find a mean ratio far from 1, which no honest step gives."""
    mean = _mean_ratio(log)
    if mean is None:
        return None
    found = breach(mean, 1.0 - MEAN_WATCH, 1.0 + MEAN_WATCH)
    sizes = log.get("train/effective_sample_size")
    if found is None or (sizes is not None and sizes.median() < 0.3):
        return None  # few rows weigh all: their mean is noise
    off = abs(found.value - 1.0)
    return Finding(
        cause=f"the mean ratio is {found.value:.3g}, and it is 1 for every pair of policies: the "
        "actions were not sampled by the policy whose log-probs are stored",
        level="sick" if off > MEAN_SICK else "watch",
        evidence=(
            evidence(
                mean,
                f"{found.value:.3g} in {found.count} of {len(mean)} updates; 1 ± {MEAN_WATCH:g} "
                "allowed",
                found.value,
                threshold=1.0 + MEAN_WATCH,
                source="Σ π_old · π_new/π_old = Σ π_new = 1",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "padding is in the mean",
                "weight by the mask: the mean becomes 1 where padding has ratio 0 or another",
            ),
            Suspect(
                "so many steps on one batch that rare actions became likely",
                "train with 1 epoch: the mean becomes 1",
            ),
        ),
        fix=Fix("Replay a rollout before any step: every ratio must be 1."),
        confidence=0.7,
        # too many steps bring it below 1, if anything, where probabilities vanish
        suppresses=("ratios-extreme", "sample-size-low", *(REGION if found.value > 1.0 else ())),
    )


def _mean_ratio(log: RunLog) -> Series | None:
    """Return the mean ratio, logged or by k3 = mean r − 1 + k1, where both are of the same rows."""
    if "train/ratio_mean" in log:
        return log["train/ratio_mean"]
    if log.framework != "cleanrl" or "train/approx_kl" not in log:
        return None
    k1, k3 = align(log["train/kl_k1"], log["train/approx_kl"])
    return replace(k3, name="train/ratio_mean", values=1.0 + k3.values - k1.values)
