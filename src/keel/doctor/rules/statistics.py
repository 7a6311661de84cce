"""How much data speaks: rollouts, seeds, resets; and what looks odd and is healthy."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import NEEDS_RETURN, course, is_solved, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.critic import EV, LEAST
from keel.doctor.run_log import RunLog
from keel.doctor.settings import scaled

ROWS_WANTED, ROWS_LEAST = 512, 128
"""Rows of a rollout: the research list wants 512, ideally 2,048; below 128 only A2C works."""
ROWS_NOISE = 64
"""Rows that PPO never has in a preset of Keel or SB3's zoo (the least is 256)."""
SEEDS = 5
"""Runs without which two settings cannot be told apart: Agarwal et al. 2021 (rliable)."""
CLUMPED = 0.9
"""Share of updates in which episodes end all at once."""
FIRST_STEPS = 20_000
"""Steps during which a critic may know nothing: ten rollouts of SB3's 2,048."""
FEW_ROWS = 16
"""Rows of a minibatch over which advantages are normalized, as SB3 and CleanRL do."""


@rule(
    "rollouts-tiny",
    "statistics",
    needs=("setting:rollout_steps", "setting:envs.num", NEEDS_RETURN),
    source="research list; 37 implementation details of PPO",
    rows=8,
    number=54,
)
def rollouts_tiny(log: RunLog) -> Finding | None:
    """Find rollouts of so few rows that updates are noise."""
    steps, envs, now = log.setting("rollout_steps"), log.setting("envs.num"), outcome(log)
    if steps is None or envs is None or now is None or log.is_language or is_solved(log):
        return None
    rows, failed = steps * envs, now.stagnates or now.lost > 0.5
    noise = rows < ROWS_NOISE and "train/clip_fraction" in log
    if rows >= ROWS_WANTED or now.is_constant or not (failed or noise):
        return None
    needed = max(1, round(2048 / envs))
    return Finding(
        cause=f"a rollout has {rows:.0f} rows ({envs:.0f} environments × {steps:.0f} steps): "
        "updates are noise" + (", and the return does not rise" if failed else ""),
        level="sick" if rows < ROWS_LEAST and failed else "watch",
        evidence=(
            evidence(
                now.series,
                f"{envs:.0f} × {steps:.0f} = {rows:.0f} rows an update",
                rows,
                threshold=ROWS_LEAST if rows < ROWS_LEAST else ROWS_WANTED,
                source="research list: at least 512, ideally 2,048",
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "steps that are too large for that noise",
                "train with region.learning_rate × 0.1: the return rises slowly",
            ),
        ),
        fix=Fix(
            "Collect 2,048 rows between updates.",
            (Change("rollout_steps", to=needed), Change("region.minibatch", to=256)),
        ),
        confidence=0.75,
    )


@rule(
    "few-seeds",
    "statistics",
    needs=("setting:facts.seeds",),
    source="Agarwal et al. 2021 (rliable); Henderson et al. 2018",
    number=55,
)
def few_seeds(log: RunLog) -> Finding | None:
    """Say that few seeds cannot tell settings apart."""
    seeds, now = log.setting("facts.seeds"), outcome(log)
    if seeds is None or seeds >= SEEDS:
        return None
    count = f"{seeds:.0f} seed{'s' if seeds != 1 else ''}"
    shown = () if now is None else (now.evidence(),)
    return Finding(
        cause=f"{count}: enough to see whether a run is healthy, not to say which of two settings "
        f"is better (that takes {SEEDS} at least)",
        level="usual",
        evidence=shown,
        fix=Fix("Train five seeds of each and compare intervals: keel compare."),
        confidence=0.9,
    )


