"""Sums and counts that do not add up: the loss and its parts, walk-backs, groups, advantages."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import onset_of, paired, percent, share_of, where
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align, breach_where, spread

LEAST, LEAST_ROWS = 3, 10
SOME, MANY = 0.01, 0.35
"""Clip fractions from which the spread of the ratios can be told."""
BEYOND, UNSTEADY = 15.0, 0.6
"""Times the KL that a clip fraction implies, and the spread of its logarithm: a sum over a
minibatch is so many times too large all the time, samples with a huge ratio come and go: 0.35 and
0.96 in the writing half."""
OFF = 0.1
"""Share of the sum of its parts' sizes by which a loss may differ from the sum of its parts."""
SUMMED = 0.05
"""A KL of a token, in nats, that would clip: 0.05 nats are a root mean square of |log r| of 0.3."""
FEW_CLIPPED = 0.05
MEAN_OFF, STD_OFF = 0.1, 0.2
"""Of normalized advantages, which have mean 0 and deviation 1 (research notes, N1)."""


@rule(
    "loss-parts-differ",
    "thermometer",
    needs=(
        "train/loss",
        "train/policy_loss",
        "train/value_loss",
        "train/entropy",
        "setting:region.value_coef",
        "setting:explore.entropy_coef",
    ),
    source="PPO (Schulman et al. 2017), eq. 9: L = L_clip + c₁ L_V − c₂ H",
    rows=5,
)
def loss_parts_differ(log: RunLog) -> Finding | None:
    """Find a loss that is not the sum of its parts, and the part that explains it."""
    extra = ("train/bc_loss", "train/kl_coef", "train/line_search_success")
    if log.framework not in ("keel", "csv") or any(_moves(log, name) for name in extra):
        return None  # SB3 logs the loss of the last minibatch, and the others are means
    if log.settings.get("explore.entropy_floor") is not None:
        return None
    loss, policy = paired(log, "train/loss", "train/policy_loss")
    loss, value = align(loss, log["train/value_loss"])
    loss, entropy = align(loss, log["train/entropy"])
    policy, value = align(policy, loss)[0], align(value, loss)[0]
    if len(loss) < 5:
        return None
    coefficient = log.get("train/entropy_coef")
    bonus = coefficient.median() if coefficient else log.setting("explore.entropy_coef", 0.0)
    valued = (log.setting("region.value_coef") or 0.0) * value.values
    bonused = (bonus or 0.0) * entropy.values
    residual = loss.values - (policy.values + valued - bonused)
    scale = np.abs(policy.values) + np.abs(valued) + np.abs(bonused)
    outside = np.abs(residual) > OFF * scale + 1e-4
    if share_of(outside) < 0.8:
        return None
    ratio = {
        "the entropy bonus has the wrong sign: entropy is pushed down": (2.0 * bonused),
        "the value loss is not in it": -valued,
        "the value loss is counted twice, or its ½ is missing": valued,
        "the entropy bonus is not in it": bonused,
    }
    close = {k: float(np.median(np.abs(residual - v))) for k, v in ratio.items()}
    best = min(close, key=lambda k: close[k])
    explained = close[best] < 0.2 * float(np.median(np.abs(residual)))
    why = best if explained else "a part of it is not logged"
    at = int(np.flatnonzero(outside)[-1])
    parts = policy.values[at] + valued[at] - bonused[at]
    return Finding(
        cause=f"{loss.label} is not the sum of its parts: {loss.values[at]:.4g} against "
        f"{parts:.4g}; {why}",
        level="watch",
        evidence=(
            evidence(
                loss,
                f"{policy.values[at]:.3g} + {valued[at]:.3g} − {bonused[at]:.3g} = {parts:.4g}, "
                f"logged {loss.values[at]:.4g}, in {percent(share_of(outside))} of the updates",
                float(residual[at]),
                threshold=OFF * float(scale[at]),
                source="policy loss + value_coef × value loss − entropy_coef × entropy",
                onset=onset_of(loss, outside),
            ),
        ),
        others=(
            Suspect(
                "the loss is that of the last minibatch, its parts are means",
                "average the loss over the minibatches as its parts: they agree",
            ),
        ),
        fix=Fix("Add the parts with the signs of the loss that is differentiated."),
        confidence=0.7 if explained else 0.5,
    )


