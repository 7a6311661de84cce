"""Does the policy learn what the return measures? Signs of rewards and advantages."""

from __future__ import annotations

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.outcome import NEEDS_RETURN, outcome
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import trend

SURE = 1e-3


@rule(
    "objective-against-return",
    "reward",
    needs=(NEEDS_RETURN, "train/entropy"),
    source="calibration corpus, writing half: advantages, and rewards, with the wrong sign",
    rows=10,
    suppresses=(
        "returns-flat",
        "groups-uninformative",
        "rewards-sparse",
        "below-baseline",
        "length-collapsed",
    ),
)
def objective_against_return(log: RunLog) -> Finding | None:
    """Find a policy that becomes surer of itself while its return only falls."""
    now, entropy = outcome(log), log["train/entropy"]
    if now is None or not now.from_start or not now.fell or now.ever_rose:
        return None
    course, surer = trend(now.series), trend(entropy)
    falls = course.change < 0.0 and course.p < SURE
    if not falls or not (surer.change < 0.0 and surer.p < SURE):
        return None
    return Finding(
        cause=f"the policy learns to do worse: its return falls from {now.start:.4g} to "
        f"{now.end:.4g} and never rose, while it becomes surer (entropy {entropy.start():.3g} → "
        f"{entropy.end():.3g} nats)",
        level="sick",
        evidence=(
            now.evidence(),
            evidence(entropy, f"falls, p = {surer.p:.1g}", entropy.end()),
        ),
        others=(
            Suspect(
                "the reward that is learned from has another sign than the return",
                "log the mean reward that the advantages are made of beside the return",
            ),
            Suspect(
                "steps that are too large",
                "train with a third of the learning rate: the return stays where it was",
            ),
        ),
        fix=Fix("Check the sign of the advantages and of the reward where the loss reads them."),
        confidence=0.7,
    )
