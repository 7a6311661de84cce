"""How far do updates go? KL, clip fraction, ratios, line search."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import breach

TARGET = 0.02
"""Target KL where the log does not say one: 37 details, "around 0.01–0.02"."""
FACTOR = 1.5
"""Sustained KL over target that is too much: Spinning Up and SB3 stop an update at 1.5 × target."""


@rule(
    "kl-over-target",
    "trust region",
    needs=("train/kl_exact|train/approx_kl",),
    source="Spinning Up's early stopping; 37 implementation details of PPO",
    rows=3,
    number=8,
)
def kl_over_target(log: RunLog) -> Finding | None:
    """Find updates that go further than intended, for long."""
    kl = log.get("train/kl_exact") or log["train/approx_kl"]
    target = log.setting("region.target_kl") or TARGET
    found = breach(kl, high=FACTOR * target)
    if found is None:
        return None
    typical = float(np.median(kl.values[-5:]))
    return Finding(
        cause=f"updates go too far: a KL of {typical:.3g} nats where {target:g} is wanted",
        level="sick" if typical > 5 * FACTOR * target else "watch",
        evidence=(
            evidence(
                kl,
                f"{typical:.3g} nats, median of the last 5; {FACTOR:g} × {target:g} allowed",
                typical,
                threshold=FACTOR * target,
                source="Spinning Up: an update stops at 1.5 × target_kl",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "too many epochs over the same data",
                "train with 1 epoch: the KL falls by about the number of epochs",
            ),
        ),
        fix=Fix(
            "Lower the learning rate.",
            (Change("region.learning_rate", times=0.3),),
        ),
        confidence=0.7,
    )
