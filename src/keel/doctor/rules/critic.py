"""Critic and its explained variance: does it predict the return, and in time?"""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import course, is_solved, outcome, progress
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align, breach, breach_where
from keel.doctor.settings import scaled

EV, LOSS = "train/explained_variance", "train/value_loss"
VALUE, TARGET, TARGET_STD = "train/value_mean", "train/target_mean", "train/target_std"
LEAST = 8
"""Updates that a critic gets before it is judged: in Keel's healthy runs on LunarLander and Acrobot
explained variance is near 0 for the first 6 updates."""
EARLY = 0.1
"""Share of the run during which a critic may be wrong."""
NEGATIVE = -0.1
"""Explained variance below which a critic is worse than a constant by more than noise."""
MISLEADING = -0.5
"""Explained variance that is sick without more evidence: predictions add half of the variance."""
NOTHING = 0.15
"""Explained variance that a critic of a healthy run is above in its second half (calibration on
CartPole, LunarLander, Acrobot, HalfCheetah, Pendulum, MountainCar: at least 0.5)."""
VARIES = 0.05
"""Spread of the targets over their mean below which there is no variance to explain: CartPole at
500 has 0.0001."""
VARIES_LEAST = 1e-3
"""The same of √(2 × value loss / (1 − explained variance)) over the return, where targets are not
logged; lower, because the units may differ (normalized rewards)."""
BEHIND = 0.3
"""Share of the targets' mean that a critic which keeps up has reached after the first updates."""
LATE_STEPS = 50_000
"""Steps after which a single row says that a critic had time to learn."""
SWING = 1.0
"""Change of explained variance between updates that no healthy run had (at most 0.4)."""
EXACTLY = 1e-6
"""Explained variance that is 0 up to rounding."""
DEAD_UNITS = 0.5
"""Share of units that are 0 on every row: RLDebugger."""
STEADY = 0.25
"""Change between updates over the size of explained variance below which values stand still."""


def has_variance(log: RunLog) -> bool:
    """Return whether there is anything for a critic to explain, as far as the log says."""
    if is_solved(log):
        return False
    now = outcome(log)
    if now is not None and now.is_constant:
        return False
    if TARGET in log and TARGET_STD in log:
        return log[TARGET_STD].end() > VARIES * abs(log[TARGET].end())
    if now is None or EV not in log or LOSS not in log:
        return True
    explained, loss = log[EV].end(), log[LOSS].end()
    if not (np.isfinite(explained) and np.isfinite(loss) and explained < 1.0 and loss >= 0.0):
        return True
    return float(np.sqrt(2.0 * loss / (1.0 - explained))) > VARIES_LEAST * abs(now.end)


def late(series: Series, share: float = EARLY) -> Series:
    """Return a series without its first share of values."""
    begin = round(share * len(series))
    return Series(series.name, series.label, series.step[begin:], series.values[begin:])


@rule(
    "explained-variance-negative",
    "critic",
    needs=(EV,),
    source="Schulman, Nuts and Bolts of Deep RL; registry",
    suppresses=("explained-variance-zero",),
    number=21,
)
def explained_variance_negative(log: RunLog) -> Finding | None:
    """Find a critic that is worse than a constant."""
    series = late(log[EV])
    now = outcome(log)
    if not has_variance(log) or len(series) == 0:
        return None
    typical, found = series.end(), breach(series, low=NEGATIVE)
    if found is None or not found.lasting or typical >= NEGATIVE:
        return None
    stagnates = now is not None and now.stagnates
    if len(series) < LEAST and (log.last_step < LATE_STEPS or typical > MISLEADING):
        return None
    if not stagnates and typical > MISLEADING:
        return None
    steady = _stands_still(log[EV], typical)
    factor, word = (10.0, "Raise") if steady else (0.3, "Lower")
    return Finding(
        cause=f"the critic misleads: its explained variance is {typical:.2f}, so its values are "
        f"{1.0 - typical:.1f} times as far from the returns (in variance) as a constant would be"
        + (", from update to update the same: it hardly learns" if steady else ""),
        level="sick" if stagnates and typical <= MISLEADING else "watch",
        evidence=(
            evidence(
                series,
                f"{typical:.3g}, median of the end; below {NEGATIVE:g} in {found.count} of "
                f"{len(series)} updates",
                typical,
                threshold=NEGATIVE,
                source="registry: below 0 for long the critic misleads; 0.1 is left to noise",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                f"a learning rate of the critic that is too {'high' if steady else 'low'}",
                f"train with region.critic_learning_rate × {0.1 if steady else 10:g}: explained "
                "variance rises above 0",
            ),
            Suspect(
                "values and returns of different rows or units (order of agents, normalization)",
                "log the correlation of V and R of one rollout by hand; the value of a shuffled "
                "R is as good where the rows are mixed",
            ),
        ),
        fix=Fix(
            f"{word} the critic's learning rate, and normalize rewards.",
            (
                scaled(log, "region.critic_learning_rate", factor, "region.learning_rate"),
                Change("envs.normalize_reward", to=True),
            ),
        ),
        confidence=0.7 if stagnates else 0.5,
    )


