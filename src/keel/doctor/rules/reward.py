"""The reward as a signal: is there one, is it cut, and does one part drown the others?"""

from __future__ import annotations

import math
import re

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import NEEDS_RETURN, course, is_solved, outcome, outcome_of
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach

RETURN, STD, LENGTH = "rollout/return_mean", "rollout/return_std", "rollout/length_mean"
DROWNS_FAR = 30.0
"""Times a smaller reward function that leaves it no say within a group."""
ZEROS, CLIPPED = "rollout/reward_zero_share", "rollout/reward_clipped_share"
COMPONENTS = ("rollout/reward/", "env/reward_")
SPARSE = 0.9
"""Share of rewards that are 0 from which on a reward is sparse: research list."""
CUT = 0.05
"""Share of rewards at a clip bound that is saturation: research list."""
CUT_MOST = 0.3
DROWNS = 0.7
"""Share of one component in Σ|component|: research list."""
NOTHING = 1e-6
"""Standard deviation of advantages that is rounding of float32."""
ROWS = 10
COSTS = re.compile("ctrl|control|cost|penalty|contact|length")


@rule(
    "rewards-constant",
    "reward",
    needs=(RETURN,),
    source="issues of TRL: a reward that reads a missing column",
    rows=ROWS,
    suppresses=("advantages-vanish", "groups-uninformative", "returns-flat", "rewards-sparse"),
    number=39,
)
def rewards_constant(log: RunLog) -> Finding | None:
    """Find a reward that is the same whatever is done."""
    now = outcome(log)
    if now is None or not now.is_constant or is_solved(log):
        return None
    value, deviation, lengths = now.end, log.get(STD), log.get(LENGTH)
    if deviation is not None and (np.abs(deviation.values) > NOTHING * max(1.0, abs(value))).any():
        return None
    varied = lengths is not None and len(np.unique(lengths.values)) > 1
    computed = lengths is not None and not _is_round(value / max(lengths.end(), 1.0))
    survives = value > 0.0 and now.from_start  # from its first episodes on
    if not log.is_language and (not (varied or computed or survives) or value == 0.0):
        return None  # nothing was reached yet: `rewards-sparse` says so
    unit = "completion" if log.is_language else "episode"
    sure = deviation is not None and not (log.is_language and value > 0.0)
    return Finding(
        cause=f"the reward is constant: every {unit} of {len(now.series)} updates got exactly "
        f"{value:g}, so nothing can be learned from it",
        level="sick" if sure else "watch",
        evidence=(
            evidence(
                now.series,
                f"{value:g} in all {len(now.series)} rows"
                + ("" if deviation is None else ", with a standard deviation of 0"),
                value,
                threshold=0.0,
                source="rewards that do not differ have no advantage",
                onset=int(now.series.step[0]),
            ),
        ),
        others=(
            Suspect(
                "a reward that reads a column or key that is not there",
                "call it by hand on a right and a wrong answer: the two must differ",
            ),
            Suspect(
                "a task beyond the model: nothing it writes is ever right",
                "sample 64 completions of one easy prompt and score them",
            ),
            Suspect(
                "a parser that accepts nothing, or everything",
                "give it a perfect answer: the reward must be the largest",
            ),
        ),
        fix=Fix("Call the reward by hand on answers whose score you know, then repair it."),
        confidence=0.9 if sure else 0.6,
    )


def _is_round(reward: float) -> bool:
    """Return whether a reward of every step is a number that somebody chose, such as −1 or 0.05.

    Any other was computed, from something that never changes.
    """
    return math.isclose(reward, float(f"{reward:.2g}"), rel_tol=1e-6, abs_tol=NOTHING)