@rule(
    "resets-synchronized",
    "statistics",
    needs=("rollout/episodes", "setting:envs.num"),
    source="Jones, Debugging RL: mix up the starts of environments",
    rows=10,
    number=48,
)
def resets_synchronized(log: RunLog) -> Finding | None:
    """Find environments that all begin and end together."""
    series, envs, now = log["rollout/episodes"], log.setting("envs.num"), outcome(log)
    if envs is None or envs < 4 or log.is_language or not len(series.finite):
        return None
    whole = np.mod(series.finite, envs) == 0.0
    none = series.finite == 0.0
    if whole.mean() < CLUMPED or not 0.3 < none.mean() < 1.0:
        return None
    stagnates = now is not None and now.stagnates and not now.is_constant
    every = round(1.0 / max(1e-9, 1.0 - float(none.mean())))
    return Finding(
        cause=f"all {envs:.0f} environments end together, every {every} updates: each update sees "
        "one part of an episode only",
        level="watch" if stagnates else "usual",
        evidence=(
            evidence(
                series,
                f"a multiple of {envs:.0f} in {whole.mean():.0%} of the updates, 0 in "
                f"{none.mean():.0%}",
                float(whole.mean()),
                threshold=CLUMPED,
                source="Keel: nine of ten updates",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "another cause of the flat return",
                "give each environment a random number of first steps: the return rises",
            ),
        ),
        fix=Fix(
            "Begin environments at different times, or let a rollout span an episode.",
            (scaled(log, "rollout_steps", 4.0),),
        ),
        confidence=0.4,
    )


@rule(
    "minibatches-tiny",
    "statistics",
    needs=("setting:region.minibatch", NEEDS_RETURN),
    source="issues of SB3: advantages are normalized within each minibatch",
    rows=8,
)
def minibatches_tiny(log: RunLog) -> Finding | None:
    """Find advantages that are normalized over a handful of rows."""
    rows, now = log.setting("region.minibatch"), outcome(log)
    if log.framework not in ("sb3", "cleanrl") or rows is None or rows >= FEW_ROWS:
        return None
    if now is None or not now.stagnates or now.is_constant:
        return None
    return Finding(
        cause=f"advantages are normalized over minibatches of {rows:.0f} rows: results depend on "
        "which rows meet",
        level="watch",
        evidence=(
            evidence(
                now.series,
                f"{rows:.0f} rows; the error of a standard deviation over them is "
                f"{1.0 / np.sqrt(2.0 * max(rows, 2.0)):.0%}",
                rows,
                threshold=FEW_ROWS,
                source="1 / √(2n): above 18 % below 16 rows",
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "steps that are too many for one rollout",
                "train with region.epochs 1: the return rises",
            ),
        ),
        fix=Fix("Take larger minibatches.", (Change("region.minibatch", to=64),)),
        confidence=0.5,
    )


@rule(
    "critic-starts-at-zero",
    "statistics",
    needs=(EV,),
    source="issues that report it as a bug",
)
def critic_starts_at_zero(log: RunLog) -> Finding | None:
    """Say that a critic explains nothing in the first updates."""
    series = log[EV]
    if len(series) >= LEAST or log.last_step >= FIRST_STEPS or not abs(series.last) < 0.3:
        return None
    return Finding(
        cause=f"explained variance is {series.last:.2f} after {log.last_step:,} steps: a new "
        "critic knows nothing yet",
        level="usual",
        evidence=(evidence(series, f"{series.last:.2f} in the newest update"),),
        fix=Fix("Nothing to do."),
        confidence=0.85,
    )


@rule(
    "critic-idle",
    "statistics",
    needs=(EV, NEEDS_RETURN),
    source="registry: below 0, unless returns hardly vary, as in a task that is solved",
)
def critic_idle(log: RunLog) -> Finding | None:
    """Say that nothing is left to explain where the task is solved."""
    series, now = log[EV], outcome(log)
    if now is None or not is_solved(log) or not series.end() < 0.3:
        return None
    return Finding(
        cause=f"explained variance is {series.end():.2f} because nothing is left to explain: "
        f"returns no longer differ ({now.end:.4g}), the task is solved",
        level="usual",
        evidence=(evidence(series, f"{series.end():.2f} at the end"), now.evidence()),
        fix=Fix("Nothing to do."),
        confidence=0.85,
    )
