"""Is the policy that sampled the one that is trained? Ratios before a step, masks, weights."""

from __future__ import annotations

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import breach
from keel.tracking.metrics import REGISTRY

GATE = "train/gate_log_ratio"


@rule(
    "replay-differs",
    "consistency",
    needs=(GATE,),
    source="37 implementation details of PPO; Keel's gate",
    suppresses=("kl-over-bound", "clip-fraction-high"),
    number=1,
)
def replay_differs(log: RunLog) -> Finding | None:
    """Find a policy that does not give the log-probs with which it sampled, before any step."""
    gate = log[GATE]
    high = (REGISTRY[GATE].healthy or (None, None))[1]
    found = breach(gate, high=high)
    if found is None or high is None:
        return None
    return Finding(
        cause="the policy that is trained is not the one that sampled: before the first step, "
        f"log-probs differ by up to {found.value:.3g}",
        level="sick",
        evidence=(
            evidence(
                gate,
                f"max |log ratio| {found.value:.3g} before the first step; "
                f"float32 explains {high:g}",
                found.value,
                threshold=high,
                source=REGISTRY[GATE].healthy_note,
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "another action mask in sampling than in training",
                "store the mask with the observation and replay: the gate becomes 0",
            ),
            Suspect(
                "temperature, ε-greedy or dropout outside of the log-prob",
                "sample one rollout without it: the gate becomes 0",
            ),
            Suspect(
                "observations normalized with other statistics in training",
                "freeze the statistics for one rollout and its update: the gate becomes 0",
            ),
        ),
        fix=Fix("Store what sampling used (observation, mask, statistics, log-prob), replay that."),
        confidence=0.95,
    )
