"""Targets, value loss and advantages: their scale, their normalization, and who dominates."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Level, Suspect, evidence
from keel.doctor.outcome import course, outcome
from keel.doctor.rule import rule
from keel.doctor.rules.critic import (
    EV,
    LATE_STEPS,
    LEAST,
    LOSS,
    TARGET,
    TARGET_STD,
    has_variance,
    late,
)
from keel.doctor.run_log import RunLog
from keel.doctor.series import breach
from keel.doctor.settings import scaled

EXPLODED = 1e5
"""Value loss that is a fault of scale where nothing is explained: issues of SB3 and RLlib."""
BEYOND_DOUBT = 1e7
"""Value loss that is a fault of scale although the return rises."""
UNEXPLAINED = 0.1
"""Explained variance below which a large value loss is not that of large returns alone."""
GROWN, GROWN_TO = 1e3, 100.0
"""Growth of the value loss, and where it leads, that is an explosion."""
LARGE, HUGE = 100.0, 1000.0
"""Targets beyond which a critic without normalization learns slowly; Jones wants ±10, and CartPole
is learned at 50."""
LITTLE, NOTHING = 0.2, 0.05
"""Explained variance that is little, where nothing is learned, and nothing, where something is."""
DOMINATES = 10.0
"""Gradient norm of a shared trunk that normalized advantages cannot have: the research list's
ratio of critic to actor."""
ACTIVE = 0.5
"""Share of rows at the value clip: research list."""
APART = 10.0
"""Ratio of spreads between agents: research list."""
AGENT_RAW_STD = "train/advantage_raw_std"


@rule(
    "value-loss-exploded",
    "critic",
    needs=(LOSS,),
    source="issues of SB3 and RLlib: value loss of 1e5 and explained variance 0",
    suppresses=(
        "explained-variance-zero",
        "explained-variance-negative",
        "value-targets-large",
        "critic-too-slow",
        "critic-too-fast",
        "critic-stands-still",
        "critic-dominates",
        "returns-flat",
        "returns-collapsed",
        "entropy-stuck",
        "rollouts-tiny",
        "horizon-beyond-discount",
    ),
    number=23,
)
def value_loss_exploded(log: RunLog) -> Finding | None:
    """Find a value loss that only rewards of the wrong scale explain."""
    loss, ev, now = log[LOSS], log.get(EV), outcome(log)
    last, first = loss.end(), max(loss.start(), 1e-12)
    if not np.isfinite(last) or (now is not None and now.rose and last < 10.0 * EXPLODED):
        return None
    explained = None if ev is None else ev.end()
    unexplained = explained is not None and explained < UNEXPLAINED
    grown = len(loss) >= 10 and last > GROWN_TO and last / first > GROWN
    if not (last >= EXPLODED and unexplained) and not (
        grown and (explained is None or explained < LITTLE)
    ):
        return None
    young = log.rows < 5 and log.last_step < LATE_STEPS // 2
    doubt = now is not None and now.rose and last < BEYOND_DOUBT
    level: Level = "watch" if young or doubt else "sick"
    limit = EXPLODED if last >= EXPLODED else GROWN_TO
    tail = "" if explained is None else f" and explains {explained:.2g} of the variance"
    return Finding(
        cause=f"rewards are too large for the critic: its value loss is {last:.3g}, so it misses "
        f"returns by {np.sqrt(2.0 * last):.3g}{tail}",
        level=level,
        evidence=(
            evidence(
                loss,
                f"{last:.3g}, median of the end, from {first:.3g}; √(2 × {last:.3g}) = "
                f"{np.sqrt(2.0 * last):.3g} reward",
                last,
                threshold=limit,
                source="issues of SB3 and RLlib" if last >= EXPLODED else "Keel: 1,000 × its start",
                onset=int(loss.step[int(np.argmax(loss.values >= limit))]),
            ),
            *(() if ev is None else (evidence(ev, f"{ev.end():.2g}", threshold=UNEXPLAINED),)),
            *course(log),
        ),
        others=(
            Suspect(
                "true terminations that are bootstrapped, or γ = 1 without an end",
                "compare the targets with largest reward / (1 − γ): they lie beyond",
            ),
            Suspect(
                "a critic whose learning rate makes it diverge",
                "train with region.critic_learning_rate × 0.1: the loss falls, the targets stay",
            ),
        ),
        fix=Fix(
            "Normalize rewards, or divide them by a constant so that returns are about 1 to 10.",
            (Change("envs.normalize_reward", to=True),),
        ),
        confidence=0.9 if unexplained else 0.7,
    )


@rule(
    "value-targets-large",
    "critic",
    needs=(TARGET, EV),
    source="Jones, Debugging RL; Schulman: rescale rewards",
    rows=8,
    suppresses=("explained-variance-zero", "critic-too-slow", "returns-flat"),
    number=23,
)
def value_targets_large(log: RunLog) -> Finding | None:
    """Find targets that are large where the critic does not follow and nothing is learned."""
    target, deviation, now = log[TARGET], log.get(TARGET_STD), outcome(log)
    explained = log[EV].end()
    if now is None or not explained < LITTLE or not has_variance(log):
        return None
    unexplained = len(log[EV]) >= 2 * LEAST and abs(late(log[EV], 0.5).median()) < NOTHING
    if not now.stagnates and not (unexplained and now.from_start):
        return None
    width = 0.0 if deviation is None else deviation.end()
    size = abs(target.end()) + width
    if not np.isfinite(size) or size < LARGE:
        return None
    return Finding(
        cause=f"value targets are large ({target.end():.3g} ± {width:.3g}) and the critic explains "
        f"{explained:.2g} of them while the return goes from {now.start:.4g} to {now.end:.4g}",
        level="sick" if size >= HUGE and now.stagnates else "watch",
        evidence=(
            evidence(
                target,
                f"|{target.end():.3g}| + {width:.3g} = {size:.3g}",
                size,
                threshold=LARGE,
                source="Jones wants targets within ±10; CartPole is learned at 50",
                onset=int(target.step[0]),
            ),
            evidence(log[EV], f"{explained:.2g} at the end", explained, threshold=LITTLE),
            now.evidence(),
        ),
        others=(
            Suspect(
                "a critic that learns too slowly",
                "train with region.critic_learning_rate × 10: explained variance rises",
            ),
        ),
        fix=Fix(
            "Normalize rewards.",
            (Change("envs.normalize_reward", to=True),),
        ),
        confidence=0.65,
    )


@rule(
    "critic-dominates",
    "critic",
    needs=(LOSS, "train/gradient_norm", "train/gradient_clipped", "setting:network.share"),
    source="Keel: norms of normalized advantages; 37 implementation details of PPO",
    rows=8,
    suppresses=("returns-flat", "entropy-stuck"),
    number=24,
)
def critic_dominates(log: RunLog) -> Finding | None:
    """Find a shared trunk whose gradient is the critic's, clipped until the policy has no say."""
    norm, clipped, now = log["train/gradient_norm"], log["train/gradient_clipped"], outcome(log)
    if not _has_shared_trunk(log) or now is None or not now.stagnates:
        return None
    size, share, loss = norm.median(), clipped.median(), log[LOSS].median()
    weighted = (log.setting("region.value_coef") or 0.5) * loss
    if not np.isfinite(size) or size < DOMINATES or share < 0.9 or weighted < 1.0:
        return None
    bound = log.setting("region.max_grad_norm") or 0.5
    return Finding(
        cause=f"the critic dominates the shared network: the gradient's norm is {size:.3g}, cut to "
        f"{bound:g}, and a surrogate of normalized advantages has a norm of about 1",
        level="watch",
        evidence=(
            evidence(
                norm,
                f"median {size:.3g}; {share:.0%} of the steps are shortened to {bound:g}, by a "
                f"factor of {size / bound:.3g}",
                size,
                threshold=DOMINATES,
                source="Keel: ten times what normalized advantages bring",
                onset=int(norm.step[0]),
            ),
            evidence(log[LOSS], f"weighted {weighted:.3g}", weighted, threshold=1.0),
            now.evidence(),
        ),
        others=(
            Suspect(
                "rewards that are too large",
                "train with envs.normalize_reward: the norm falls with the value loss",
            ),
        ),
        fix=Fix(
            "Lower the critic's weight, or give the critic a network of its own.",
            (
                scaled(log, "region.value_coef", 0.1),
                Change("network.share", to=False),
            ),
        ),
        confidence=0.6,
    )


