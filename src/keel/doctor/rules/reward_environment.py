"""The environment: horizon and discount, ends of episodes, scales of observations."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import course, is_solved, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.critic import TARGET
from keel.doctor.run_log import RunLog
from keel.doctor.series import align, breach, breach_where

MYOPIC, MYOPIC_STAGNANT = 0.02, 0.04
"""Reach of the discount over the horizon that is too short: healthy presets have 0.05 (Pendulum,
γ = 0.9, 200 steps) and more; the larger one counts where the return stagnates."""
SEES = "Schulman: γ must see the horizon; healthy presets reach 5 % of it and more"
LONGEST = 5_000.0
"""A time limit beyond this is not what an episode needs: Atari's is 27,000."""
WIDE, HUGE = 10.0, 1_000.0
"""Observations beyond which an MLP saturates (research list: ±10), and beyond any doubt."""
PIXEL = 255.0


@rule(
    "horizon-beyond-discount",
    "reward",
    needs=("setting:advantage.gamma", "setting:facts.horizon|rollout/length_mean"),
    source="Schulman, Nuts and Bolts of Deep RL",
    suppresses=(
        "returns-flat",
        "rewards-sparse",
        "explained-variance-negative",
        "explained-variance-zero",
        "critic-stands-still",
    ),
    number=49,
)
def horizon_beyond_discount(log: RunLog) -> Finding | None:
    """Find a discount that cannot see the end of an episode."""
    gamma, now = log.setting("advantage.gamma"), outcome(log)
    if gamma is None or not 0.0 <= gamma < 1.0 or log.is_language or is_solved(log):
        return None
    horizon, where = _horizon(log)
    if not horizon:
        return None
    reach = 1.0 / (1.0 - gamma)
    stagnates = now is not None and now.stagnates
    limit = MYOPIC_STAGNANT if stagnates else MYOPIC
    if reach >= limit * horizon:
        return None
    needed = max(0.9, round(1.0 - 5.0 / horizon, 4))
    sick = stagnates and reach < MYOPIC * horizon
    name = "advantage.gamma"
    text = f"1 / (1 − {gamma:g}) = {reach:.3g} steps of {horizon:.4g}: {reach / horizon:.1%}"
    lengths = log.get("rollout/length_mean")
    return Finding(
        cause=f"γ = {gamma:g} sees {reach:.3g} steps ahead, and an episode has {horizon:.4g} "
        f"({where}): what comes later does not count",
        level="sick" if sick else "watch",
        evidence=(
            *(
                (evidence(lengths, text, horizon, threshold=reach / limit, source=SEES),)
                if lengths is not None
                else ()
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "rewards that come at once, for which a short horizon is enough",
                f"train with {name} {needed:g}: the return stays the same",
            ),
        ),
        fix=Fix(f"Raise γ ({text}).", (Change(name, to=needed),)),
        confidence=0.85 if sick else 0.55,
    )


def _horizon(log: RunLog) -> tuple[float, str]:
    """Return the length that an episode may have, and where that is known from."""
    limit, lengths = log.setting("facts.horizon"), log.get("rollout/length_mean")
    if limit is not None and 0 < limit <= LONGEST:
        return limit, "its time limit"
    finite = np.zeros(0) if lengths is None else lengths.finite
    return (float(finite.max()), "the longest mean length") if len(finite) else (0.0, "")


