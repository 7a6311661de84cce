"""How far do updates go? Too far from the start, too far later, by leaps, or nowhere."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from keel.doctor.finding import Change, Evidence, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import KL, KLS, OUTCOMES, onset_of, percent, present, share_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, trend

FAR = 0.1
"""A KL in nats that is too far where no target is known: 37 details aims at 0.01 to 0.02; healthy
runs of Keel on nine environments stay below 0.05, with ten times the learning rate they pass 0.1.
"""
VERY_FAR = 0.25
FACTOR, MUCH = 1.5, 5.0
"""Times the target: Spinning Up and SB3 stop an update at 1.5 × target_kl."""
OFTEN = 0.1
"""Share of the updates that must go too far."""
LEAST = 3
EARLY = 0.2
"""Share of the updates that counts as the start."""
EPOCHS = 20.0
"""Epochs of PPO that are many: presets have 4 to 10."""
VALUE_RULES = 1e3
"""A value loss (research notes, N0: 14,000) or a gradient norm over its bound, above which the
critic leaves nothing of the clipped gradient to the policy."""
AIM = 0.01
"""KL that a lower learning rate aims at: it grows with the square of the rate."""
USUAL_RATE = 1e-3
"""Adam's default, and the highest of the presets that learn in minutes."""
CONSEQUENCES = (
    *OUTCOMES,
    "kl-spikes",
    "clip-fraction-high",
    "clip-does-not-bound",
    "ratios-extreme",
    "sample-size-low",
    "region-drifts",
    "walk-backs-frequent",
    "early-stop-at-once",
    "critic-dominates",
    "reference-kl-high",
)


class Distance(NamedTuple):
    """How far updates go, and what is too far."""

    kl: Series
    limit: float
    source: str
    far: float
    """share of the updates beyond the limit"""
    guarded: bool
    """whether a certificate kept the policy inside of its bound all the same"""


def distance(log: RunLog, factor: float = FACTOR) -> Distance:
    """Return the KL of the updates beside the limit for it.

    Args:
        log: The log; one of `KLS` must be there.
        factor: Times the target that is too far, where a target is known.
    """
    names = KLS[1:] if log.is_language else KLS  # presets for tokens walk back most updates
    kl = (present(log, names) or present(log, KLS))[0]
    target = log.setting("region.target_kl")
    limit = FAR if target is None else factor * target
    source = (
        f"no target is known: healthy runs stay below {FAR:g}"
        if target is None
        else f"{factor:g} × target_kl {target:g}; Spinning Up and SB3 stop at 1.5 ×"
    )
    exact = log.get("train/kl_exact")
    guarded = kl.name == KLS[0] and exact is not None and float(exact.values.max()) <= limit
    return Distance(kl, limit, source, share_of(kl.values > limit), guarded)


def _too_far(measured: Distance) -> Evidence:
    kl, beyond = measured.kl, measured.kl.values > measured.limit
    return evidence(
        kl,
        f"above {measured.limit:.3g} nats in {percent(measured.far)} of {len(kl)} updates, median "
        f"{kl.median():.3g}, largest {float(kl.values.max()):.3g}",
        kl.median(),
        threshold=measured.limit,
        source=measured.source,
        onset=onset_of(kl, beyond),
    )


def _clip_evidence(log: RunLog) -> tuple[Evidence, ...]:
    clip = log.get("train/clip_fraction")
    if clip is None:
        return ()
    first = float(np.median(clip.values[:LEAST]))
    return (
        evidence(clip, f"{first:.3g} in the first updates, {clip.end():.3g} at the end", first),
    )


def shorter_steps(log: RunLog, kl: float) -> Change:
    """Return the learning rate that should bring a KL down to `AIM`, at most `USUAL_RATE`.

    Args:
        log: The log, for the rate that is set.
        kl: The KL of updates at this rate.
    """
    times = float(np.clip(np.sqrt(AIM / max(kl, AIM)), 0.03, 0.3))
    rate = log.get("train/learning_rate")
    known = log.setting("region.learning_rate", None if rate is None else float(rate.values[0]))
    if known is None or not known > 0.0:
        return Change("region.learning_rate", times=round(times, 2))
    return Change("region.learning_rate", to=float(f"{min(known * times, USUAL_RATE):.1g}"))


def _many_epochs(log: RunLog) -> bool:
    rate = log.setting("region.learning_rate")
    return (log.setting("region.epochs") or 0.0) >= EPOCHS and (rate is None or rate <= 1e-3)


