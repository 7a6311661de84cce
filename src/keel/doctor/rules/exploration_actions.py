"""Actions: which are taken, how widely they vary, and what is meant to keep them varied."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import NEEDS_RETURN, course, is_solved, outcome, progress
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach
from keel.doctor.settings import scaled
from keel.tracking.metrics import REGISTRY

SHARE = "rollout/action_share_max"
STD = "train/action_std"
SKEWED = 0.8
"""Share of one of at least three actions that is skewed: research list."""
VARIATION = 0.8
"""Coefficient of variation between shares that is an alarm: research list (0.3 is a warning)."""
SHARES = "env/share_"
STD_LARGE, STD_GROWN = 3.0, 3.0
"""Standard deviation of actions, and its growth, that no healthy run had; bounds are mostly ±1."""
STD_SMALL, STD_SHRUNK = 0.05, 0.1
PULSES_DUE = 4
"""Intervals after which a pulse is overdue."""


@rule(
    "action-share-high",
    "exploration",
    needs=(SHARE,),
    source="registry; research list",
    number=36,
)
def action_share_high(log: RunLog) -> Finding | None:
    """Find a policy that takes one action, and earns no more by it."""
    series, now = log[SHARE], outcome(log)
    few = (log.setting("facts.actions") or 3) < 3
    always = (REGISTRY[SHARE].healthy or (None, 0.99))[1] or 0.99
    limit = always if few else SKEWED
    found = breach(series, high=limit)
    if found is None or not found.lasting or series.end() <= limit or is_solved(log):
        return None
    if now is not None and now.rose:
        return None
    known = now is not None and now.stagnates and not now.is_constant
    if not known and series.end() <= always:
        return None
    return Finding(
        cause=f"one action takes {series.end():.1%} of all steps, and the return does not rise",
        level="sick" if known and series.end() > always and len(series) >= 8 else "watch",
        evidence=(
            evidence(
                series,
                f"{series.end():.3f} at the end, above {limit:g} in {found.count} of "
                f"{len(series)} updates",
                series.end(),
                threshold=limit,
                source=REGISTRY[SHARE].healthy_note if limit == always else "research list",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "that action is the best one",
                "keel probe ENV: the baseline that always takes one action earns less",
            ),
            Suspect(
                "a mask that leaves one action",
                "count the legal actions of a rollout: more than one in most states",
            ),
            Suspect(
                "a reward that favours it, whatever follows",
                "look at the mean reward of each action",
            ),
        ),
        fix=Fix(
            "Give an entropy bonus, and look at the reward of each action.",
            (Change("explore.entropy_coef", to=0.01),),
        ),
        confidence=0.6,
    )


@rule(
    "actions-unused",
    "exploration",
    needs=(NEEDS_RETURN,),
    source="research list: legal actions that are never chosen",
    rows=5,
    number=37,
)
def actions_unused(log: RunLog) -> Finding | None:
    """Find kinds of actions that are never chosen any more, by the shares that a game measures."""
    shares = {k.removeprefix(SHARES): s for k, s in log.series.items() if k.startswith(SHARES)}
    if len(shares) < 2:
        return None
    ends = {name: series.end() for name, series in shares.items()}
    total = sum(ends.values())
    if not 0.9 < total < 1.1:
        return None
    unused = [name for name, end in ends.items() if end < 1e-3]
    first = max(ends, key=ends.__getitem__)
    variation = float(np.std(list(ends.values())) / np.mean(list(ends.values())))
    now = outcome(log)
    if variation < VARIATION or not unused or (now is not None and now.rose):
        return None
    return Finding(
        cause=f"{', '.join(sorted(unused))} is never chosen: {first} has {ends[first]:.0%}",
        level="watch",
        evidence=(
            evidence(
                shares[first],
                f"{ends[first]:.2f}; coefficient of variation between {len(ends)} shares "
                f"{variation:.2f}",
                ends[first],
                threshold=VARIATION,
                source="research list: above 0.8",
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a mask that forbids it",
                "count how often each kind is legal in one rollout",
            ),
            Suspect(
                f"a reward that is dominated by {first}",
                "look at the mean return after each kind of action",
            ),
        ),
        fix=Fix("Compare the return after each kind of action; rebalance the reward."),
        confidence=0.5,
    )


@rule(
    "action-std-exploded",
    "exploration",
    needs=(STD,),
    source="issues of SB3 and rsl_rl: std grows without bound",
    suppresses=("entropy-grows", "returns-flat", "returns-collapsed", "entropy-leaps"),
    number=57,
)
def action_std_exploded(log: RunLog) -> Finding | None:
    """Find a Gaussian whose standard deviation grows without bound."""
    series, now = log[STD], outcome(log)
    first, last = series.start(0.1), series.end(0.1)
    grown = len(series) >= 8 and last > STD_GROWN * first
    alone = len(series) < 8 and last > STD_LARGE * STD_GROWN
    if not (last > STD_LARGE and (grown or alone)):
        return None
    if now is not None and now.rose and last < 10.0 * STD_LARGE:
        return None
    coef = log["train/entropy_coef"].end() if "train/entropy_coef" in log else None
    coef = log.setting("explore.entropy_coef") if coef is None else coef
    bonus = f", pushed by an entropy bonus of {coef:g}" if coef else ""
    return Finding(
        cause=f"the standard deviation of actions grows without bound, from {first:.3g} to "
        f"{last:.3g}{bonus}: actions are noise, cut at their bounds",
        level="sick" if now is None or not now.rose else "watch",
        evidence=(
            evidence(
                series,
                f"{first:.3g} at the start, {last:.3g} at the end",
                last,
                threshold=max(STD_LARGE, STD_GROWN * first) if grown else STD_LARGE * STD_GROWN,
                source="Keel: three times its start, and three times the usual bounds of ±1",
                onset=int(series.step[int(np.argmax(series.values > STD_LARGE))]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "clipped actions: beyond the bounds a larger spread costs nothing",
                "train with network.squash: the spread stays",
            ),
            Suspect(
                "advantages without signal, which leave only the bonus",
                "train with explore.entropy_coef 0: the spread stays",
            ),
        ),
        fix=Fix(
            "Take the entropy bonus away, and start with a smaller spread.",
            (Change("explore.entropy_coef", to=0.0), Change("network.log_std", to=-0.5)),
        ),
        confidence=0.85,
    )


@rule(
    "action-std-vanished",
    "exploration",
    needs=(STD,),
    source="research list: vanishing std",
    rows=8,
    suppresses=("returns-flat", "entropy-collapsed"),
    number=34,
)
def action_std_vanished(log: RunLog) -> Finding | None:
    """Find a Gaussian that has stopped trying before the return rose."""
    series, now = log[STD], outcome(log)
    first, last = series.start(0.1), series.end(0.1)
    if now is None or not (now.stagnates or now.lost > 0.5):
        return None
    if not (last < STD_SMALL and last < STD_SHRUNK * first):
        return None
    return Finding(
        cause=f"actions hardly vary any more: their standard deviation fell from {first:.3g} to "
        f"{last:.3g} before the return rose",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{first:.3g} at the start, {last:.3g} at the end",
                last,
                threshold=STD_SMALL,
                source="Keel: healthy runs end above 0.1",
                onset=int(series.step[int(np.argmax(series.values < STD_SMALL))]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "steps that are too large",
                "train with region.learning_rate × 0.1: the spread falls slowly",
            ),
        ),
        fix=Fix(
            "Lower the learning rate and give an entropy bonus.",
            (
                scaled(log, "region.learning_rate", 0.3),
                Change("explore.entropy_coef", to=0.003),
            ),
        ),
        confidence=0.75,
    )


@rule(
    "pulses-dead",
    "exploration",
    needs=("train/temp_is_pulsing", "setting:explore.pulses"),
    source="registry: never 1 in a stagnant run means a dead controller",
    rows=10,
    number=51,
)
def pulses_dead(log: RunLog) -> Finding | None:
    """Find temperature pulses that are switched on and never come."""
    pulsing, now = log["train/temp_is_pulsing"], outcome(log)
    if log.settings["explore.pulses"] is not True or (pulsing.values > 0.0).any():
        return None
    interval = log.setting("explore.pulse_interval")
    due = PULSES_DUE * (8.0 if interval is None else interval)
    stagnates = now is not None and now.stagnates
    # an interval beyond the end of a run that is over is a pulse that never comes
    never = interval is not None and interval > len(pulsing) and (progress(log) or 0.0) >= 0.9
    if not never and len(pulsing) < due and not (stagnates and len(pulsing) >= 20):
        return None
    memory = log.setting("explore.stagnation_memory") or 5.0
    return Finding(
        cause=f"temperature pulses are on and none came in {len(pulsing)} updates: their "
        "thresholds are never met",
        level="sick" if stagnates else "watch",
        evidence=(
            evidence(
                pulsing,
                f"0 in all {len(pulsing)} updates; one was due after "
                f"{due / PULSES_DUE:g}, or after {memory:g} without progress",
                0.0,
                threshold=1.0,
                source="registry: 1 from time to time",
                onset=int(pulsing.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a stagnation threshold below the noise of the return",
                "print the relative change of the return: it stays above the threshold",
            ),
        ),
        fix=Fix(
            "Raise the stagnation threshold, and let pulses come on an interval.",
            (
                scaled(log, "explore.stagnation_threshold", 10.0),
                Change("explore.pulse_interval", to=8),
            ),
        ),
        confidence=0.85,
    )


@rule(
    "action-without-effect",
    "exploration",
    needs=("rollout/action_effect",),
    source="research list: counterfactual return of actions",
    suppresses=("entropy-stuck", "returns-flat", "explained-variance-zero", "action-share-high"),
    number=42,
)
def action_without_effect(log: RunLog) -> Finding | None:
    """Find actions of which none changes anything."""
    series = log["rollout/action_effect"]
    if not (np.abs(series.values) < 1e-9).all():
        return None
    return Finding(
        cause="the action changes nothing: from the same state every action leads to the same "
        "reward and the same next state",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{series.last:g} in all {len(series)} measurements",
                threshold=1e-9,
                source="keel probe: counterfactual from the same state",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a wrapper that drops or overwrites the action",
                "step the bare environment with two actions from one seed: states differ",
            ),
        ),
        fix=Fix("Follow one action from the policy into the environment; a wrapper loses it."),
        confidence=0.9,
    )


@rule(
    "entropy-below-floor",
    "exploration",
    needs=("train/entropy", "setting:explore.entropy_floor"),
    source="research list: entropy below its floor",
    rows=8,
    number=34,
)
def entropy_below_floor(log: RunLog) -> Finding | None:
    """Find an entropy that the penalty for a low one does not hold."""
    floor = log.setting("explore.entropy_floor")
    series: Series = log["train/entropy"]
    done = progress(log)
    if floor is None or not series.end() < 0.5 * floor or (done is not None and done < 0.1):
        return None
    found = breach(series, low=0.5 * floor)
    if found is None or not found.lasting:
        return None
    return Finding(
        cause=f"entropy is {series.end():.2g} nats, below half of its floor of {floor:g}: the "
        "penalty does not hold it",
        level="watch",
        evidence=(
            evidence(
                series,
                f"{series.end():.2g} at the end",
                series.end(),
                threshold=floor,
                source="the setting explore.entropy_floor",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a penalty without a gradient (`.item()`, a clamp at 0)",
                "differentiate the penalty alone: its gradient must not be 0",
            ),
        ),
        fix=Fix(
            "Give an entropy bonus beside the floor.", (Change("explore.entropy_coef", to=0.01),)
        ),
        confidence=0.6,
    )