@rule(
    "kl-summed-over-tokens",
    "thermometer",
    needs=("train/approx_kl|train/kl_k1", "train/clip_fraction", "rollout/length_mean"),
    source="verl, TRL issues: k1 of a sequence reported as that of a token",
)
def kl_summed_over_tokens(log: RunLog) -> Finding | None:
    """Find a KL of whole completions that stands where the KL of a token is meant."""
    name = "train/approx_kl" if "train/approx_kl" in log else "train/kl_k1"
    kl, clip = paired(log, name, "train/clip_fraction")
    kl, length = align(kl, log["rollout/length_mean"])
    clip, _ = align(clip, kl)
    if not log.is_language or not len(kl) or float(np.median(length.values)) < 2:
        return None
    per_token = kl.values / np.maximum(length.values, 1.0)
    large = (kl.values > 10 * SUMMED) & (clip.values < FEW_CLIPPED) & (per_token < SUMMED)
    steady = spread(kl.values) < 0.5 * float(np.median(kl.values)) if len(kl) >= 5 else True
    if share_of(large) < 0.5 or not steady:
        return None
    at = int(np.flatnonzero(large)[-1])
    return Finding(
        cause=f"{kl.label} is a sum over completions, not a mean over tokens: {kl.values[at]:.3g} "
        f"nats a token would clip most ratios, and {percent(clip.values[at])} are clipped; divided "
        f"by {length.values[at]:.4g} tokens it is {per_token[at]:.3g}",
        level="watch",
        evidence=(
            evidence(
                kl,
                f"{kl.values[at]:.3g} with a clip fraction of {clip.values[at]:.3g}; / "
                f"{length.values[at]:.4g} tokens = {per_token[at]:.3g}",
                float(kl.values[at]),
                threshold=10 * SUMMED,
                source="0.5 nats a token are a root mean square of |log r| of about 1",
                onset=onset_of(kl, large),
            ),
        ),
        others=(
            Suspect(
                "few tokens have a huge ratio",
                "log the largest |log ratio|: above 5 it is those, and the KL jumps from step to "
                "step",
            ),
        ),
        fix=Fix("Divide by the number of tokens of the mask, or name the metric per sequence."),
        confidence=0.6 if len(kl) >= 5 else 0.45,
        suppresses=("kl-over-target", "learning-rate-too-high", "k3-explodes", "kl-spikes"),
    )


@rule(
    "walk-backs-miscounted",
    "thermometer",
    needs=("train/alpha", "train/rollbacks"),
    source="Keel: rollbacks counts the updates with α < 1",
    rows=LEAST,
)
def walk_backs_miscounted(log: RunLog) -> Finding | None:
    """Find updates that were walked back and are not counted."""
    alpha, count = paired(log, "train/alpha", "train/rollbacks")
    if len(alpha) < 2:
        return None
    grown = np.diff(count.values)
    outside = np.concatenate([[False], (alpha.values[1:] < 1.0) & (grown == 0.0)])
    if outside.sum() < LEAST:
        return None
    return Finding(
        cause=f"walk-backs are not counted: {int(outside.sum())} updates kept less than their "
        f"whole step, and {count.label} did not grow",
        level="watch",
        evidence=(
            evidence(
                alpha,
                f"α = {float(alpha.values[outside][-1]):.3g} beside an unchanged count of "
                f"{float(count.values[outside][-1]):g}, in {int(outside.sum())} updates",
                float(alpha.values[outside][-1]),
                threshold=1.0,
                source="an update with α < 1 is a walk-back",
                onset=onset_of(alpha, outside),
            ),
        ),
        fix=Fix("Do not compare numbers of walk-backs of this run; count α < 1 instead."),
        confidence=0.8,
    )


@rule(
    "informative-contradicts-std",
    "thermometer",
    needs=("rollout/informative", "rollout/reward_std_group"),
    source="TRL: frac_reward_zero_std and reward_std are of the same groups",
)
def informative_contradicts_std(log: RunLog) -> Finding | None:
    """Find groups that are said to differ, with a standard deviation within groups of 0."""
    informative, std = paired(log, "rollout/informative", "rollout/reward_std_group")
    outside = (informative.values > 0.01) & (std.values == 0.0)
    outside |= (informative.values == 0.0) & (std.values > 1e-3)
    found = breach_where(std, outside)
    if found is None:
        return None
    at = int(np.flatnonzero(outside)[-1])
    return Finding(
        cause=f"{informative.label} and {std.label} contradict each other: "
        f"{percent(informative.values[at])} of the groups have scores that differ, and the "
        f"standard deviation within groups is {std.values[at]:.3g}; one is of other rewards, or of "
        "other groups",
        level="watch",
        evidence=(
            evidence(
                std,
                f"{std.values[at]:.3g} beside a share of {informative.values[at]:.3g}, in "
                f"{found.count} of {len(std)} updates",
                float(std.values[at]),
                threshold=0.0,
                source="a group whose scores differ has a standard deviation above 0",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "one of them is taken per device or per micro-batch",
                "gather all rewards of a group before the reduction",
            ),
        ),
        fix=Fix("Compute both from the rewards of whole groups, after gathering them."),
        confidence=0.8,
        suppresses=("groups-uninformative",),
    )


