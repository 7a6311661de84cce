"""Entropy: does the policy still try, and does it ever settle?"""

from __future__ import annotations

import math

import numpy as np

from keel.doctor.finding import Change, Evidence, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import Outcome, is_solved, outcome, outcome_of, progress
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach
from keel.doctor.settings import scaled

ENTROPY, ENTROPY_MAX = "train/entropy", "train/entropy_max"
COEF = "train/entropy_coef"
NEEDS_MAX = f"{ENTROPY_MAX}|setting:facts.actions"
UNIFORM = 0.99
"""Entropy over log K of a policy that has no preference: research list."""
BUDGET = 0.1
"""Share of the budget after which a policy has one: research list."""
COLLAPSED = 0.1
"""Entropy over log K of a policy that has stopped trying: research list, after Jones."""
DEAD, EARLY = 0.1, 0.2
"""Share of that which is dead whatever the return does, if it comes in the first fifth of a log:
healthy runs that settle do so later and at 5 % of log K."""
LANGUAGE_LOW = 0.1
"""Nats a token below which a language model has stopped trying: verl's notes on clip-higher."""
LARGE_COEF = 0.05
"""Entropy coefficient that is large with normalized advantages: SB3's zoo goes to 0.01, RLlib's
examples to 0.05."""
SWING = 0.2
"""Share of log K that an oscillation goes up and down."""
TURNS = 6


def entropy_ceiling(log: RunLog) -> float | None:
    """Return the largest possible entropy, log K of K discrete actions; None where unknown."""
    actions = log.setting("facts.actions")
    if actions is not None:
        return math.log(actions) if actions >= 2 else None
    if ENTROPY_MAX in log and not log.is_language and not is_continuous(log):
        highest = float(np.median(log[ENTROPY_MAX].values))
        return highest if highest > 0.0 else None
    return None


def is_continuous(log: RunLog) -> bool:
    """Return whether actions are known to be continuous."""
    if "train/action_std" in log or log.setting("facts.actions") == 0.0:
        return True
    values = log[ENTROPY].finite if ENTROPY in log else np.zeros(0)
    return bool(len(values)) and bool((values < -1e-3).any())


@rule(
    "entropy-stuck",
    "exploration",
    needs=(ENTROPY, NEEDS_MAX),
    source="Jones, Debugging RL",
    rows=10,
    suppresses=("returns-flat", "action-share-high"),
    number=33,
)
def entropy_stuck(log: RunLog) -> Finding | None:
    """Find a policy that stays uniform while its return stays where it was."""
    series, highest, now = log[ENTROPY], entropy_ceiling(log), outcome(log)
    if highest is None or now is None or not now.stagnates or now.is_constant:
        return None
    done = progress(log)
    if done is not None and done < BUDGET:
        return None
    share = Series(series.name, series.label, series.step, series.values / highest)
    found = breach(share, high=UNIFORM)
    if found is None or not found.lasting or share.end(0.5) <= UNIFORM:
        return None
    coef = log[COEF].end() if COEF in log else log.setting("explore.entropy_coef")
    drowned = coef is not None and coef >= LARGE_COEF
    cause = f"the policy stays uniform: its entropy is {share.end():.1%} of log K = {highest:.3f}"
    why = f", held there by an entropy bonus of {coef:g}" if drowned else ""
    return Finding(
        cause=f"{cause} after {log.last_step:,} steps{why}",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{series.end():.4g} nats of {highest:.4g}, above {UNIFORM:.0%} in {found.count} "
                f"of {len(series)} updates",
                series.end(),
                threshold=UNIFORM * highest,
                source="Jones, Debugging RL: entropy falls as soon as something is learned",
                onset=found.onset,
            ),
            now.evidence(),
        ),
        others=_stuck_suspects(drowned),
        fix=_stuck_fix(log, drowned),
        confidence=0.9 if drowned else 0.6,
    )


def _stuck_suspects(drowned: bool) -> tuple[Suspect, ...]:
    bonus = Suspect(
        "an entropy bonus that outweighs the advantages",
        "train with explore.entropy_coef 0: entropy falls",
    )
    return (
        *(() if drowned else (bonus,)),
        Suspect(
            "steps that are too small",
            "train with region.learning_rate × 10: the KL of an update becomes visible",
        ),
        Suspect(
            "gradients that do not reach the policy",
            "compare its parameters before and after one update: they must differ",
        ),
        Suspect(
            "actions without effect, or a reward that does not depend on them",
            "keel probe ENV: it tries each action from the same state",
        ),
    )


def _stuck_fix(log: RunLog, drowned: bool) -> Fix:
    if drowned:
        return Fix("Lower the entropy bonus.", (Change("explore.entropy_coef", to=0.01),))
    return Fix(
        "Raise the learning rate, and look whether parameters move at all.",
        (scaled(log, "region.learning_rate", 10.0),),
    )


