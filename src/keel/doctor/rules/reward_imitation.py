"""What acts beside the reward: demonstrations, and coefficients that control themselves."""

from __future__ import annotations

import math

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import course, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.exploration import entropy_ceiling
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach, trend
from keel.doctor.settings import scaled
from keel.tracking.metrics import REGISTRY

GRADIENTS, LOSSES = "train/bc_gradient_ratio", "train/bc_ppo_ratio"
SHARE = 0.8
"""Share of the gradient from which on cloning alone decides: research list."""
EARLY, FIRST = 5.0, 0.05
"""Times the limit, in this first share of the run: what demonstrations have taught pulls no more,
so the end of a ruined run is quiet."""
MANY = 100.0
"""Ratio of losses that says something although its denominator is near 0."""
COEFS = ("train/kl_coef", "train/entropy_coef", "train/bc_coef")
RUNAWAY = 1e3
"""Growth of an adaptive coefficient that no control needs: RLlib's has gone to 1e10."""
PINNED = 0.5
"""Share of the updates at a bound."""
CONTRADICTS = -0.1


@rule(
    "imitation-dominates",
    "reward",
    needs=(f"{GRADIENTS}|{LOSSES}",),
    source="registry; research list: a share of the gradient above 0.8",
    suppresses=("returns-flat", "entropy-collapsed"),
    number=50,
)
def imitation_dominates(log: RunLog) -> Finding | None:
    """Find demonstrations that pull so hard that the reward has no say."""
    gradients = log.get(GRADIENTS)
    if gradients is not None:
        high = (REGISTRY[GRADIENTS].healthy or (None, 2.0))[1] or 2.0
        series, source = gradients, REGISTRY[GRADIENTS].healthy_note
    else:
        series, high = log[LOSSES], MANY
        source = "Keel: the ratio of losses is large in healthy runs, too"
    now = outcome(log)
    rose = now is not None and now.rose
    found = breach(series, high=high, lasting=FIRST)
    if found is None:
        return None
    ratio, when = series.end(), "at the end"
    if series.start(FIRST) > EARLY * high and now is not None and now.stagnates:
        ratio, when = series.start(FIRST), "at the start, and the return never rose"
    elif not found.lasting or not ratio > high:
        return None
    if len(series) < 5 and ratio < 5.0 * high:
        return None
    share = ratio / (1.0 + ratio)
    what = "gradient" if gradients is not None else "loss"
    sick = gradients is not None and share > SHARE and not rose and len(series) >= 5
    coef = log.get("train/bc_coef")
    return Finding(
        cause=f"demonstrations dominate: their {what} is {ratio:.3g} times that of the reward"
        + (f", {share:.0%} of both" if gradients is not None else ""),
        level="sick" if sick else "watch",
        evidence=(
            evidence(
                series,
                f"{ratio:.3g} {when}, above {high:g} in {found.count} of {len(series)} updates",
                ratio,
                threshold=high,
                source=source,
                onset=found.onset,
            ),
            *(() if coef is None else (evidence(coef, f"coefficient {coef.end():.3g}"),)),
            *course(log),
        ),
        others=(
            Suspect(
                "advantages without signal, so that only demonstrations pull",
                "train with demos.coef 0: the return rises, or it is the reward's fault",
            ),
        ),
        fix=Fix(
            "Let the coefficient follow the gradients, or decay.",
            (
                scaled(log, "demos.coef", 0.1),
                Change("demos.control", to="adaptive"),
                Change("demos.steer", to="gradient"),
            ),
        ),
        confidence=0.8 if gradients is not None else 0.4,
    )