@rule(
    "truncations-not-bootstrapped",
    "reward",
    needs=("rollout/bootstrap_error",),
    source="Pardo et al. 2018; Gymnasium",
    suppresses=("explained-variance-negative", "explained-variance-zero", "returns-flat"),
    number=46,
)
def truncations_not_bootstrapped(log: RunLog) -> Finding | None:
    """Find time limits that are learned from as if they were ends."""
    error, truncated = log["rollout/bootstrap_error"], log.get("rollout/truncated_share")
    found = breach(error, high=0.01)
    if found is None or error.end() <= 0.01:
        return None
    share = None if truncated is None else truncated.median()
    if share == 0.0:
        return None
    often = "" if share is None else f"; {share:.0%} of all episodes end so"
    return Finding(
        cause=f"{error.end():.0%} of the truncations are learned from as ends: their targets have "
        f"no value of the state after them{often}",
        level="watch" if share is not None and share < 0.05 else "sick",
        evidence=(
            evidence(
                error,
                f"{error.end():.2f} in {found.count} of {len(error)} updates",
                error.end(),
                threshold=0.01,
                source="0 in a trainer that keeps terminated and truncated apart",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "an environment that reports its time limit as a termination",
                "step one episode to its limit: `truncated` is true there, `terminated` is not",
            ),
        ),
        fix=Fix(
            "Keep `terminated` and `truncated` apart, and bootstrap from the value of the last "
            "observation where an episode was truncated."
        ),
        confidence=0.9,
    )


@rule(
    "terminations-bootstrapped",
    "reward",
    needs=(TARGET, "rollout/return_mean", "rollout/return_std", "rollout/length_mean",
           "setting:advantage.gamma", "setting:envs.normalize_reward"),
    source="Keel: a discounted sum is no larger than the sum",
    rows=5,
    number=46,
)  # fmt: skip
def terminations_bootstrapped(log: RunLog) -> Finding | None:
    """Find targets that go on after the end of the episode."""
    gamma = log.setting("advantage.gamma")
    if gamma is None or gamma >= 1.0 or log.settings["envs.normalize_reward"] is not False:
        return None
    if log.setting("faults.reward_gain", 1.0) != 1.0 or log.is_language:
        return None
    target, returns = align(log[TARGET], log["rollout/return_mean"])
    _, deviation = align(returns, log["rollout/return_std"])
    if not len(target) == len(returns) == len(deviation) or len(target) == 0:
        return None
    reach, length = 1.0 / (1.0 - gamma), log["rollout/length_mean"].median()
    largest = np.abs(returns.values) + deviation.values
    with np.errstate(invalid="ignore"):
        beyond = np.abs(target.values) > 1.5 * largest
    found = breach_where(target, beyond, lasting=0.5)
    if found is None or not found.lasting or found.share < 0.5 or not length < 0.5 * reach:
        return None
    at = int(np.flatnonzero(beyond)[-1])
    return Finding(
        cause=f"ends of episodes are bootstrapped: targets are {found.value:.3g} where whole "
        f"episodes return {returns.values[at]:.3g} ± {deviation.values[at]:.3g}",
        level="sick",
        evidence=(
            evidence(
                target,
                f"{found.value:.3g} in {found.count} of {len(target)} updates, more than 1.5 × "
                f"{largest[at]:.3g}; episodes have {length:.3g} steps, γ reaches {reach:.3g}",
                found.value,
                threshold=1.5 * float(largest[at]),
                source="a discounted sum of rewards of one sign is no larger than their sum",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "rewards scaled after the return was measured",
                "divide the largest raw reward by the largest one that is learned from: it is 1",
            ),
            Suspect(
                "gains and losses that cancel within an episode",
                "look at the return from the middle of an episode on",
            ),
        ),
        fix=Fix("Take no value of the next state where `terminated` is true."),
        confidence=0.7,
    )


