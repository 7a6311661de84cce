"""An entropy that grows or leaps, and one that falls as it should."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import course, is_solved, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.exploration import COEF, ENTROPY, entropy_ceiling, is_continuous
from keel.doctor.run_log import RunLog
from keel.doctor.series import trend
from keel.doctor.settings import scaled

LANGUAGE_HIGH = 2.0
"""Nats a token above which exploration is out of control: verl's notes on clip-higher."""
GROWS = 1.0
"""Nats by which the entropy of continuous actions grows in no healthy run (they all fall)."""
JUMP = 10.0
"""Times the usual change of one update that is a leap."""
LEAP = 0.25
"""Nats that a leap has at least."""


@rule(
    "entropy-grows",
    "exploration",
    needs=(ENTROPY,),
    source="verl's notes on clip-higher; Keel's calibration on HalfCheetah",
    rows=8,
    suppresses=("action-std-exploded", "returns-flat", "returns-collapsed"),
    number=57,
)
def entropy_grows(log: RunLog) -> Finding | None:
    """Find an entropy that rises while the return does not."""
    series, now = log[ENTROPY], outcome(log)
    if now is None or not now.stagnates or is_solved(log) or entropy_ceiling(log) is not None:
        return None
    first, last = series.start(0.1), series.end(0.1)
    found = trend(series)
    language = log.is_language
    limit = max(LANGUAGE_HIGH, 1.5 * first) if language else first + GROWS
    if not (language or is_continuous(log) or _is_gaussian(log)):
        return None
    if not (np.isfinite(last) and last > limit and found.change > 0.0 and found.p < 0.01):
        return None
    setting = "region.entropy_coef" if language else "explore.entropy_coef"
    coef = log[COEF].end() if COEF in log else log.setting(setting)
    bonus = "" if not coef else f": its bonus of {coef:g} outweighs what is earned"
    return Finding(
        cause=f"entropy grows from {first:.3g} to {last:.3g} nats while the return goes from "
        f"{now.start:.4g} to {now.end:.4g}{bonus}",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{first:.3g} at the start, {last:.3g} at the end, rising (p = {found.p:.1g})",
                last,
                threshold=limit,
                source="verl: above 2 nats a token"
                if language
                else "Keel: it falls in every healthy run on continuous actions",
                onset=int(series.step[int(np.argmax(series.values > limit))]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "an upper clip that is too wide (clip-higher)",
                "train with region.clip_high as region.clip: entropy stays",
            ),
            Suspect(
                "a wrong sign of the entropy term",
                "train with an entropy coefficient of 0: entropy stays or falls",
            ),
        ),
        fix=Fix(
            "Take the entropy bonus away.",
            (Change(setting, to=0.0),),
        ),
        confidence=0.85 if coef else 0.6,
    )


@rule(
    "entropy-leaps",
    "exploration",
    needs=(ENTROPY,),
    source="verl's notes on clip-higher; research list: entropy spike",
    rows=20,
    suppresses=("returns-collapsed",),
    number=57,
)
def entropy_leaps(log: RunLog) -> Finding | None:
    """Find a leap of the entropy after which the return is lost."""
    series, now = log[ENTROPY], outcome(log)
    pulses = log.get("train/temp_is_pulsing")
    if now is None or now.lost < 0.5 or (pulses is not None and (pulses.values > 0).any()):
        return None
    if not np.isfinite(series.values).all():
        return None
    changes = np.diff(series.values)
    at = int(np.argmax(changes))
    usual = max(float(np.median(np.abs(changes))), 1e-6)
    step = int(series.step[at + 1])
    if changes[at] < max(LEAP, JUMP * usual) or step < now.best_step:
        return None
    return Finding(
        cause=f"entropy leaps from {series.values[at]:.3g} to {series.values[at + 1]:.3g} nats at "
        f"step {step:,}, and {now.lost:.0%} of the return that was gained is lost after it",
        level="sick",
        evidence=(
            evidence(
                series,
                f"+{changes[at]:.3g} nats in one update, {changes[at] / usual:.3g} times the "
                "usual change",
                float(series.values[at + 1]),
                threshold=float(series.values[at]) + max(LEAP, JUMP * usual),
                source="Keel: ten times the median change",
                onset=step,
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "one update that went too far",
                "look at the largest KL and gradient norm of that step",
            ),
        ),
        fix=Fix(
            "Bound the KL of an update, and lower the learning rate.",
            (
                Change("region.certify", to=True),
                scaled(log, "region.learning_rate", 0.3),
            ),
        ),
        confidence=0.6,
    )


@rule(
    "entropy-falls",
    "exploration",
    needs=(ENTROPY,),
    source="issues that report it as a bug",
    rows=8,
)
def entropy_falls(log: RunLog) -> Finding | None:
    """Say that a falling entropy is usual where the return rises."""
    series, now = log[ENTROPY], outcome(log)
    found = trend(series)
    if now is None or not now.rose or not (found.change < 0.0 and found.p < 0.01):
        return None
    return Finding(
        cause=f"entropy falls from {series.start(0.1):.3g} to {series.end(0.1):.3g} nats while the "
        f"return rises from {now.start:.4g} to {now.end:.4g}: that is learning, no collapse",
        level="usual",
        evidence=(
            evidence(series, f"{series.end(0.1):.3g} at the end (p = {found.p:.1g})"),
            *course(log),
        ),
        fix=Fix("Nothing to do."),
        confidence=0.9,
    )


def _is_gaussian(log: RunLog) -> bool:
    """Return whether a discrete policy is ruled out: no share of a commonest action is logged."""
    return log.framework == "keel" and "rollout/action_share_max" not in log