@rule(
    "demonstrations-wrong",
    "reward",
    needs=("train/bc_loss",),
    source="research list: demonstrations outside of the action support, or a flat loss",
    rows=10,
    number=60,
)
def demonstrations_wrong(log: RunLog) -> Finding | None:
    """Find demonstrations that the policy cannot come to follow."""
    series, highest, cosine = log["train/bc_loss"], entropy_ceiling(log), log.get("train/bc_cosine")
    first, last, found = series.start(0.1), series.end(0.1), trend(series)
    if not (np.isfinite(first) and np.isfinite(last)):
        return None
    flat = last > 0.95 * first and not (found.change < 0.0 and found.p < 0.01)
    beyond = highest is not None and last > 1.5 * highest
    against = cosine is not None and cosine.median() < CONTRADICTS
    if not (flat and (beyond or against or (highest is not None and last > 0.9 * highest))):
        return None
    text = f"{first:.3g} at the start, {last:.3g} at the end"
    chance = "" if highest is None else f"; a policy without preference has {highest:.3g}"
    return Finding(
        cause=f"demonstrations are not learned: their loss stays at {last:.3g} nats{chance}",
        level="sick" if beyond else "watch",
        evidence=(
            evidence(
                series,
                text + chance,
                last,
                threshold=0.95 * first,
                source="Keel: it falls by a twentieth at least",
                onset=int(series.step[0]),
            ),
            *(
                (evidence(cosine, f"median cosine {cosine.median():.2f}", cosine.median()),)
                if cosine is not None
                else ()
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "actions in another order or unit than the environment's",
                "replay one demonstration in the environment: it earns what was recorded",
            ),
            Suspect(
                "demonstrations that contradict the reward",
                "look at train/bc_cosine: it is below 0 for long",
            ),
            Suspect(
                "a coefficient of 0",
                "train with demos.coef × 10: the loss falls",
            ),
        ),
        fix=Fix("Replay a demonstration in the environment, and compare actions and observations."),
        confidence=0.8 if beyond else 0.5,
    )


@rule(
    "coefficient-runs-away",
    "reward",
    needs=("|".join(COEFS),),
    source="RLlib issue 18492: an adaptive coefficient without bounds",
    rows=8,
    suppresses=("returns-flat", "returns-collapsed"),
    number=59,
)
def coefficient_runs_away(log: RunLog) -> Finding | None:
    """Find a coefficient that grows without end, or stays at its bound."""
    for series in (log[name] for name in COEFS if name in log):
        values = series.finite
        if len(values) < 8 or not (values > 0.0).all():
            continue
        growth = float(values[-1] / np.median(values[: max(1, len(values) // 10)]))
        rising = float(np.mean(np.diff(values) >= 0.0)) > 0.8 and values[-1] == values.max()
        if growth > RUNAWAY and rising:
            return _ran_away(log, series, growth)
        high = log.setting("kl.high")
        adaptive = log.settings.get("kl.controller") == "adaptive"
        if series.name == "train/kl_coef" and high is not None and adaptive:
            pinned = breach(series, high=high * (1.0 - 1e-6), lasting=PINNED)
            if pinned is not None and pinned.lasting and pinned.share > PINNED:
                return _ran_away(log, series, growth, high)
    return None


def _ran_away(log: RunLog, series: Series, growth: float, high: float = math.inf) -> Finding:
    now = outcome(log)
    rose = now is not None and now.rose
    pinned = math.isfinite(high)
    what = (
        f"stays at its bound of {high:g}" if pinned else f"grew {growth:.3g} times and still does"
    )
    return Finding(
        cause=f"an adaptive coefficient runs away: {series.label} {what} (now {series.last:.3g}); "
        "what it controls does not answer",
        level="watch" if rose or pinned else "sick",
        evidence=(
            evidence(
                series,
                f"{series.values[0]:.3g} at the start, {series.last:.3g} at the end",
                threshold=high if pinned else RUNAWAY * float(series.values[0]),
                source="the setting kl.high" if pinned else "Keel: 1,000 × its start",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a target in another unit than what is measured (token or sequence)",
                "compare the target with the KL that is logged: the same order of size",
            ),
            Suspect(
                "a penalty whose gradient is 0, or whose sign is wrong",
                "train with the coefficient fixed at 1: what it controls must fall",
            ),
        ),
        fix=Fix(
            "Give it bounds, and a target in the unit of what it controls.",
            (Change("kl.high", to=10.0), Change("kl.controller", to="fixed"))
            if log.is_language
            else (Change("region.adaptive_kl", to=False),),
        ),
        confidence=0.85,
    )
