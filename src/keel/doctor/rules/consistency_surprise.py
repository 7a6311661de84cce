"""Are the samples the policy's own? How surprising they are to it, beside its entropy."""

from __future__ import annotations

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.consistency import REGION
from keel.doctor.rules.measures import OUTCOMES
from keel.doctor.run_log import RunLog
from keel.doctor.series import breach

GAP = "train/surprise_gap"
LEAST = 0.15
"""Nats; the mean over a few hundred tokens has a standard error of 0.05."""
SHARE = 0.15
"""Share of the entropy, for long runs of large models; calibration corpus, writing half."""


@rule(
    "samples-surprising",
    "consistency",
    needs=(GAP,),
    source="E[−log π(a)] is the entropy of π, if a is drawn from π",
    rows=3,
    suppresses=(*REGION, *OUTCOMES, "entropy-collapsed", "groups-uninformative"),
)
def samples_surprising(log: RunLog) -> Finding | None:
    """Find samples that are more, or less, surprising to the policy than its own would be."""
    gap, entropy = log[GAP], log.get("train/entropy")
    limit = max(LEAST, SHARE * (0.0 if entropy is None else entropy.start()))
    found = breach(gap, -limit, limit)
    if found is None:
        return None
    grows = abs(gap.start()) < limit
    likely = found.value < 0.0
    what = (
        "a lower temperature, or only from the likeliest tokens"
        if likely
        else "other weights, or a higher temperature"
    )
    return Finding(
        cause=f"the samples are not the policy's own: they have {found.value:+.2g} nats more "
        f"surprise than its entropy, {'more and more' if grows else 'from the first update on'}; "
        f"they are drawn with {what}",
        level="sick",
        evidence=(
            evidence(
                gap,
                f"{found.value:+.3g} nats in {found.count} of {len(gap)} updates; "
                f"±{limit:.2g} allowed",
                found.value,
                threshold=limit,
                source="0 in expectation; standard error of a few hundred tokens × 3",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "the sampler does not get the new weights" if grows else "logits are processed",
                "score the samples with the sampler's own log-probs: the gap is its difference",
            ),
        ),
        fix=Fix("Send the weights after every update, and score with the sampler's temperature."),
        confidence=0.85,
    )
