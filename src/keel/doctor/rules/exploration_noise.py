"""Policies that try nothing from the first update on."""

from __future__ import annotations

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import course, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.consistency import REGION
from keel.doctor.rules.measures import OUTCOMES
from keel.doctor.run_log import RunLog

STD = "train/action_std"
NONE = 0.01
"""A standard deviation with which nothing is tried, and the smallest step is a leap of the KL;
healthy runs begin with 0.1 and more (RL Zoo: log_std_init of −2)."""


@rule(
    "action-std-none",
    "exploration",
    needs=(STD,),
    source="calibration corpus, writing half: log_std_init of −7",
    rows=5,
    suppresses=(*OUTCOMES, *REGION, "nothing-bounds-updates"),
)
def action_std_none(log: RunLog) -> Finding | None:
    """Find a Gaussian that hardly varies its actions, before anything was learned."""
    series, now = log[STD], outcome(log)
    first = series.start(0.1)
    if not 0.0 < first < NONE or now is None or not now.stagnates:
        return None
    return Finding(
        cause=f"actions hardly vary: their standard deviation is {first:.2g} from the first update "
        "on, so nothing is tried, and every step is a leap of the KL",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{first:.3g} at the start, {series.end(0.1):.3g} at the end",
                first,
                threshold=NONE,
                source="healthy runs begin with 0.1 and more",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "the standard deviation is taken for its logarithm, or the other way round",
                "print both for one state: exp of one is the other",
            ),
        ),
        fix=Fix("Begin with more noise.", (Change("network.log_std", to=0.0),)),
        confidence=0.85,
    )
