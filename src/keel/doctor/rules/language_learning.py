"""Steps of language models that are too large, too small, or not the reward's."""

from __future__ import annotations

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import NEEDS_RETURN, course, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.measures import OUTCOMES
from keel.doctor.run_log import RunLog
from keel.doctor.settings import scaled

EFFECT, ENTROPY, REFERENCE = "train/gradient_effect", "train/entropy", "train/kl_reference"
LEAPS = 0.3
"""‖Δθ‖/‖θ‖ of one of the first updates; the largest that learned had 0.03 (calibration corpus,
writing half: models from scratch, which take the largest steps of all)."""
TINY = 2e-5
"""The same of updates that change nothing: a learning rate of 1e-6 makes 5e-5 in usual models."""
STILL = 0.005
"""Share of its entropy that a policy changes that learns nothing."""
ROWS = 15
NEAR, RULES = 0.02, 1.0
"""KL of a policy that its penalty keeps at the reference, and a coefficient that can do so."""


@rule(
    "parameters-leap",
    "trust region",
    needs=(EFFECT,),
    source="Keel: a hundred times the learning rate; calibration corpus, writing half",
    rows=3,
    suppresses=(*OUTCOMES, "entropy-collapsed", "groups-uninformative", "completions-cut"),
)
def parameters_leap(log: RunLog) -> Finding | None:
    """Find first updates that move the parameters by a large part of their own size."""
    effect = log[EFFECT]
    if not log.is_language:
        return None  # a row of others holds many steps
    largest = float(effect.values[:3].max())
    if not largest > LEAPS:
        return None
    return Finding(
        cause=f"the learning rate is too high: one update moves the parameters by {largest:.0%} of "
        "their size",
        level="sick",
        evidence=(
            evidence(
                effect,
                f"{largest:.3g} in the first updates; {LEAPS:g} allowed",
                largest,
                threshold=LEAPS,
                source="calibration corpus, writing half: 0.03 in runs that learn",
                onset=int(effect.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a gradient that is not clipped",
                "log its norm: with Adam a bound on it does not bound the step",
            ),
        ),
        fix=Fix("Lower the learning rate.", (scaled(log, "region.learning_rate", 0.01),)),
        confidence=0.85,
    )


@rule(
    "rate-too-low",
    "trust region",
    needs=(EFFECT, ENTROPY, NEEDS_RETURN),
    source="Keel: a thousandth of the learning rate; calibration corpus, writing half",
    rows=ROWS,
    suppresses=OUTCOMES,
)
def rate_too_low(log: RunLog) -> Finding | None:
    """Find updates so small that neither entropy nor reward ever changes."""
    effect, entropy, now = log[EFFECT], log[ENTROPY], outcome(log)
    if not log.is_language or now is None or not now.stagnates:
        return None
    typical, change = effect.median(), abs(entropy.end() - entropy.start())
    if not 0.0 < typical < TINY or change > STILL * abs(entropy.start()):
        return None
    return Finding(
        cause=f"the learning rate is too low: an update moves the parameters by {typical:.1g} of "
        f"their size, and the entropy by {change:.1g} nats in {len(entropy)} updates",
        level="watch",
        evidence=(
            evidence(
                effect,
                f"median {typical:.2g}",
                typical,
                threshold=TINY,
                source="Keel: a rate of 1e-6 makes 5e-5 in usual models",
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "adapters whose first matrix is 0",
                "look at the effect after a hundred updates: it grows",
            ),
        ),
        fix=Fix("Raise the learning rate.", (scaled(log, "region.learning_rate", 30.0),)),
        confidence=0.6,
    )


@rule(
    "penalty-dominates",
    "language",
    needs=(REFERENCE, "setting:kl.coef", NEEDS_RETURN),
    source="Keel: a coefficient of 20; calibration corpus, writing half",
    rows=ROWS,
    suppresses=("returns-flat", "completions-cut", "entropy-stuck", "groups-uninformative"),
)
def penalty_dominates(log: RunLog) -> Finding | None:
    """Find a KL penalty that keeps the policy at its reference, whatever is rewarded."""
    kl, now, coefficient = log[REFERENCE], outcome(log), log.setting("kl.coef", 0.0) or 0.0
    if not log.is_language or now is None or not now.stagnates or coefficient < RULES:
        return None
    if not 0.0 < kl.end() < NEAR:
        return None
    return Finding(
        cause=f"the KL penalty leaves the reward no say: with a coefficient of {coefficient:g} the "
        f"policy stays within {kl.end():.2g} nats of its reference, and earns no more",
        level="watch",
        evidence=(
            evidence(
                kl,
                f"{kl.end():.3g} nats at the end, × {coefficient:g}",
                kl.end(),
                threshold=NEAR,
                source="calibration corpus, writing half",
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "a learning rate that is too low",
                "train without the penalty: the reward stays where it is",
            ),
        ),
        fix=Fix(
            "Lower the coefficient; presets have 0.001 to 0.05.",
            (Change("kl.coef", to=0.02),),
        ),
        confidence=0.7,
    )