@rule(
    "entropy-collapsed",
    "exploration",
    needs=(ENTROPY,),
    source="Jones, Debugging RL; verl's notes on entropy",
    rows=5,
    suppresses=("action-share-high", "returns-flat", "returns-collapsed", "groups-uninformative"),
    number=34,
)
def entropy_collapsed(log: RunLog) -> Finding | None:
    """Find a policy that became deterministic before it had learned anything."""
    series, now = log[ENTROPY], outcome(log)
    floor = _collapse_floor(log)
    if floor is None or now is None or is_solved(log) or now.is_constant or not now.from_start:
        return None
    found, lost = breach(series, low=floor), now.lost > 0.5
    if found is None or not found.lasting or series.end() >= floor:
        return None
    if not (now.stagnates or lost or _dead_from_start(series, floor, now)):
        return None
    reason = f"and was {now.best:.4g} at its best" if lost else "and has not risen since"
    certain = "train/explained_variance" in log and log["train/explained_variance"].end() > 0.95
    return Finding(
        cause=f"the policy collapsed before it had learned: its entropy is {series.end():.2g} nats "
        f"since step {found.onset:,}, while the return is {now.end:.4g}, {reason}",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{series.end():.2g} nats at the end, below {floor:.2g} in {found.count} of "
                f"{len(series)} updates",
                series.end(),
                threshold=floor,
                source="verl: 0.1 nats a token" if log.is_language else "Jones: a tenth of log K",
                onset=found.onset,
            ),
            now.evidence(),
            *(_certainty(log) if certain else ()),
        ),
        others=(
            Suspect(
                "steps that are too large",
                "look at the largest KL of an update before the fall; train with "
                "region.learning_rate × 0.1: entropy falls slowly",
            ),
            Suspect(
                "rewards whose scale drowns the entropy bonus",
                "train with envs.normalize_reward: entropy falls slowly",
            ),
            Suspect(
                "an entropy bonus that is not differentiated, or has the wrong sign",
                "train with explore.entropy_coef × 10: entropy must stay higher",
            ),
        ),
        fix=Fix(
            "Lower the learning rate and give an entropy bonus.",
            (
                scaled(log, "region.learning_rate", 0.1),
                Change("region.entropy_coef", to=0.01)
                if log.is_language
                else Change("explore.entropy_coef", to=0.01),
            ),
        ),
        confidence=0.8,
    )


def _dead_from_start(series: Series, floor: float, now: Outcome) -> bool:
    """Return whether a policy died in the first updates and its return never rose after that."""
    dead = np.flatnonzero(series.values < DEAD * floor)
    if len(dead) == 0 or dead[0] > EARLY * len(series) or not series.end() < DEAD * floor:
        return False
    returns = now.series
    later = int(dead[0] + max(2, round(EARLY * len(series))))  # a mean over 100 episodes lags
    rest = returns.step >= series.step[min(later, len(series) - 1)]
    after = outcome_of(Series(returns.name, "", returns.step[rest], returns.values[rest]))
    return after is not None and after.is_known and after.end - after.start <= now.tolerance


def _certainty(log: RunLog) -> tuple[Evidence, ...]:
    """Return the sign that is mistaken for success: the critic predicts a dead policy well."""
    ev = log["train/explained_variance"]
    return (
        evidence(
            ev,
            f"{ev.end():.3f}: with the entropy at 0 that is collapse, not success",
            ev.end(),
            threshold=0.95,
            source="Jones, Debugging RL",
        ),
    )


def _collapse_floor(log: RunLog) -> float | None:
    if log.is_language:
        return LANGUAGE_LOW
    highest = entropy_ceiling(log)
    return None if highest is None else COLLAPSED * highest


@rule(
    "entropy-oscillates",
    "exploration",
    needs=(ENTROPY, NEEDS_MAX),
    source="Jones, Debugging RL",
    rows=2 * TURNS,
    number=35,
)
def entropy_oscillates(log: RunLog) -> Finding | None:
    """Find an entropy that goes up and down by itself."""
    series, highest, now = log[ENTROPY], entropy_ceiling(log), outcome(log)
    pulses = log.get("train/temp_is_pulsing")
    if pulses is not None and (pulses.values > 0.0).any():
        return None
    if highest is None or now is None or not now.stagnates:
        return None
    turns = _turns(series.finite, SWING * highest)
    if turns < TURNS or turns < len(series) / 20:
        return None
    return Finding(
        cause=f"entropy swings up and down {turns} times by more than {SWING:.0%} of log K: steps "
        "are too large to settle",
        level="watch",
        evidence=(
            evidence(
                series,
                f"{turns} turns of more than {SWING * highest:.2g} nats in {len(series)} updates",
                float(turns),
                threshold=TURNS,
                source="Jones, Debugging RL: entropy falls smoothly",
                onset=int(series.step[0]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "rollouts that are too small",
                "double rollout_steps: swings become smaller at the same learning rate",
            ),
        ),
        fix=Fix("Lower the learning rate.", (scaled(log, "region.learning_rate", 0.3),)),
        confidence=0.55,
    )


def _turns(values: np.ndarray, size: float) -> int:
    """Return how often a series turns by at least `size`."""
    if len(values) == 0:
        return 0
    turns, direction, extreme = 0, 0, float(values[0])
    for value in values.tolist():
        if direction >= 0 and value < extreme - size:
            turns, direction, extreme = turns + 1, -1, value
        elif direction <= 0 and value > extreme + size:
            turns, direction, extreme = turns + 1, 1, value
        elif (direction >= 0 and value > extreme) or (direction < 0 and value < extreme):
            extreme = value
    return turns
