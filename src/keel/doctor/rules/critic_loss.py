"""Critics of which only loss and explained variance are known: do they learn at all?"""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.outcome import course, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.critic import EV, LEAST, LOSS, VALUE, has_variance, late
from keel.doctor.run_log import RunLog
from keel.doctor.settings import scaled

NOTHING, TOP = 0.01, 0.05
"""Explained variance of critics that do not move: its median, and nine tenths of it, in the second
half of the log; critics that are only held back pass them (calibration corpus, writing half)."""
STEADY, SAME = 0.2, 0.8
"""Change of the logarithm of the loss between updates, and the share of the loss at the start that
is left at the end, of a critic that stands still (calibration corpus, writing half)."""


@rule(
    "critic-stands-still",
    "critic",
    needs=(EV, LOSS),
    source="Keel: critics with a thousandth of the learning rate; calibration corpus, writing half",
    rows=2 * LEAST,
    suppresses=("explained-variance-zero", "explained-variance-negative"),
)
def critic_stands_still(log: RunLog) -> Finding | None:
    """Find a critic whose loss neither falls nor changes, and that explains nothing."""
    series, loss, now = late(log[EV], 0.5), log[LOSS], outcome(log)
    if VALUE in log or not has_variance(log) or len(series.finite) < LEAST:
        return None  # with values and targets critic-too-slow knows more
    typical, top = series.median(), float(np.quantile(series.finite, 0.9))
    if abs(typical) > NOTHING or top > TOP or not (loss.finite > 0.0).all():
        return None
    change = float(np.median(np.abs(np.diff(np.log(loss.finite)))))
    if change > STEADY or loss.end() < SAME * loss.start():
        return None
    stagnates = now is not None and now.stagnates
    return Finding(
        cause=f"the critic does not learn: its loss is {loss.start():.3g} at the start and "
        f"{loss.end():.3g} at the end, and it explains {typical:.2g} of the variance",
        level="sick" if stagnates else "watch",
        evidence=(
            evidence(
                loss,
                f"it changes by {change:.0%} between updates, and does not fall",
                loss.end(),
                threshold=SAME * loss.start(),
                source="calibration corpus, writing half: healthy losses fall, or swing",
                onset=int(loss.step[0]),
            ),
            evidence(log[EV], f"median {typical:.2g}, nine of ten below {top:.2g}", typical),
            *course(log),
        ),
        others=(
            Suspect(
                "a clip of the value that is narrow beside the returns",
                "train without it: the loss falls",
            ),
            Suspect(
                "a critic whose loss or parameters are not in the optimizer",
                "compare its parameters before and after one update: they must differ",
            ),
        ),
        fix=Fix(
            "Raise the critic's learning rate.",
            (scaled(log, "region.critic_learning_rate", 30.0, "region.learning_rate"),),
        ),
        confidence=0.6,
    )
