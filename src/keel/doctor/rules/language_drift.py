"""Drift of a language model: from its reference, and in the length of what it writes."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import SUCCESS, course, is_solved, outcome, outcome_of
from keel.doctor.rule import rule
from keel.doctor.rules.language import LENGTH
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach, trend
from keel.doctor.settings import pull_to_reference
from keel.tracking.metrics import REGISTRY

SEQUENCE, TOKEN = "kl/reference_sequence", "train/kl_reference"
TRL_SEQUENCE = "objective/kl"
"""Label under which TRL's PPO sums the KL over a sequence."""
FAR_TOKEN = 1.0
"""Nats a token from the reference that no healthy log had; GRPO runs are below 0.3."""
RUINOUS = 5.0
"""Times the bound from which on a drift is sick where the reward does not rise."""
LONGER, SHORTER = 2.0, 0.4


@rule(
    "reference-kl-high",
    "language",
    needs=(f"{SEQUENCE}|{TOKEN}",),
    source="TRL: objective/kl between 0 and 10 nats a sequence",
    suppresses=("length-grows",),
    number=56,
)
def reference_kl_high(log: RunLog) -> Finding | None:
    """Find a policy that has left its reference, while its reward does not rise."""
    series, bound, unit = _reference(log)
    now, far = outcome(log), series.end()
    found = breach(series, high=bound)
    if found is None or not found.lasting or not far > bound:
        return None
    rose = now is not None and now.rose
    if rose and far < RUINOUS * bound:
        return None
    sick = now is not None and now.stagnates and far > RUINOUS * bound
    return Finding(
        cause=f"the policy drifts from its reference: {far:.3g} nats a {unit}, and the reward "
        + ("rises" if rose else "does not rise"),
        level="sick" if sick else "watch",
        evidence=(
            evidence(
                series,
                f"{far:.3g} nats a {unit} at the end, above {bound:g} in {found.count} of "
                f"{len(series)} updates",
                far,
                threshold=bound,
                source=REGISTRY[SEQUENCE].healthy_note
                if unit == "sequence"
                else "Keel: GRPO runs stay below 0.3 nats a token",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "decoding settings (temperature, top-p) that the reference does not have",
                "score one batch by both before the first step: the KL must be 0",
            ),
            Suspect(
                "a penalty that is not forwarded, or has the wrong sign",
                "train with kl.coef × 100: the KL must fall",
            ),
            Suspect(
                "steps that are too large",
                "train with region.learning_rate × 0.3: the KL grows more slowly",
            ),
        ),
        fix=Fix(
            "Pull harder towards the reference.",
            pull_to_reference(log),
        ),
        confidence=0.7 if sick else 0.5,
    )


def _reference(log: RunLog) -> tuple[Series, float, str]:
    """Return the KL to the reference, its bound and its unit."""
    if SEQUENCE in log:
        return log[SEQUENCE], (REGISTRY[SEQUENCE].healthy or (0.0, 10.0))[1] or 10.0, "sequence"
    series = log[TOKEN]
    if series.label.endswith(TRL_SEQUENCE):
        return series, 10.0, "sequence"
    return series, FAR_TOKEN, "token"


@rule(
    "length-grows",
    "language",
    needs=(LENGTH, "rollout/return_mean"),
    source="Dr. GRPO (Liu et al. 2025): a length bias of the loss",
    rows=10,
)
def length_grows(log: RunLog) -> Finding | None:
    """Find completions that grow while the reward does not."""
    series, now = log[LENGTH], outcome(log)
    if not log.is_language or now is None or not now.stagnates or is_solved(log):
        return None
    first, last, found = series.start(0.1), series.end(0.1), trend(series)
    if not (last > LONGER * first and last - first >= 8.0):
        return None
    if not (found.change > 0.0 and found.p < 0.01):
        return None
    return Finding(
        cause=f"completions grow from {first:.4g} to {last:.4g} tokens and earn no more by it",
        level="watch",
        evidence=(
            evidence(
                series,
                f"{last / first:.2g} times as long (p = {found.p:.1g})",
                last,
                threshold=LONGER * first,
                source="Keel: twice its start",
                onset=int(series.step[int(np.argmax(series.values > LONGER * first))]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "a loss that is averaged within each completion, which spares long wrong ones",
                "train with region.reduction token-mean: lengths stay",
            ),
            Suspect(
                "text that repeats itself",
                "read the three longest completions",
            ),
        ),
        fix=Fix(
            "Average the loss over tokens, and let length cost near the limit.",
            (Change("region.reduction", to="token-mean"),),
        ),
        confidence=0.55,
    )


@rule(
    "length-collapsed",
    "language",
    needs=(LENGTH, "rollout/return_mean"),
    source="issues of TRL and verl: completions of one token",
    rows=10,
)
def length_collapsed(log: RunLog) -> Finding | None:
    """Find completions that shrink to nothing, with what the task itself measures."""
    series, now = log[LENGTH], outcome(log)
    if not log.is_language or now is None or is_solved(log):
        return None
    first, last = series.start(0.1), series.end(0.1)
    if not last < SHORTER * first:
        return None
    judges = [outcome_of(log[name], 0.02) for name in SUCCESS if name in log]
    worse = any(j is not None and j.fell for j in judges)
    if not (worse or now.fell or now.lost > 0.5):
        return None
    return Finding(
        cause=f"completions collapse from {first:.4g} to {last:.4g} tokens, and the score falls "
        "with them",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{first:.4g} at the start, {last:.4g} at the end",
                last,
                threshold=SHORTER * first,
                source="Keel: less than 40 % of its start",
                onset=int(series.step[int(np.argmax(series.values < SHORTER * first))]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "a penalty on length that outweighs the score",
                "train without it: lengths stay",
            ),
            Suspect(
                "a KL penalty summed over tokens, which makes long completions cost more",
                "train with kl.place loss: lengths stay",
            ),
        ),
        fix=Fix(
            "Take length out of the reward, and the KL into the loss.",
            (Change("reward.soft_length", to=0), Change("kl.place", to="loss")),
        ),
        confidence=0.7,
    )