@rule(
    "rewards-sparse",
    "reward",
    needs=(f"{RETURN}|{ZEROS}",),
    source="research list; Ng et al. 1999 (potential-based shaping)",
    rows=ROWS,
    suppresses=("returns-flat", "advantages-vanish"),
    number=38,
)
def rewards_sparse(log: RunLog) -> Finding | None:
    """Find a reward that no episode, or almost no step, ever reaches."""
    now, zeros = outcome(log), log.get(ZEROS)
    if log.is_language or is_solved(log) or (now is not None and now.rose):
        return None
    never = now is not None and now.is_constant and now.series.name == RETURN
    often = zeros is not None and zeros.median() > SPARSE and now is not None and now.stagnates
    if not never and not often:
        return None
    series, limit = now.series if never and now is not None else log[ZEROS], SPARSE
    cause = f"{series.median():.1%} of all rewards are 0, and the return does not rise"
    text = f"median {series.median():.3f}"
    if never:
        cause = f"every episode so far returned exactly {series.last:g}: none reached a reward"
        text, limit = f"{series.last:g} in all {len(series)} rows", series.last
    return Finding(
        cause=f"the reward is sparse: {cause}",
        level="watch",
        evidence=(
            evidence(
                series,
                text,
                threshold=limit,
                source="research list: above 90 % zeros" if not never else "no return differs",
                onset=int(series.step[0]),
            ),
            *(course(log) if not never else ()),
        ),
        others=(
            Suspect(
                "a reward that is always the same by mistake",
                "keel probe ENV: a random policy meets at least two different rewards",
            ),
            Suspect(
                "too little exploration to reach it",
                "train with explore.entropy_coef × 3 and twice the environments",
            ),
        ),
        fix=Fix(
            "Shape the reward by a potential, explore more, or begin from demonstrations.",
            (Change("explore.entropy_coef", to=0.01), Change("envs.num", times=2.0)),
        ),
        confidence=0.6,
    )


@rule(
    "advantages-vanish",
    "reward",
    needs=("train/advantage_raw_std",),
    source="research list; GRPO's division by the standard deviation",
    rows=5,
    suppresses=("returns-flat",),
    number=30,
)
def advantages_vanish(log: RunLog) -> Finding | None:
    """Find advantages that are all the same."""
    series = log["train/advantage_raw_std"]
    found = breach(series, high=None, low=NOTHING)
    now = outcome(log)
    if found is None or not found.lasting or is_solved(log) or (now is not None and now.rose):
        return None
    return Finding(
        cause="advantages do not differ: their standard deviation is "
        f"{series.end():.2g} in {found.count} of {len(series)} updates, so there is no gradient",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{series.end():.2g} at the end",
                series.end(),
                threshold=NOTHING,
                source="rounding of float32",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect("a constant reward", "look at the smallest and largest reward of a rollout"),
            Suspect(
                "groups in which every completion scores the same",
                "look at rollout/informative: it is 0",
            ),
        ),
        fix=Fix("Find out why rewards do not differ; more steps do not help."),
        confidence=0.7,
    )


@rule(
    "rewards-clipped",
    "reward",
    needs=(f"{CLIPPED}|setting:envs.clip_reward",),
    source="research list; van Hasselt et al. 2016",
    suppresses=("returns-flat",),
    number=40,
)
def rewards_clipped(log: RunLog) -> Finding | None:
    """Find rewards that are cut, so that good and better look the same."""
    now, bound = outcome(log), log.setting("envs.clip_reward")
    if now is not None and now.rose:
        return None
    share, mean = log.get(CLIPPED), log.get("rollout/reward_mean")
    where = "" if bound is None else f" at ±{bound:g}"
    if share is not None:
        found = breach(share, high=CUT)
        if found is None or not found.lasting or _is_atari(log):
            return None
        series, value, limit = share, share.end(), CUT
        what, source = f"{value:.0%} of the rewards are cut{where}", "research list: above 5 %"
    elif bound and mean is not None and log.settings.get("envs.normalize_reward") is False:
        series, value, limit = mean, abs(mean.median()), bound
        if value <= bound:
            return None
        what = f"rewards are cut{where}, and their mean is {mean.median():.3g}"
        source = "the setting envs.clip_reward"
    else:
        return None
    stagnates = now is not None and now.stagnates
    heavy = share is None or value > CUT_MOST
    return Finding(
        cause=f"{what}: beyond that bound good and better look the same",
        level="sick" if stagnates and heavy else "watch",
        evidence=(
            evidence(series, f"{value:.3g}", value, threshold=limit, source=source),
            *course(log),
        ),
        others=(
            Suspect(
                "rewards of another unit than the bound was made for",
                "keel probe ENV shows their range",
            ),
        ),
        fix=Fix(
            "Normalize rewards in place of cutting them.",
            (Change("envs.clip_reward", to=None), Change("envs.normalize_reward", to=True)),
        ),
        confidence=0.8 if heavy else 0.6,
    )