@rule(
    "explained-variance-zero",
    "critic",
    needs=(EV,),
    source="Schulman, Nuts and Bolts of Deep RL; Keel's calibration",
    rows=2 * LEAST,
    number=21,
)
def explained_variance_zero(log: RunLog) -> Finding | None:
    """Find a critic that explains nothing, long after it could."""
    series, now = late(log[EV], 0.5), outcome(log)
    if not has_variance(log) or len(series) < LEAST:
        return None
    top = float(np.quantile(series.finite, 0.9)) if len(series.finite) else 1.0
    typical = series.median()
    if top > NOTHING or typical <= NEGATIVE:
        return None
    if (progress(log) or 1.0) < 2.0 * EARLY and log.last_step < LATE_STEPS:
        return None
    if now is not None and now.rose:
        return None  # it will: short runs on Acrobot and CartPole begin so
    stagnates = now is not None and now.stagnates
    return Finding(
        cause=f"the critic explains nothing: its explained variance is {typical:.2g} in the whole "
        f"second half of the log ({len(series)} updates), so advantages are as noisy as returns",
        level="sick" if stagnates else "watch",
        evidence=(
            evidence(
                series,
                f"median {typical:.2g}, 9 of 10 updates below {max(top, 0.0):.2g}; healthy runs "
                f"are above {NOTHING:g} by then",
                typical,
                threshold=NOTHING,
                source="Keel: calibrated on six environments",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a critic that learns too slowly",
                "train with region.critic_learning_rate × 10: explained variance rises",
            ),
            Suspect(
                "rewards that do not depend on what the critic sees",
                "keel probe ENV names rewards that are constant, and observations without scale",
            ),
            Suspect(
                "returns too large for the network",
                "train with envs.normalize_reward: explained variance rises",
            ),
        ),
        fix=Fix(
            "Give the critic a higher learning rate, or more epochs.",
            (scaled(log, "region.critic_learning_rate", 10.0, "region.learning_rate"),),
        ),
        confidence=0.6,
    )


