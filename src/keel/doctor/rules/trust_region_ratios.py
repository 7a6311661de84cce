"""What ratios and clipping say: how many, how large, how many samples are left, how they drift."""

from __future__ import annotations

import math

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import KL, OUTCOMES, onset_of, percent, share_of
from keel.doctor.rules.trust_region import EPOCHS, LEAST, distance
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align, breach

CLIP_WATCH, CLIP_SICK = 0.5, 0.8
"""Share of clipped ratios: 0.1 to 0.3 are usual (37 details); SB3 and CleanRL count those that the
advantage pulls back as well, and reach 0.4 in healthy runs."""
UNBOUND = 1.0
"""A KL in nats that a clip at 0.2 is thought to exclude: log 1.2 is 0.18."""
LOG_WATCH, LOG_SICK = 5.0, 10.0
"""|log ratio| (research notes, N1)."""
TOKENS = 2.0
"""Factor on both for language models, whose batches have a hundred thousand tokens."""
EFFECTIVE = 0.3
"""Effective sample size as a share of the rows: verl's documentation asks for 0.3."""


@rule(
    "clip-does-not-bound",
    "trust region",
    needs=(KL, "train/clip_fraction"),
    source="Keel; Engstrom et al. 2020; public issues: KL of 30 with a clip fraction of 1",
    suppresses=("clip-fraction-high", "kl-over-target", "ratios-extreme", *OUTCOMES),
    number=11,
)
def clip_does_not_bound(log: RunLog) -> Finding | None:
    """Find large updates in spite of the clip, which has no gradient outside of its range."""
    kl, clip = align(distance(log).kl, log["train/clip_fraction"])
    outside = (kl.values > UNBOUND) & (clip.values > CLIP_WATCH) & (clip.values <= 1.0)
    if outside.sum() < min(LEAST, len(kl)) or not outside.any():
        return None
    at = int(np.flatnonzero(outside)[-1])
    return Finding(
        cause=f"the clip does not bound the updates: {kl.values[at]:.3g} nats with "
        f"{percent(clip.values[at])} of the ratios clipped; beyond its range there is no gradient "
        "that would lead back",
        level="sick",
        evidence=(
            evidence(
                kl,
                f"{kl.values[at]:.3g} nats with a clip fraction of {clip.values[at]:.3g}, in "
                f"{int(outside.sum())} of {len(kl)} updates",
                float(kl.values[at]),
                threshold=UNBOUND,
                source="a ratio of 1.2 has a log of 0.18; a KL above 1 is far outside",
                onset=onset_of(kl, outside),
            ),
        ),
        others=(
            Suspect(
                "the learning rate is too high: the first steps leave the range at once",
                "train with a tenth of it: the KL falls hundredfold",
            ),
            Suspect(
                "the replay differs from what was sampled",
                "train with a learning rate of 0: the KL must be 0",
            ),
        ),
        fix=Fix(
            "Bound the KL itself, and lower the learning rate.",
            (Change("region.certify", to=True), Change("region.learning_rate", times=0.1)),
        ),
        confidence=0.7 if len(kl) >= LEAST else 0.55,
    )


@rule(
    "clip-fraction-high",
    "trust region",
    needs=("train/clip_fraction",),
    source="37 implementation details of PPO; research notes, N0, N1, N4",
    number=11,
)
def clip_fraction_high(log: RunLog) -> Finding | None:
    """Find updates in which most samples have left the clip's range."""
    clip = log["train/clip_fraction"]
    found = breach(clip, high=CLIP_WATCH, lasting=0.5)
    if found is None or clip.values.max() > 1.0 or found.share < min(0.5, LEAST / len(clip)):
        return None
    typical = clip.median() if found.share > 0.5 else clip.end()
    if typical <= CLIP_WATCH:
        return None
    return Finding(
        cause=f"steps are too long for the clip's range: {percent(typical)} of the ratios are "
        "clipped, so most samples teach nothing any more",
        level="sick" if typical > CLIP_SICK else "watch",
        evidence=(
            evidence(
                clip,
                f"{typical:.3g}, above {CLIP_WATCH:g} in {found.count} of {len(clip)} updates",
                typical,
                threshold=CLIP_WATCH,
                source="rule of thumb: 0.1 to 0.3; healthy runs reach 0.4",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "too many epochs over the same data",
                "train with 1 epoch: the clip fraction falls to a few percent",
            ),
            Suspect(
                "old data: rollouts of earlier policies",
                "log the ratio before the first step: it must be 1",
            ),
            Suspect("a narrow clip range", "compare ε with 0.2; 0.05 clips four times as much"),
        ),
        fix=Fix(
            "Lower the learning rate, or make fewer epochs.",
            (Change("region.learning_rate", times=0.3), Change("region.epochs", times=0.5)),
        ),
        confidence=0.6,
        suppresses=("ratios-extreme",),
    )


