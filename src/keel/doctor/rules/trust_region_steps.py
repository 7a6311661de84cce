"""Leaps and standstill: single updates that go far, and updates that hardly happen."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import (
    KL,
    KLS,
    actions_of,
    improves,
    onset_of,
    percent,
    present,
    spacing,
)
from keel.doctor.rules.trust_region import LEAST, VALUE_RULES, distance
from keel.doctor.run_log import RunLog
from keel.doctor.series import align

LEAP = 10.0
"""Times the running median (Schulman, nuts and bolts)."""
FIRST = 5
"""Updates before there is a median to leap from: adaptive learning rates begin with leaps, and one
that the return survives means nothing (calibration corpus, writing half: the land game)."""
TINY, CLIPPED = 1e-4, 1e-3
"""A KL and a clip fraction of updates that hardly happen: healthy runs have 3e-3 and 1e-2 in their
first half."""
BONUS = 0.1
"""Coefficient of an entropy bonus that is large beside normalized advantages: presets have 0.03."""
DECIDED = 0.02
"""Entropy in nats of a policy that takes one action of two in 99.7 % of the cases: a restored or
solved one, which small steps leave where it is."""
WANTED = 3e-3
"""The KL of healthy updates that a higher learning rate aims at."""


@rule(
    "kl-spikes",
    "trust region",
    needs=(KL,),
    source="Schulman, nuts and bolts of deep RL: drastic steps",
    rows=10,
    suppresses=("returns-collapsed", "entropy-collapsed", "ratios-extreme"),
    number=9,
)
def kl_spikes(log: RunLog) -> Finding | None:
    """Find single updates that leap, and what became of the return."""
    measured = distance(log)
    kl = measured.kl
    running = _running_median(kl.values)
    leap = np.concatenate([[False], kl.values[1:] > np.maximum(LEAP * running, measured.limit)])
    leap[:FIRST] = False
    if measured.guarded or not leap.any():
        return None
    at = int(np.flatnonzero(leap)[np.argmax(kl.values[leap])])
    usual, step = float(running[at - 1]), int(kl.step[at])
    before, after = _return_around(log, step)
    fell = before is not None and after is not None
    if not fell and leap.sum() < LEAST:
        return None
    told = f"; the return fell from {before:.4g} to {after:.4g}" if fell else ""
    return Finding(
        cause=f"single updates leap: {float(kl.values[at]):.3g} nats at step {step:,}, where the "
        f"median before was {usual:.3g}{told}",
        level="sick" if fell else "watch",
        evidence=(
            evidence(
                kl,
                f"{float(kl.values[at]):.3g} / {usual:.3g} = "
                f"{float(kl.values[at]) / max(usual, 1e-12):.3g} × the running median, in "
                f"{int(leap.sum())} updates",
                float(kl.values[at]),
                threshold=max(LEAP * usual, measured.limit),
                source=f"{LEAP:g} × the running median, and above {measured.limit:.3g}",
                onset=onset_of(kl, leap),
            ),
        ),
        others=(
            Suspect(
                "a batch with extreme advantages",
                "log the largest |advantage|; clamp it at 10: the leaps stop",
            ),
            Suspect(
                "the statistics of observations or the temperature changed at that step",
                "log the KL before the first step of the update: it is above 0 there",
            ),
        ),
        fix=Fix(
            "Stop an update at its target, and walk back what is over the bound.",
            (Change("region.early_stop", to="minibatch"), Change("region.certify", to=True)),
        ),
        confidence=0.7 if fell else 0.55,
    )


def _running_median(values: NDArray[np.float64], width: int = 20) -> NDArray[np.float64]:
    """Return the median of up to `width` values before each but the first, `[n − 1]`."""
    first = [float(np.median(values[:i])) for i in range(1, min(width, len(values)))]
    if len(values) <= width:
        return np.array(first)
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], width)
    return np.concatenate([first, np.median(windows, axis=1)])


def _return_around(log: RunLog, step: int) -> tuple[float | None, float | None]:
    """Return the return before a step and after it, if it fell by half of its range."""
    returns = log.get("rollout/return_mean") or log.get("eval/return_mean")
    if returns is None:
        return None, None
    before = returns.values[returns.step <= step][-5:]
    after = returns.values[returns.step > step][:20]
    size = float(np.ptp(returns.finite)) if len(returns.finite) else 0.0
    if len(before) < LEAST or len(after) < LEAST or not np.isfinite(size):
        return None, None
    then, now = float(np.median(before)), float(np.median(after))
    return (then, now) if then - now > 0.5 * size > 0.0 else (None, None)


@rule(
    "steps-too-small",
    "trust region",
    needs=(KL, "train/clip_fraction"),
    source="Andy Jones, Debugging RL; Keel, calibrated",
    rows=10,
    suppresses=(
        "returns-flat",
        "entropy-stuck",
        "critic-too-slow",
        "explained-variance-zero",
        "explained-variance-negative",
    ),
    number=10,
)
def steps_too_small(log: RunLog) -> Finding | None:
    """Find updates that hardly move the policy, in the part of the run where it should move."""
    if log.is_language or _value_dominates(log):
        return None
    names = KLS[1:] if KLS[1] in log else KLS  # what was kept
    kl, clip = align(present(log, names)[0], log["train/clip_fraction"])
    half = len(kl) // 2
    if half < 5 or int(kl.step[0]) > 3 * spacing(kl):
        return None  # the end of a schedule makes small steps by right
    typical, clipped = float(np.median(kl.values[:half])), float(np.median(clip.values[:half]))
    returns = log.get("rollout/return_mean")
    rises = returns is not None and improves(returns)
    if not 0.0 < typical < TINY or clipped > CLIPPED or rises or _is_decided(log) or _is_held(log):
        return None
    flat = returns is not None and len(returns) >= 10
    times = float(f"{np.clip(np.sqrt(WANTED / typical), 3.0, 1e3):.1g}")
    rate = log.setting("region.learning_rate")
    named = "" if rate is None else f" ({rate:g})"
    return Finding(
        cause=f"the learning rate{named} is too low: updates go {typical:.2g} nats far and clip "
        f"{percent(clipped)}, from the start on"
        + (", and the return does not rise" if flat else ""),
        level="sick" if flat and typical < 0.1 * TINY else "watch",
        evidence=(
            evidence(
                kl,
                f"median {typical:.3g} nats in the first half of the run",
                typical,
                threshold=TINY,
                source="Keel: healthy runs have about 3e-3 in their first half",
                onset=int(kl.step[0]),
            ),
            evidence(
                clip,
                f"median {clipped:.3g} in the first half",
                clipped,
                threshold=CLIPPED,
                source="Keel: healthy runs have about 1e-2",
            ),
        ),
        others=(
            Suspect(
                "the critic takes all of the clipped gradient",
                "lower the value coefficient to 0.01: the KL rises",
            ),
            Suspect(
                "advantages are 0 or nearly constant",
                "log the standard deviation of the raw advantages",
            ),
            Suspect("logits are flat or saturated", "look at the largest logit of a batch"),
        ),
        fix=Fix(
            f"Raise the learning rate {times:.2g}-fold: the KL grows with its square.",
            (Change("region.learning_rate", times=times),),
        ),
        confidence=0.75 if flat else 0.55,
    )


def _is_decided(log: RunLog) -> bool:
    """Return whether the policy is deterministic from the start on: it has nowhere to go."""
    entropy = log.get("train/entropy")
    if entropy is None or "train/action_std" in log:
        return False
    return float(np.median(entropy.values[: max(1, len(entropy) // 2)])) < DECIDED


def _is_held(log: RunLog) -> bool:
    """Return whether a large entropy bonus holds the policy where it is, which is uniform."""
    coefficient, actions = log.setting("explore.entropy_coef"), actions_of(log)
    entropy = log.get("train/entropy")
    if coefficient is None or coefficient < BONUS or entropy is None or actions < 2:
        return False
    return entropy.median() > 0.95 * math.log(actions)


def _value_dominates(log: RunLog) -> bool:
    """Return whether the critic's loss is so large that it alone explains small steps."""
    value, norm = log.get("train/value_loss"), log.get("train/gradient_norm")
    bound = log.setting("region.max_grad_norm") or 0.5
    if value is not None and value.median() > VALUE_RULES:
        return True
    return norm is not None and norm.median() > VALUE_RULES * bound
