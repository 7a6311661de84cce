"""Do metrics agree with each other? Identities and inequalities that hold for every policy."""

from __future__ import annotations

import math

import numpy as np

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import (
    MASS,
    actions_of,
    onset_of,
    paired,
    percent,
    readers_of,
    share_of,
    without_walk_backs,
)
from keel.doctor.run_log import RunLog
from keel.doctor.series import align

MOST = 0.5
"""Share of the updates that must break an identity which holds up to noise."""
LEAST = 3
"""Updates that must break it."""
NATS_PER_BIT = math.log(2.0)
UNITS = 3.0
"""Two estimates of one KL that differ by this factor in every update: k1, k2, k3 and the exact KL
of healthy runs of Keel differ by less than 1.6 in the median."""
STEADY = 0.15
"""Spread of log(first / second) up to which the factor is one and the same."""
TOO_LITTLE = 0.1
"""Share of the KL that the clip fraction implies, below which the two contradict each other."""
LENGTH = 1.25
"""Factor between mean length and the lengths by which sums and means differ."""


@rule(
    "entropy-over-maximum",
    "thermometer",
    needs=("train/entropy", "setting:facts.actions|train/entropy_max"),
    source="H ≤ log K",
)
def entropy_over_maximum(log: RunLog) -> Finding | None:
    """Find an entropy above that of the uniform policy."""
    entropy, actions = log["train/entropy"], actions_of(log)
    if actions < 2:
        return None
    limit = math.log(actions)
    outside = entropy.values > limit * (1.0 + 1e-3)
    if not outside.any():
        return None
    worst = float(entropy.values.max())
    bits = worst <= math.log2(actions) * (1.0 + 1e-3)
    cause = (
        f"{entropy.label} is logged in bits: {worst:.3g} is above log {actions:g} = {limit:.3g} "
        f"nats, and below log2 {actions:g} = {math.log2(actions):.3g} bits"
        if bits
        else f"{entropy.label} cannot be {worst:.3g}: {actions:g} actions have at most "
        f"log {actions:g} = {limit:.3g} nats; it is a sum where a mean is meant"
    )
    return Finding(
        cause=cause,
        level="watch" if bits else "sick",
        evidence=(
            evidence(
                entropy,
                f"{worst:.4g} in {int(outside.sum())} of {len(entropy)} values; "
                f"log {actions:g} = {limit:.4g}",
                worst,
                threshold=limit,
                source="the uniform policy has the largest entropy, log K",
                onset=onset_of(entropy, outside),
            ),
        ),
        others=(
            Suspect(
                "several action dimensions or agents are summed",
                f"divide by their number: the first value should be about {limit:.3g}",
            ),
            Suspect(
                "the number of actions is another one",
                "print env.action_space",
            ),
        ),
        fix=Fix("Log the mean of −Σ p log p over the rows, in nats (natural logarithm)."),
        confidence=0.8,
        suppresses=readers_of(log, entropy.name),
    )


@rule(
    "entropy-negative",
    "thermometer",
    needs=("train/entropy",),
    source="H ≥ 0 of discrete actions; SB3 logs the negative entropy",
)
def entropy_negative(log: RunLog) -> Finding | None:
    """Find a negative entropy of discrete actions or tokens."""
    entropy = log["train/entropy"]
    discrete = log.is_language or actions_of(log) >= 2
    outside = entropy.values < -MASS
    if not discrete or not outside.any():
        return None
    worst = float(entropy.values.min())
    return Finding(
        cause=f"{entropy.label} has the wrong sign: {worst:.3g}, and the entropy of discrete "
        "actions is never negative",
        level="watch",
        evidence=(
            evidence(
                entropy,
                f"{worst:.4g}; {int(outside.sum())} of {len(entropy)} values are negative",
                worst,
                threshold=0.0,
                source="−Σ p log p ≥ 0",
                onset=onset_of(entropy, outside),
            ),
        ),
        others=(
            Suspect(
                "the loss has the sign of the log, too: the entropy is pushed down",
                "raise the entropy coefficient tenfold: with the right sign the entropy rises",
            ),
        ),
        fix=Fix("Log −Σ p log p; the loss subtracts coefficient × entropy."),
        confidence=0.85,
        suppresses=readers_of(log, entropy.name),
    )