@rule(
    "too-many-epochs",
    "trust region",
    needs=(KL, "train/kl_last_epoch|setting:region.epochs"),
    source="research notes; rsl_rl, verl issues: clip fraction grows with iterations per batch",
    rows=LEAST,
    suppresses=("kl-over-target", "clip-fraction-high", "ratios-extreme", *OUTCOMES),
    number=14,
)
def too_many_epochs(log: RunLog) -> Finding | None:
    """Find updates that go too far by their number of epochs."""
    measured = distance(log)
    if measured.far < 0.1 or "train/line_search_success" in log:
        return None
    first, last = log.get("train/kl_first_epoch"), log.get("train/kl_last_epoch")
    epochs = log.setting("region.epochs")
    rate = log.setting("region.learning_rate")
    proof, many = [], (epochs or 0.0) >= EPOCHS and (rate is None or rate <= 1e-3)
    if first is not None and last is not None and len(last) >= LEAST:
        # the first epoch alone is inside of the limit: what is too far comes from repeating
        many = first.median() < measured.limit < last.median() and last.median() > (
            2.0 * first.median()
        )
        proof.append(
            evidence(
                last,
                f"{last.median():.3g} nats in the last epoch, {first.median():.3g} in the first",
                last.median(),
                threshold=2.0 * first.median(),
                source="research notes: last epoch above 2 × first epoch",
                onset=int(last.step[0]),
            )
        )
    if not many:
        return None
    told = "" if epochs is None else f" ({epochs:g})"
    return Finding(
        cause=f"too many epochs{told} over the same data: {percent(measured.far)} of the updates "
        f"go beyond {measured.limit:.3g} nats, median {measured.kl.median():.3g}",
        level="sick" if measured.kl.median() > measured.limit and not measured.guarded else "watch",
        evidence=(
            *proof,
            evidence(
                measured.kl,
                f"median {measured.kl.median():.3g} nats; {measured.limit:.3g} allowed",
                measured.kl.median(),
                threshold=measured.limit,
                source=measured.source,
                onset=onset_of(measured.kl, measured.kl.values > measured.limit),
            ),
        ),
        others=(
            Suspect(
                "the learning rate is too high",
                "train with 1 epoch: the KL is above the limit even then",
            ),
        ),
        fix=Fix(
            "Make fewer epochs, or stop an update at its target.",
            (Change("region.epochs", to=10), Change("region.early_stop", to="minibatch")),
        ),
        confidence=0.78,
    )


@rule(
    "ratios-extreme",
    "trust region",
    needs=("train/log_ratio_max|train/ratio_max",),
    source="research notes, N1: |log ratio| above 5 warns, above 10 is bad; ratio above 100",
    rows=LEAST,
    suppresses=("sample-size-low",),
    number=12,
)
def ratios_extreme(log: RunLog) -> Finding | None:
    """Find samples whose probability changed by orders of magnitude, in most updates."""
    size = _log_ratio(log)
    factor = TOKENS if log.is_language else 1.0
    watch, sick = factor * LOG_WATCH, factor * LOG_SICK
    beyond = size.values > watch
    if beyond.sum() < LEAST or share_of(beyond) < 0.5:
        return None
    typical, bad = size.median(), share_of(size.values > sick) > 0.25
    return Finding(
        cause=f"single samples leave the trust region: the largest |log ratio| of an update is "
        f"{typical:.3g} (a factor of {math.exp(min(typical, 50.0)):.3g}), and the clamp only hides "
        "that",
        level="sick" if bad else "watch",
        evidence=(
            evidence(
                size,
                f"above {watch:g} in {percent(share_of(beyond))} of {len(size)} updates, median "
                f"{typical:.3g}",
                typical,
                threshold=watch,
                source=f"research notes, N1: {LOG_WATCH:g} warns, {LOG_SICK:g} is bad"
                + (f"; × {TOKENS:g} for tokens" if factor > 1 else ""),
                onset=onset_of(size, beyond),
            ),
        ),
        others=(
            Suspect(
                "the replay differs from what was sampled",
                "log the ratio before the first step: it must be 1",
            ),
            Suspect(
                "the learning rate is too high",
                "train with a tenth of it: the largest ratio falls",
            ),
            Suspect(
                "actions at the edge of a Gaussian whose deviation shrinks",
                "log the deviation: it falls while the ratios grow",
            ),
        ),
        fix=Fix(
            "Find the cause, do not widen the clamp; lower the learning rate.",
            (Change("region.learning_rate", times=0.3),),
        ),
        confidence=0.5,
    )


def _log_ratio(log: RunLog) -> Series:
    """Return the largest |log ratio| of each update."""
    if "train/log_ratio_max" in log:
        return log["train/log_ratio_max"]
    high = log["train/ratio_max"]
    return high.map(np.abs(np.log(np.maximum(high.values, 1e-12))))


@rule(
    "sample-size-low",
    "trust region",
    needs=("train/effective_sample_size",),
    source="verl's documentation: effective sample size at least 0.3",
    rows=LEAST,
)
def sample_size_low(log: RunLog) -> Finding | None:
    """Find updates after which few samples carry all of the weight."""
    size = log["train/effective_sample_size"]
    if size.values.max() > 1.0 + 1e-3:
        return None  # it is a count
    found = breach(size, low=EFFECTIVE)
    if found is None:
        return None
    return Finding(
        cause=f"few samples carry the update: the effective sample size is {percent(found.value)} "
        "of the rows, because ratios differ by too much",
        level="watch",
        evidence=(
            evidence(
                size,
                f"{found.value:.3g} in {found.count} of {len(size)} updates",
                found.value,
                threshold=EFFECTIVE,
                source="verl's documentation: at least 0.3",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "sampler and trainer differ",
                "log the ratio before the first step: its effective sample size must be 1",
            ),
            Suspect("steps are too long", "halve the learning rate: the share rises"),
        ),
        fix=Fix(
            "Take shorter steps, or cap the ratios.",
            (Change("region.learning_rate", times=0.3),),
        ),
        confidence=0.6,
    )