@rule(
    "autoreset-rows",
    "reward",
    needs=("rollout/return_mean", "rollout/length_mean", "rollout/reward_mean"),
    source="Gymnasium: NEXT_STEP autoreset",
    rows=5,
    number=47,
)
def autoreset_rows(log: RunLog) -> Finding | None:
    """Find rows of zero reward after every end, where every true step earns the same."""
    returns, lengths = align(log["rollout/return_mean"], log["rollout/length_mean"])
    returns, reward = align(returns, log["rollout/reward_mean"])
    lengths, _ = align(lengths, reward)
    if len(returns) < 5 or len(returns) != len(lengths) or not np.isfinite(returns.values).all():
        return None
    if not (lengths.values > 1.0).all() or not np.isfinite(reward.values).all():
        return None
    # the row may be counted as a step of the episode, or stand between two of them
    for steps in (lengths.values, lengths.values - 1.0):
        per_step = returns.values / steps
        usual = float(np.median(per_step))
        is_step = steps is lengths.values or usual > 0.0  # Acrobot's last step earns 0 by right
        if is_step and usual != 0.0 and np.abs(per_step / usual - 1.0).max() <= 1e-6:
            break
    else:
        return None
    lacking = (1.0 - reward.values / usual) * (steps + 1.0)  # 1 where there is such a row
    typical = float(np.median(lacking))
    if not 0.5 < typical < 2.0 or (lacking <= 0.0).mean() > 0.2:
        return None
    return Finding(
        cause="rows that are no steps are learned from: every step earns "
        f"{usual:g}, the mean reward is {reward.end():.4g}, which one empty row after each episode "
        f"of {lengths.end():.3g} steps explains",
        level="sick",
        evidence=(
            evidence(
                reward,
                f"{reward.end():.4g} where {usual:g} × {lengths.end():.3g} / "
                f"({lengths.end():.3g} + 1) = {usual * lengths.end() / (lengths.end() + 1):.4g}",
                reward.end(),
                threshold=usual,
                source="return / length is the reward of every step",
                onset=int(reward.step[0]),
            ),
        ),
        others=(
            Suspect(
                "a last step that earns nothing",
                "print the rewards of one episode: the last one is 0",
            ),
        ),
        fix=Fix("Give rows of an automatic reset weight 0, or use SAME_STEP autoreset."),
        confidence=0.7,
    )


@rule(
    "observations-unscaled",
    "reward",
    needs=("rollout/obs_abs_max",),
    source="RLDebugger; research list: beyond ±10",
    number=44,
)
def observations_unscaled(log: RunLog) -> Finding | None:
    """Find observations that an MLP cannot read, where nothing is learned."""
    series, now = log["rollout/obs_abs_max"], outcome(log)
    size = series.median()
    if log.settings.get("envs.normalize_obs") is True or size == PIXEL or size <= WIDE:
        return None
    if now is None or is_solved(log) or not (now.stagnates or size > HUGE):
        return None
    what = "and the return does not rise" if now.stagnates else "which slows learning down"
    return Finding(
        cause=f"observations reach {size:.3g} and are not normalized, {what}",
        level="sick" if size > HUGE and now.stagnates else "watch",
        evidence=(
            evidence(
                series,
                f"median {size:.3g}",
                size,
                threshold=WIDE,
                source="research list: ±10",
                onset=int(series.step[0]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "a sensor that gives sentinels such as 1e6",
                "print the largest value of each dimension",
            ),
        ),
        fix=Fix("Normalize observations.", (Change("envs.normalize_obs", to=True),)),
        confidence=0.7,
    )


@rule(
    "observations-dead",
    "reward",
    needs=("rollout/obs_dead_dims",),
    source="RLDebugger; research list: a dimension with a standard deviation below 1e-3",
    number=44,
)
def observations_dead(log: RunLog) -> Finding | None:
    """Find dimensions of the observation that never change."""
    series = log["rollout/obs_dead_dims"]
    if not len(series.finite) or not (series.values > 0.0).all():
        return None
    share = float(series.finite.min())
    return Finding(
        cause=f"{share:.0%} of the dimensions of an observation never change",
        level="watch",
        evidence=(
            evidence(
                series,
                f"at least {share:.3g} in all {len(series)} updates",
                share,
                threshold=0.0,
                source="RLDebugger: standard deviation below 1e-3",
                onset=int(series.step[0]),
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "padding, or a part of the world that this policy has not met",
                "keel probe ENV: under random actions that dimension varies",
            ),
        ),
        fix=Fix("Find the dimension by its standard deviation; repair its sensor or drop it."),
        confidence=0.6,
    )