@rule(
    "learning-rate-too-high",
    "trust region",
    needs=(KL,),
    source="37 implementation details of PPO; research notes, N1; Keel, calibrated",
    suppresses=("kl-over-target", "too-many-epochs", *CONSEQUENCES),
    number=8,
)
def learning_rate_too_high(log: RunLog) -> Finding | None:
    """Find updates that go much too far from the first one on."""
    measured = distance(log, MUCH)
    kl, limit = measured.kl, measured.limit
    if "train/line_search_success" in log or _many_epochs(log) or _unclipped(log):
        return None
    start = kl.values[: max(LEAST, round(EARLY * len(kl)))]
    clip = log.get("train/clip_fraction")
    clipped = clip is not None and float(np.max(clip.values[:LEAST])) > 0.3
    early = share_of(start > limit) >= 0.25 or (clipped and bool((start > 0.5 * limit).any()))
    if len(kl) < LEAST:
        early = clipped and bool((kl.values > MUCH * limit).any())
    beyond = int((kl.values > limit).sum())
    if not early or measured.far < OFTEN or beyond < min(LEAST, len(kl)):
        return None
    bad = share_of(kl.values > VERY_FAR / FAR * limit) >= OFTEN or kl.median() > limit
    rate = log.get("train/learning_rate")
    known = log.setting("region.learning_rate", None if rate is None else float(rate.values[0]))
    named = "" if known is None else f" ({known:g})"
    change = shorter_steps(log, max(kl.median(), float(np.median(start))))
    return Finding(
        cause=f"the learning rate{named} is too high: the first updates already go "
        f"{float(np.max(start)):.3g} nats far, and {percent(measured.far)} of all go beyond "
        f"{limit:.3g}",
        level="sick" if bad and not measured.guarded else "watch",
        evidence=(_too_far(measured), *_clip_evidence(log)),
        others=(
            Suspect(
                "too many epochs over the same data",
                "train with 1 epoch: the KL falls to a few percent where epochs are the cause, and "
                "stays high where the learning rate is",
            ),
            Suspect(
                "the replay differs from what was sampled",
                "train with a learning rate of 0: the KL must be 0",
            ),
        ),
        fix=Fix(
            "Lower the learning rate"
            + (f" to {change.to:g}." if change.to else f" to {change.times:g} × of it."),
            (change,),
        ),
        confidence=(0.85 if clipped else 0.75) if len(kl) >= LEAST else 0.5,
    )


@rule(
    "kl-over-target",
    "trust region",
    needs=(KL,),
    source="Spinning Up's early stopping; 37 implementation details of PPO",
    rows=LEAST,
    suppresses=CONSEQUENCES,
    number=8,
)
def kl_over_target(log: RunLog) -> Finding | None:
    """Find updates that go further than intended, for long."""
    measured = distance(log)
    kl, limit = measured.kl, measured.limit
    known = log.setting("region.target_kl") is not None
    if measured.far < (0.5 if known else OFTEN) or int((kl.values > limit).sum()) < LEAST:
        return None
    natural = "train/line_search_success" in log
    bound = log.setting("region.max_kl")
    loose = natural and bound is not None and bound > limit
    change = shorter_steps(log, float(np.percentile(kl.values, 90.0)))
    why = "the learning rate is too high for how sharp the policy has become"
    if loose:
        why, change = (
            f"the bound itself is loose, max_kl = {bound:g}",
            Change("region.max_kl", to=0.02),
        )
    elif natural:
        why, change = "the step is not scaled to a bound", Change("natural.rescale_to_kl", to=True)
    if not loose and trend(kl).p < 0.01 and kl.end() > 3.0 * kl.start():
        why += f"; it grew from {kl.start():.3g} to {kl.end():.3g}"
    far = share_of(kl.values > (MUCH / FACTOR if known else VERY_FAR / FAR) * limit) >= OFTEN
    far = far or (not known and kl.median() > limit)
    return Finding(
        cause=f"updates go too far: {percent(measured.far)} of them beyond {limit:.3g} nats "
        f"(median {kl.median():.3g}); {why}",
        level="sick" if far and not measured.guarded else "watch",
        evidence=(_too_far(measured), *_clip_evidence(log)),
        others=(
            Suspect(
                "too many epochs over the same data",
                "train with 1 epoch: the KL falls by about the number of epochs",
            ),
            Suspect(
                "advantages are not normalized, or have outliers",
                "clamp them at 10 standard deviations: the KL falls",
            ),
            Suspect(
                "minibatches are small",
                "double them: the KL falls where noise is the cause",
            ),
        ),
        fix=Fix(
            f"Set max_kl to {change.to:g}." if loose else "Take shorter steps.",
            (change,),
        ),
        confidence=0.7,
    )


def _unclipped(log: RunLog) -> bool:
    """Return whether the settings say that nothing holds an update back."""
    settings = log.settings
    free = "region.clip" in settings and settings["region.clip"] is None
    held = settings.get("region.certify") is not False or bool(settings.get("region.kl_coef"))
    return free and not held and settings.get("region.early_stop", "off") == "off"


@rule(
    "nothing-bounds-updates",
    "trust region",
    needs=(KL, "setting:region.clip", "setting:region.certify"),
    source="Schulman et al. 2017, table 1: without clip or penalty the surrogate diverges",
    suppresses=("kl-over-target", "learning-rate-too-high", "too-many-epochs", *CONSEQUENCES),
)
def nothing_bounds_updates(log: RunLog) -> Finding | None:
    """Find large updates where clip, penalty, early stop and certificate are all off."""
    measured = distance(log)
    if not _unclipped(log) or measured.far < OFTEN or "train/line_search_success" in log:
        return None
    return Finding(
        cause="nothing bounds the updates: clip, penalty, early stop and certificate are off, and "
        f"{percent(measured.far)} of the updates go beyond {measured.limit:.3g} nats (median "
        f"{measured.kl.median():.3g})",
        level="sick",
        evidence=(_too_far(measured),),
        others=(
            Suspect(
                "the learning rate is too high as well",
                "switch the clip on: the KL stays high where it is",
            ),
        ),
        fix=Fix(
            "Switch clip and certificate on.",
            (Change("region.clip", to=0.2), Change("region.certify", to=True)),
        ),
        confidence=0.9,
    )