@rule(
    "k1-beyond-k3",
    "thermometer",
    needs=("train/kl_k1", "train/approx_kl"),
    source="Jensen: mean k3 ≥ exp(−k1) − 1 + k1 over the same rows",
    rows=LEAST,
    number=6,
)
def k1_beyond_k3(log: RunLog) -> Finding | None:
    """Find estimates of KL that cannot be of the same rows: k3 is convex, so k1 bounds it."""
    if log.framework not in ("keel", "cleanrl", "csv"):  # elsewhere they are of other minibatches
        return None
    k1, k3 = paired(log, "train/kl_k1", "train/approx_kl")
    bound = np.expm1(-np.clip(k1.values, -50.0, 50.0)) + k1.values
    outside = k3.values < 0.5 * bound - 1e-5
    if outside.sum() < LEAST or share_of(outside) < MOST:
        return None
    at = int(np.flatnonzero(outside)[-1])
    return Finding(
        cause=f"{k1.label} and {k3.label} are not of the same tokens or rows: with a mean log "
        f"ratio of {-k1.values[at]:.3g}, k3 is at least {bound[at]:.3g}, and {k3.values[at]:.3g} "
        "is logged; one is a sum over the sequence, or a mean with padding",
        level="watch",
        evidence=(
            evidence(
                k3,
                f"{k3.values[at]:.3g} where k1 = {k1.values[at]:.3g} implies at least "
                f"{bound[at]:.3g}, in {int(outside.sum())} of {len(k3)} updates",
                float(k3.values[at]),
                threshold=float(bound[at]),
                source="Jensen's inequality: mean(r − 1 − log r) ≥ exp(m) − 1 − m, m = mean log r",
                onset=onset_of(k3, outside),
            ),
        ),
        others=(
            Suspect(
                "k1 is summed over a sequence, k3 is a mean over tokens",
                "divide k1 by the mean length: the inequality holds",
            ),
            Suspect("k3 counts padding", "weight by the mask, divide by its sum: k3 rises"),
        ),
        fix=Fix("Reduce both by one mask and one denominator, in the same place."),
        confidence=0.75,
        suppresses=("steps-too-small", "kl-over-target"),
    )


@rule(
    "kl-units",
    "thermometer",
    needs=("train/kl_exact", "train/approx_kl"),
    source="issues: KL in percent, in bits, or inflated by the size of a mask",
    rows=5,
)
def kl_units(log: RunLog) -> Finding | None:
    """Find two measurements of one KL that differ by a constant factor."""
    exact, estimate = paired(log, "train/kl_exact", "train/approx_kl")
    positive = (exact.values > 1e-7) & (estimate.values > 1e-7)
    if positive.sum() < 5:
        return None
    logs = np.log(estimate.values[positive] / exact.values[positive])
    middle = float(np.median(logs))
    if abs(middle) < math.log(UNITS) or float(np.median(np.abs(logs - middle))) > STEADY:
        return None
    factor = math.exp(middle)
    return Finding(
        cause=f"{estimate.label} is {factor:.3g} × {exact.label} in every update: one of them is "
        + ("in percent" if abs(factor / 100 - 1) < 0.1 else "divided by the wrong number of rows"),
        level="watch",
        evidence=(
            evidence(
                estimate,
                f"median factor {factor:.4g} over {len(logs)} updates, which varies by "
                f"{percent(float(np.median(np.abs(logs - middle))))}",
                factor,
                threshold=UNITS,
                source="Keel: in healthy runs they differ by less than 1.6 in the median",
                onset=int(estimate.step[0]),
            ),
        ),
        others=(
            Suspect(
                "a mean with padding, or a sum over devices",
                f"the share of valid rows, or the number of devices, is near {factor:.3g} or its "
                "inverse",
            ),
        ),
        fix=Fix("Divide both by the sum of the mask; log nats."),
        confidence=0.75,
        suppresses=readers_of(log, "train/approx_kl"),
    )