@rule(
    "component-dominates",
    "reward",
    needs=(NEEDS_RETURN,),
    source="research list: one component above 70 % of |reward|",
    rows=5,
    number=41,
)
def component_dominates(log: RunLog) -> Finding | None:
    """Find one part of the reward that drowns the others."""
    now, shares = outcome(log), log.get("rollout/reward_share_max")
    falling = _falling_component(log) if now is not None and now.rose else None
    if shares is not None and now is not None and now.stagnates and shares.end() > DROWNS:
        series, value = shares, shares.end()
        what = f"one component makes {value:.0%} of the reward, and the return does not rise"
        text, limit, source = f"{value:.2f}", DROWNS, "research list: above 0.7"
    elif falling is not None and (shares is None or shares.end() > DROWNS):
        series, value, limit = falling, falling.end(0.1), falling.start(0.1)
        name = _component(falling.name)
        what = f"{name} falls from {limit:.3g} to {value:.3g} while the whole reward rises"
        text, source = f"{limit:.3g} at the start, {value:.3g} at the end", "its own start"
    elif (drowned := _drowned_function(log)) is not None:
        largest, series = drowned
        value, limit = series.end(0.1), abs(largest.end(0.1))
        what = f"{_component(largest.name)} is {limit:.3g}, {_component(series.name)} is "
        what += f"{value:.3g} and does not rise"
        text, source = f"{value:.3g} beside {limit:.3g}", f"{DROWNS_FAR:g} × as large"
    else:
        return None
    return Finding(
        cause=f"a part of the reward drowns the others: {what}",
        level="watch",
        evidence=(
            evidence(series, text, value, threshold=limit, source=source),
            *course(log),
        ),
        others=(
            Suspect(
                "the parts contradict each other",
                "train with the largest part alone, and with the others alone",
            ),
        ),
        fix=Fix("Scale the parts to about the same size, the one that matters above the others."),
        confidence=0.6,
    )


@rule(
    "component-dead",
    "reward",
    needs=(NEEDS_RETURN,),
    source="research list: a term that is 0 for whole runs",
    rows=ROWS,
    number=45,
)
def component_dead(log: RunLog) -> Finding | None:
    """Find a part of the reward that never did anything."""
    components = _components(log)
    dead = [s for s in components if len(s) >= ROWS and (s.values == 0.0).all()]
    if len(components) < 2 or not dead or len(dead) == len(components):
        return None
    names = ", ".join(sorted(_component(series.name) for series in dead))
    return Finding(
        cause=f"a part of the reward is dead: {names} was exactly 0 in all {len(dead[0])} updates",
        level="watch",
        evidence=(
            evidence(
                dead[0],
                f"0 in all {len(dead[0])} rows",
                0.0,
                threshold=0.0,
                source="a part that never differs teaches nothing",
                onset=int(dead[0].step[0]),
            ),
        ),
        others=(
            Suspect(
                "it rewards what the policy has never done",
                "call it by hand on what it should reward: it must not be 0",
            ),
            Suspect(
                "it reads a column, key or state that is not there",
                "print what it is called with",
            ),
        ),
        fix=Fix("Call that part by hand on what it should reward, then repair or drop it."),
        confidence=0.75,
    )


def _components(log: RunLog) -> list[Series]:
    return [series for name, series in log.series.items() if name.startswith(COMPONENTS)]


def _component(name: str) -> str:
    return next(name.removeprefix(p) for p in COMPONENTS if name.startswith(p))


def _falling_component(log: RunLog) -> Series | None:
    """Return a component that falls for good; costs are meant to, while something is gained."""
    components = _components(log)
    for series in components if len(components) > 1 else []:
        floor = 0.2 * abs(series.start(0.1))
        one = outcome_of(series, floor)
        if one is not None and one.fell and not COSTS.search(series.name):
            return series
    return None


def _drowned_function(log: RunLog) -> tuple[Series, Series] | None:
    """Return the largest reward function and one that is far smaller and does not rise."""
    parts = sorted(_components(log), key=lambda series: abs(series.end(0.1)))
    if not log.is_language or len(parts) < 2:
        return None
    small, large = parts[0], parts[-1]
    one = outcome_of(small, 0.05)
    if one is None or one.rose or abs(large.end(0.1)) < DROWNS_FAR * abs(small.end(0.1)):
        return None
    return large, small


def _is_atari(log: RunLog) -> bool:
    """Return whether signs of rewards are what is meant to be learned from."""
    env = str(log.settings.get("env", ""))
    return env.startswith("ALE/") or "NoFrameskip" in env
