"""What announces a collapse: ratios and gradients that grow; and gradients that are cut down."""

from __future__ import annotations

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import percent, share_of
from keel.doctor.rules.trust_region import FACTOR, VALUE_RULES
from keel.doctor.run_log import RunLog
from keel.doctor.series import trend

SURE = 0.01
HEAVY = 100.0
"""Gradient norm over its bound: healthy runs of Keel reach 80."""


@rule(
    "region-drifts",
    "trust region",
    needs=("train/gradient_norm", "train/effective_sample_size|train/clip_fraction"),
    source="public issues: collapse after 100 to 200 steps, announced by sample size and gradients",
    rows=20,
)
def region_drifts(log: RunLog) -> Finding | None:
    """Find ratios and gradients that grow together, long before the collapse."""
    norm = log["train/gradient_norm"]
    size = log.get("train/effective_sample_size")
    clip = log.get("train/clip_fraction")
    grows = norm.end() > 3.0 * norm.start() > 0.0 and trend(norm).p < SURE
    if not grows:
        return None
    if size is not None:
        drifts = size.end() < 0.7 and size.end() < size.start() - 0.2 and trend(size).p < SURE
        second, threshold = size, 0.7
    elif clip is not None:
        drifts = clip.end() > max(0.3, 3.0 * clip.start()) and trend(clip).p < SURE
        second, threshold = clip, 0.3
    else:
        return None
    if not drifts:
        return None
    return Finding(
        cause=f"the trust region wears out: {second.label} goes from {second.start():.3g} to "
        f"{second.end():.3g}, and the gradient norm from {norm.start():.3g} to {norm.end():.3g}; "
        "a collapse usually follows",
        level="watch",
        evidence=(
            evidence(
                second,
                f"{second.start():.3g} to {second.end():.3g}",
                second.end(),
                threshold=threshold,
                source="Keel: healthy runs stay above 0.9 (sample size), below 0.3 (clip fraction)",
                onset=int(second.step[0]),
            ),
            evidence(
                norm,
                f"{norm.end():.3g} / {norm.start():.3g} = {norm.end() / norm.start():.3g}",
                norm.end(),
                threshold=3.0 * norm.start(),
                source="three times the start",
            ),
        ),
        others=(
            Suspect(
                "sampler and trainer drift apart",
                "log the gap of their log-probs before the first step: it grows",
            ),
            Suspect(
                "the policy becomes sharp, and the same steps mean more",
                "halve the learning rate from here on: both turn",
            ),
        ),
        fix=Fix(
            "Lower the learning rate with a schedule, or bound the KL.",
            (Change("region.schedule", to="linear"), Change("region.certify", to=True)),
        ),
        confidence=0.6,
    )


@rule(
    "gradient-clip-heavy",
    "trust region",
    needs=("train/gradient_norm", "setting:region.max_grad_norm"),
    source="research notes, 52; Keel, calibrated",
    rows=5,
    number=52,
)
def gradient_clip_heavy(log: RunLog) -> Finding | None:
    """Judge a gradient that is always cut down to its bound: by how much?"""
    norm, bound = log["train/gradient_norm"], log.setting("region.max_grad_norm") or 0.0
    value = log.get("train/value_loss")
    cut = share_of(norm.values > 2.0 * bound)
    if "train/line_search_success" in log or bound <= 0.0 or cut < 0.8:
        return None  # with TRPO it is the critic's
    if value is not None and value.median() > VALUE_RULES:
        return None
    times = norm.median() / bound
    heavy = times > HEAVY * FACTOR
    if not heavy and times < 10.0:
        return None  # nobody asks
    return Finding(
        cause=f"the clip of the gradient sets the step: its norm is {times:.3g} × the bound of "
        f"{bound:g} in the median"
        if heavy
        else f"the gradient is shortened in {percent(cut)} of the updates ({times:.3g} × its "
        "bound), which Adam undoes: it divides by the gradient's size",
        level="watch" if heavy else "usual",
        evidence=(
            evidence(
                norm,
                f"median {norm.median():.3g}, bound {bound:g}",
                norm.median(),
                threshold=HEAVY * FACTOR * bound,
                source="Keel: healthy runs reach 80 × the bound",
                onset=int(norm.step[0]) if heavy else None,
            ),
        ),
        others=(
            Suspect(
                "the critic's gradient leaves nothing to the policy",
                "lower the value coefficient to 0.01: the KL of the updates rises",
            ),
        )
        if heavy
        else (),
        fix=Fix("Raise the bound, or scale rewards.", (Change("region.max_grad_norm", times=10.0),))
        if heavy
        else Fix("Nothing, unless the norm grows without end."),
        confidence=0.55,
    )