@rule(
    "clip-without-kl",
    "thermometer",
    needs=("train/clip_fraction", "train/approx_kl|train/kl_exact"),
    source="k3 ≥ clip fraction × (ε − log(1 + ε)) over the same rows",
    rows=LEAST,
    number=6,
)
def clip_without_kl(log: RunLog) -> Finding | None:
    """Find a KL below what the clip fraction implies."""
    clip_range = log.get("train/clip_range")
    epsilon = log.setting("region.clip", clip_range.end() if clip_range else None)
    if epsilon is None and not log.is_language:
        epsilon = 0.2
    if not epsilon or epsilon < 0.01:
        return None
    name = "train/approx_kl" if "train/approx_kl" in log else "train/kl_exact"
    kl, clip = align(without_walk_backs(log, log[name]), log["train/clip_fraction"])
    implied = clip.values * (epsilon - math.log1p(epsilon))
    outside = (kl.values < TOO_LITTLE * implied) & (clip.values > 0.02) & (clip.values <= 1.0)
    if outside.sum() < LEAST or share_of(outside) < MOST:
        return None
    at = int(np.flatnonzero(outside)[-1])
    value, share, floor = float(kl.values[at]), float(clip.values[at]), float(implied[at])
    exactly = "exactly 0" if value == 0.0 else f"{value:.3g}"
    return Finding(
        cause=f"{kl.label} does not measure the updates: it is {exactly} while {percent(share)} "
        f"of the ratios are beyond 1 ± {epsilon:g}, which alone make at least {floor:.3g} nats",
        level="sick" if value == 0.0 else "watch",
        evidence=(
            evidence(
                kl,
                f"{value:.3g} nats in {int(outside.sum())} of {len(kl)} updates; "
                f"{share:.3g} × ({epsilon:g} − log {1 + epsilon:g}) = {floor:.3g}",
                value,
                threshold=floor,
                source="a ratio beyond 1 + ε has a k3 of at least ε − log(1 + ε)",
                onset=onset_of(kl, outside),
            ),
        ),
        others=(
            Suspect(
                "the KL is k1, which cancels",
                "log the mean of r − 1 − log r beside it: that one is above 0",
            ),
            Suspect(
                "the KL is taken before the first step, or against the policy itself",
                "take it after the last epoch, from the stored log-probs",
            ),
            Suspect("a mean with padding", "divide by the sum of the mask: the KL rises"),
        ),
        fix=Fix(
            "Take the KL after the last epoch, over the rows that are clipped, as k3 or exact."
        ),
        confidence=0.8,
        suppresses=("steps-too-small", "kl-zero", "nothing-moves", "kl-k1-stops"),
    )


@rule(
    "token-means-pad",
    "thermometer",
    needs=(
        "kl/old_token|kl/reference_token",
        "kl/old_sequence|kl/reference_sequence",
        "rollout/length_mean",
    ),
    source="Σ over tokens = mean over tokens × mean length; TRL, verl issues: means with padding",
    rows=LEAST,
)
def token_means_pad(log: RunLog) -> Finding | None:
    """Find a mean over tokens that counts padding: sum and mean must differ by the length."""
    for kind in ("old", "reference"):
        token_name, sum_name = f"kl/{kind}_token", f"kl/{kind}_sequence"
        if token_name not in log or sum_name not in log:
            continue
        token, total = paired(log, token_name, sum_name)
        token, length = align(token, log["rollout/length_mean"])
        total, _ = align(total, length)
        counted = (token.values > 1e-9) & (length.values > 0.0)
        if counted.sum() < LEAST:
            continue
        ratio = total.values[counted] / token.values[counted]
        factor = float(np.median(ratio / length.values[counted]))
        if not factor > LENGTH:
            continue
        return Finding(
            cause=f"{token.label} is a mean with padding: per completion the KL is "
            f"{np.median(ratio):.3g} × as large, and completions have "
            f"{np.median(length.values[counted]):.3g} tokens, so it is {factor:.3g} × too small",
            level="watch",
            evidence=(
                evidence(
                    token,
                    f"{total.label} / {token.label} = {np.median(ratio):.4g}, mean length "
                    f"{np.median(length.values[counted]):.4g}",
                    factor,
                    threshold=LENGTH,
                    source="a sum over the tokens is their mean times their number",
                    onset=int(token.step[0]),
                ),
            ),
            others=(
                Suspect(
                    "the sum counts tokens of the prompt",
                    "sum over the completion's mask only: the factor becomes the mean length",
                ),
            ),
            fix=Fix("Divide sums over tokens by the sum of the completion mask."),
            confidence=0.7,
            suppresses=readers_of(log, token_name),
        )
    return None