@rule(
    "value-clip-active",
    "critic",
    needs=("train/value_clip_fraction",),
    source="37 implementation details of PPO; Engstrom et al. 2020",
    number=27,
)
def value_clip_active(log: RunLog) -> Finding | None:
    """Find a critic that its own clip holds back."""
    share, now = log["train/value_clip_fraction"], outcome(log)
    found = breach(share, high=ACTIVE)
    if found is None or not found.lasting or share.end() <= ACTIVE:
        return None
    if now is not None and now.rose:
        return None
    clip = log.setting("region.value_clip")
    width = "its clip" if clip is None else f"a clip of ±{clip:g}"
    return Finding(
        cause=f"{width} holds the critic back: it decides for {share.end():.0%} of the rows",
        level="watch",
        evidence=(
            evidence(
                share,
                f"{share.end():.2f} at the end, above {ACTIVE:g} in {found.count} of {len(share)}",
                share.end(),
                threshold=ACTIVE,
                source="Keel: more than half of the rows lose their gradient",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "rewards that are large for that clip",
                "train with envs.normalize_reward: the share falls below a half",
            ),
        ),
        fix=Fix("Take the value clip away.", (Change("region.value_clip", to=None),)),
        confidence=0.7,
    )


@rule(
    "targets-impossible",
    "critic",
    needs=(TARGET, "rollout/reward_min|rollout/reward_abs_max"),
    source="Jones, Debugging RL: positive rewards cannot give negative returns",
    rows=5,
    suppresses=("explained-variance-negative", "explained-variance-zero", "value-targets-large"),
    number=26,
)
def targets_impossible(log: RunLog) -> Finding | None:
    """Find value targets that no sum of the rewards can give."""
    target, lowest = log[TARGET], log.get("rollout/reward_min")
    low: float | None = None
    high: float | None = None
    if lowest is not None and (lowest.values >= 0.0).all():
        low, bound = -1e-3, "every reward is at least 0"
    else:
        gamma, largest = log.setting("advantage.gamma"), log.get("rollout/reward_abs_max")
        raw = log.settings.get("envs.normalize_reward") is False
        if largest is None or gamma is None or not 0.0 <= gamma < 1.0 or not raw:
            return None
        high = 1.2 * float(largest.values.max()) / (1.0 - gamma)
        low, bound = -high, f"largest reward / (1 − γ) = {high / 1.2:.3g}, and a fifth more"
    found = breach(target, low=low, high=high)
    if found is None:
        return None
    limit = low if found.value < low or high is None else high
    return Finding(
        cause=f"value targets of {found.value:.3g} cannot come from these rewards: {bound}",
        level="sick",
        evidence=(
            evidence(
                target,
                f"{found.value:.3g} in {found.count} of {len(target)} updates; {bound}",
                found.value,
                threshold=limit,
                source="the discounted sum of rewards",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "a sign or an index wrong in the advantage estimator",
                "run it on rewards (1, 1, 1), values 0, γ = 1, λ = 1: targets are 3, 2, 1",
            ),
            Suspect(
                "true terminations that are bootstrapped, so that the critic feeds on itself",
                "keel probe: the environment of one step must have value 1, not 1 / (1 − γ)",
            ),
            Suspect(
                "a critic that diverges and is bootstrapped from",
                "train with λ = 1: targets come back into range",
            ),
        ),
        fix=Fix("Test the advantage estimator on rewards whose returns are known by hand."),
        confidence=0.85,
    )