@rule(
    "critic-too-slow",
    "critic",
    needs=(EV, VALUE, TARGET, TARGET_STD),
    source="Jones, Debugging RL: values that do not follow their targets",
    rows=2 * LEAST,
    suppresses=("explained-variance-zero", "explained-variance-negative", "returns-flat"),
    number=25,
)
def critic_too_slow(log: RunLog) -> Finding | None:
    """Find a critic whose values stay where they began while the targets are elsewhere."""
    value, target = align(log[VALUE], log[TARGET])
    _, deviation = align(log[VALUE], log[TARGET_STD])
    if not len(value) == len(target) == len(deviation) or len(value) < 2 * LEAST:
        return None
    with np.errstate(invalid="ignore"):
        away = np.abs(target.values) > 0.5 * deviation.values
        behind = away & (np.abs(value.values) < BEHIND * np.abs(target.values))
    behind[: round(EARLY * len(behind))] = False
    found, ev, now = breach_where(value, behind), log[EV].end(), outcome(log)
    if found is None or not ev < NOTHING:
        return None
    at = int(np.flatnonzero(behind)[-1])
    stagnates = now is not None and now.stagnates
    return Finding(
        cause=f"the critic learns too slowly: its mean value is {value.values[at]:.3g} where its "
        f"targets are {target.values[at]:.3g}, in {found.count} of {len(value)} updates, and it "
        f"explains {ev:.2g} of their variance",
        level="sick" if stagnates else "watch",
        evidence=(
            evidence(
                value,
                f"{value.values[at]:.3g} against a target of {target.values[at]:.3g} ± "
                f"{deviation.values[at]:.3g}: less than {BEHIND:g} of the way",
                float(value.values[at]),
                threshold=BEHIND * float(target.values[at]),
                source="Keel: healthy critics are past it after a tenth of the run",
                onset=found.onset,
            ),
            evidence(log[EV], f"{ev:.2g} at the end", ev, threshold=NOTHING),
            *course(log),
        ),
        others=(
            Suspect(
                "returns too large for the network to reach",
                "train with envs.normalize_reward: the mean value reaches the targets",
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
        confidence=0.75,
    )


@rule(
    "critic-too-fast",
    "critic",
    needs=(EV, LOSS),
    source="Keel: critics with 100 × the learning rate",
    rows=2 * LEAST,
    suppresses=("explained-variance-zero", "explained-variance-negative"),
    number=21,
)
def critic_too_fast(log: RunLog) -> Finding | None:
    """Find a critic that gives one value to every state, or is thrown about by every update."""
    series, now = late(log[EV]), outcome(log)
    if not has_variance(log) or len(series.finite) < LEAST:
        return None
    dead = float(np.mean(np.abs(series.finite) <= EXACTLY))
    swing = float(np.median(np.abs(np.diff(series.finite))))
    lowest = float(np.quantile(series.finite, 0.1))
    if dead > 0.5 and _follows(log):
        what = f"explained variance is exactly 0 in {dead:.0%} of the updates, with values that "
        cause = what + "follow the mean of the targets: it gives one value to every state"
        value, limit = dead, 0.5
    elif swing >= SWING and lowest <= -SWING and not (now is not None and now.rose):
        cause = f"explained variance changes by {swing:.2g} between updates, down to {lowest:.2g}"
        value, limit = swing, SWING
    else:
        return None
    return Finding(
        cause=f"the critic's steps are too large: {cause}",
        level="sick" if now is not None and now.stagnates else "watch",
        evidence=(
            evidence(
                series,
                f"0 in {dead:.0%} of {len(series)} updates, median change {swing:.2g}, one in ten "
                f"below {lowest:.2g}",
                value,
                threshold=limit,
                source="Keel: healthy critics are never exactly 0 and change by less than 0.4",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "rollouts so small that each has returns of its own",
                "double rollout_steps: the changes halve, at the same learning rate",
            ),
            Suspect(
                "observations so large that every unit saturates",
                "train with envs.normalize_obs: explained variance leaves 0",
            ),
        ),
        fix=Fix(
            "Lower the critic's learning rate.",
            (scaled(log, "region.critic_learning_rate", 0.03, "region.learning_rate"),),
        ),
        confidence=0.65,
    )


def _follows(log: RunLog) -> bool:
    """Return whether the mean value is within a standard deviation of the targets' mean."""
    if not all(name in log for name in (VALUE, TARGET, TARGET_STD)):
        return False
    return abs(log[VALUE].end() - log[TARGET].end()) < log[TARGET_STD].end()


def _stands_still(series: Series, typical: float) -> bool:
    """Return whether explained variance stays where it is, as of values that do not move."""
    values = late(series, 0.5).finite
    if len(values) < LEAST:
        return False
    return float(np.median(np.abs(np.diff(values)))) < STEADY * abs(typical)


@rule(
    "units-dead",
    "critic",
    needs=("train/dead_units",),
    source="RLDebugger (arXiv 2410.04322): more than half of the units",
    suppresses=(
        "explained-variance-zero",
        "critic-too-fast",
        "critic-too-slow",
        "critic-stands-still",
        "returns-flat",
        "steps-too-small",
        "entropy-stuck",
    ),
    number=53,
)
def units_dead(log: RunLog) -> Finding | None:
    """Find networks of which most units never answer."""
    series, now = log["train/dead_units"], outcome(log)
    found = breach(series, high=DEAD_UNITS)
    if found is None or not found.lasting or not series.end() > DEAD_UNITS:
        return None
    if now is not None and now.rose:
        return None
    return Finding(
        cause=f"{series.end():.0%} of the hidden units are dead: they are 0 on every row",
        level="sick" if now is not None and now.stagnates else "watch",
        evidence=(
            evidence(
                series,
                f"{series.end():.2f} at the end, above {DEAD_UNITS:g} in {found.count} of "
                f"{len(series)} updates",
                series.end(),
                threshold=DEAD_UNITS,
                source="RLDebugger: more than half",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "observations that are all negative or huge",
                "train with envs.normalize_obs: fewer units are dead in the first update",
            ),
        ),
        fix=Fix(
            "Lower the learning rate, or take tanh.",
            (scaled(log, "region.learning_rate", 0.3), Change("network.activation", to="tanh")),
        ),
        confidence=0.7,
    )