@rule(
    "advantages-not-normalized",
    "thermometer",
    needs=("train/advantage_mean", "train/advantage_std", "setting:advantage.normalize"),
    source="37 implementation details of PPO; research notes, N1: a mask that is not applied",
    number=29,
)
def advantages_not_normalized(log: RunLog) -> Finding | None:
    """Find advantages that are said to be normalized over the batch, and are not."""
    if log.settings.get("advantage.normalize") not in ("batch", "global"):
        return None
    if log.settings.get("advantage.clamp") is not None:
        return None
    mean, std = paired(log, "train/advantage_mean", "train/advantage_std")
    outside = (np.abs(mean.values) > MEAN_OFF) | (np.abs(std.values - 1.0) > STD_OFF)
    outside &= std.values > 0.0  # all advantages alike: there is nothing to normalize
    found = breach_where(mean, outside)
    if found is None:
        return None
    at = int(np.flatnonzero(outside)[-1])
    return Finding(
        cause="advantages are normalized over other rows than the loss sees: mean "
        f"{mean.values[at]:.3g}, standard deviation {std.values[at]:.3g} in place of 0 and 1",
        level="watch",
        evidence=(
            evidence(
                mean,
                f"mean {mean.values[at]:.3g}, deviation {std.values[at]:.3g}, in {found.count} of "
                f"{len(mean)} updates",
                float(mean.values[at]),
                threshold=MEAN_OFF,
                source="normalized over a batch they are 0 and 1; 0.1 and 0.2 are allowed",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "padding or masked rows are in the moments",
                "take both moments with the mask as weight: they become 0 and 1",
            ),
            Suspect("they are normalized over the wrong axis", "print their shape beside the mean"),
        ),
        fix=Fix(
            "Normalize over the valid rows of the whole batch.",
            (Change("advantage.normalize", to="batch"),),
        ),
        confidence=0.75,
    )


def _moves(log: RunLog, name: str) -> bool:
    """Return whether a metric is there and ever other than 0."""
    series: Series | None = log.get(name)
    return series is not None and bool(len(where(series, series.values != 0.0)))


@rule(
    "kl-beyond-clip",
    "thermometer",
    needs=("train/approx_kl", "train/clip_fraction"),
    source="ratios near 1 are log-normal: a clip fraction says how far they spread",
    rows=LEAST_ROWS,
    suppresses=("learning-rate-too-high", "kl-over-target", "kl-spikes", "clip-does-not-bound"),
)
def kl_beyond_clip(log: RunLog) -> Finding | None:
    """Find a KL that is a constant factor above what the clip fraction implies."""
    clip_range = log.get("train/clip_range")
    epsilon = log.setting("region.clip", clip_range.end() if clip_range else 0.2)
    if not epsilon or log.is_language:
        return None
    kl, clip = align(log["train/approx_kl"], log["train/clip_fraction"])
    known = (clip.values > SOME) & (clip.values < MANY) & (kl.values > 0.0)
    if known.sum() < LEAST_ROWS or share_of(clip.values < MANY) < 0.75:
        return None
    times = kl.values[known] / [_implied(float(f), epsilon) for f in clip.values[known]]
    factor, unsteady = float(np.median(times)), spread(np.log(times))
    typical = float(np.median(kl.values[known]))
    if factor < BEYOND or unsteady > UNSTEADY:
        return None
    at = float(np.median(clip.values[known]))
    return Finding(
        cause=f"{kl.label} is about {factor:.2g} times what {percent(at)} clipped ratios imply, "
        "all the time: it is a sum, or in other units",
        level="sick",
        evidence=(
            evidence(
                kl,
                f"{typical:.3g} nats; ratios of which {percent(at)} are beyond 1 ± {epsilon:g} "
                f"have about {_implied(at, epsilon):.2g}",
                typical,
                threshold=BEYOND * _implied(at, epsilon),
                source=f"{BEYOND:g} × σ²/2 of log-normal ratios; calibration corpus, writing half",
                onset=int(kl.step[0]),
            ),
        ),
        others=(
            Suspect(
                "few samples with a huge ratio",
                "log the largest |log ratio|: it is near 0.5 where the KL is a sum",
            ),
        ),
        fix=Fix("Average the KL over the rows, in place of summing it."),
        confidence=0.75,
    )


def _implied(fraction: float, epsilon: float) -> float:
    """Return σ²/2 where a share of normal log-ratios of deviation σ is beyond ε."""
    return 0.5 * (epsilon / NormalDist().inv_cdf(1.0 - fraction / 2.0)) ** 2