@rule(
    "agents-unequal",
    "critic",
    needs=(AGENT_RAW_STD,),
    source="research list: pooled normalization of agents with other scales",
    rows=3,
    number=31,
)
def agents_unequal(log: RunLog) -> Finding | None:
    """Find agents of very different scales whose advantages are normalized together."""
    agents = {name: s.end() for name, s in log.agents(AGENT_RAW_STD).items() if len(s)}
    if len(agents) < 2 or log.settings.get("agents.sharing", "all") == "none":
        return None
    high, low = max(agents, key=agents.__getitem__), min(agents, key=agents.__getitem__)
    if not agents[low] > 0.0 or not np.isfinite(agents[high]):
        return None
    ratio = agents[high] / agents[low]
    if ratio <= APART:
        return None
    return Finding(
        cause=f"{high} drowns {low}: its advantages vary {ratio:.3g} times as much, and both are "
        "normalized together",
        level="watch",
        evidence=(
            evidence(
                log[f"{AGENT_RAW_STD}/{high}"],
                f"{agents[high]:.3g} against {agents[low]:.3g} of {low}: {ratio:.3g} times",
                agents[high],
                threshold=APART * agents[low],
                source="research list: a factor of 10 between agents",
            ),
        ),
        others=(
            Suspect(
                f"the reward of {low} is constant",
                f"look at rollout/return_std/{low}: it is near 0",
            ),
        ),
        fix=Fix(
            "Normalize advantages within each agent or group.",
            (Change("advantage.normalize", to="group"),),
        ),
        confidence=0.6,
    )


def _has_shared_trunk(log: RunLog) -> bool:
    """Return whether actor and critic are known to share a network."""
    if log.settings.get("network.share") is not True:
        return False
    env = str(log.settings.get("env", ""))
    pixels = env.startswith("ALE/") or "NoFrameskip" in env
    return log.settings.get("network.kind") in ("cnn", "decoupled") or pixels
