"""Metrics that stand still though they cannot, and zeros that are reported as bugs and are none."""

from __future__ import annotations

import math

import numpy as np

from keel.doctor.finding import Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import (
    KLS,
    actions_of,
    paired,
    percent,
    present,
    readers_of,
    share_of,
    where,
)
from keel.doctor.run_log import RunLog
from keel.doctor.series import align, is_constant

STUCK = 10
"""Equal values in a row that no measurement of a rollout gives by chance."""
REPEATED = 3
"""Updates with a KL of exactly 0 (research notes, N2)."""
SMALL = 0.1
"""|k1| in nats that noise around 0 reaches; larger means that it is no noise."""
MOVES = 1e-6
"""A KL above which a policy moved."""


@rule(
    "explained-variance-constant",
    "thermometer",
    needs=("train/explained_variance",),
    source="rldoctor: a metric that is 0 by construction; SB3 issues",
    rows=STUCK,
)
def explained_variance_constant(log: RunLog) -> Finding | None:
    """Find an explained variance that is the same in every update."""
    series = log["train/explained_variance"]
    if not is_constant(series, STUCK):
        return None
    return Finding(
        cause=f"{series.label} does not measure the critic: it is exactly {series.last:g} in all "
        f"{len(series)} updates",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{series.last:g} in {len(series)} of {len(series)} values; rollouts differ",
                threshold=STUCK,
                source=f"{STUCK} equal values of a noisy metric do not happen by chance",
                onset=int(series.step[0]),
            ),
        ),
        others=(
            Suspect(
                "returns or values are all equal, and the metric falls back to a constant",
                "print the standard deviation of the value targets: it is 0",
            ),
            Suspect(
                "values are compared with themselves",
                "the targets must be advantages + values, taken before the update",
            ),
        ),
        fix=Fix(
            "Take 1 − Var(R − V) / Var(R) of the rollout's targets and the values before them."
        ),
        confidence=0.85,
        suppresses=readers_of(log, series.name),
    )


@rule(
    "entropy-constant",
    "thermometer",
    needs=("train/entropy", "train/approx_kl|train/kl_exact|train/clip_fraction"),
    source="rlprobe and rldoctor: exactly constant entropy; Keel",
    rows=STUCK,
)
def entropy_constant(log: RunLog) -> Finding | None:
    """Find an entropy that is exactly constant while the policy moves."""
    entropy = log["train/entropy"]
    names = ("train/approx_kl", "train/kl_exact", "train/clip_fraction")
    moved, _ = align(present(log, names)[0], entropy)
    moves = moved.values > MOVES
    if not is_constant(entropy, STUCK) or moves.sum() < STUCK:
        return None
    discrete = log.is_language or actions_of(log) >= 2
    typical = float(np.median(moved.values[moves]))
    return Finding(
        cause=f"{entropy.label} is not that of the policy: it is exactly {entropy.last:.6g} in "
        f"{len(entropy)} updates, while {moved.label} is {typical:.3g}"
        if discrete
        else f"the standard deviation of the actions is not trained: {entropy.label} is exactly "
        f"{entropy.last:.6g} in {len(entropy)} updates, while the mean moves",
        level="sick" if discrete else "watch",
        evidence=(
            evidence(
                entropy,
                f"{entropy.last:.6g} in {len(entropy)} values; {moved.label} above {MOVES:g} in "
                f"{int(moves.sum())} of them",
                threshold=STUCK,
                source="a policy that moves has another entropy",
                onset=int(entropy.step[0]),
            ),
        ),
        others=(
            Suspect(
                "the entropy is a constant or a detached copy, and its bonus has no gradient",
                "take its gradient: entropy.mean().backward() must fill the policy's .grad",
            ),
            Suspect(
                "the standard deviation is a fixed number or not in the optimizer",
                "list the parameters of the optimizer: log_std must be among them",
            ),
        ),
        fix=Fix("Take the entropy of the distribution that the update evaluates, with gradient."),
        confidence=0.85 if discrete else 0.7,
        suppresses=("entropy-stuck",),
    )


@rule(
    "rejected-logged-as-zero",
    "thermometer",
    needs=("train/line_search_success", "train/kl_reverse|train/kl_exact|train/approx_kl"),
    source="research notes, N2; sb3-contrib's TRPO logs a KL of 0 when its line search fails",
    rows=REPEATED,
    suppresses=("kl-zero", "steps-too-small"),
    number=7,
)
def rejected_logged_as_zero(log: RunLog) -> Finding | None:
    """Find failed line searches whose KL is logged as 0, which looks calm."""
    if log.framework == "keel" and "train/kl_step" in log:
        return None  # kl_step is NaN after a rejection, and kl_exact is of the kept policy
    names = ("train/kl_reverse", "train/kl_exact", "train/approx_kl")
    kl, success = paired(log, present(log, names)[0].name, "train/line_search_success")
    rejected = (kl.values == 0.0) & (success.values < 0.5)
    if rejected.sum() < REPEATED:
        return None
    real = kl.values[~rejected]
    typical = float(np.median(real)) if len(real) else math.nan
    accepted = f"accepted ones have {typical:.3g}" if len(real) else "none was accepted"
    return Finding(
        cause=f"{kl.label} is 0 because steps were rejected: in {int(rejected.sum())} of "
        f"{len(kl)} updates the line search failed and 0 was logged; {accepted}",
        level="watch",
        evidence=(
            evidence(
                kl,
                f"exactly 0 in {int(rejected.sum())} updates, all of them with a failed search",
                0.0,
                threshold=REPEATED,
                source="sb3-contrib: kl_divergence_loss is 0 where is_line_search_success is 0",
                onset=int(kl.step[np.flatnonzero(rejected)[0]]),
            ),
        ),
        others=(
            Suspect(
                "the policy does not change although steps are accepted",
                f"look at the updates with {success.label} = 1: their KL is above 0",
            ),
        ),
        fix=Fix("Log NaN for a rejected step, and judge it by the success of the line search."),
        confidence=0.9,
    )


@rule(
    "kl-zero",
    "thermometer",
    needs=("|".join(KLS),),
    source="research notes, N2: a KL of exactly 0 is a rejected step or a dead policy",
    rows=REPEATED,
    number=7,
)
def kl_zero(log: RunLog) -> Finding | None:
    """Find a KL of exactly 0 in many updates that are said to move the policy."""
    if log.is_language:
        return None  # with one step a batch it is 0 by construction
    kl = present(log, KLS)[0]
    zero = kl.values == 0.0
    if zero.sum() < REPEATED or share_of(zero[-20:]) < 0.5:
        return None
    entropy = log.get("train/entropy")
    still = entropy is not None and is_constant(entropy, REPEATED)
    if entropy is None or still:
        return None  # `nothing-moves` looks at that
    count = int(zero.sum())
    return Finding(
        cause=f"{kl.label} does not measure the updates: it is exactly 0 in {count} of {len(kl)} "
        f"updates, while {entropy.label} goes from {entropy.start():.4g} to {entropy.end():.4g}",
        level="watch",
        evidence=(
            evidence(
                kl,
                f"exactly 0 in {count} of {len(kl)} updates",
                0.0,
                threshold=REPEATED,
                source="two policies of different entropy have a KL above 0",
                onset=int(kl.step[np.flatnonzero(zero)[0]]),
            ),
        ),
        others=(
            Suspect(
                "it is taken before the only step of a batch",
                "one epoch and one minibatch: take it after the step, and it is above 0",
            ),
            Suspect("steps are rejected and 0 is logged", "log the line search's success"),
        ),
        fix=Fix("Take the KL after the last step of the update, against the stored log-probs."),
        confidence=0.7,
        suppresses=("steps-too-small",),
    )


@rule(
    "loss-zero-is-usual",
    "thermometer",
    needs=("train/loss|train/policy_loss",),
    source="TRL documentation and issues: loss 0.0 of GRPO in on-policy updates",
)
def loss_zero_is_usual(log: RunLog) -> Finding | None:
    """Explain a loss near 0 of a group-relative method with one step a batch."""
    loss = present(log, ("train/loss", "train/policy_loss"))[0]
    valued = log.get("train/value_loss")
    if not log.is_language or (valued is not None and valued.median() > 0.0):
        return None
    near = np.abs(loss.values) < 1e-3
    norm = log.get("train/gradient_norm")
    if share_of(near) < 0.5 or (norm is not None and norm.median() <= 0.0):
        return None
    return Finding(
        cause=f"{loss.label} is about 0 by construction: advantages are centered in their group "
        "and the ratio is 1 in the first step of a batch; the gradient is not 0",
        level="usual",
        evidence=(
            evidence(
                loss,
                f"|loss| < 0.001 in {percent(share_of(near))} of the updates"
                + (f"; gradient norm {norm.median():.3g}" if norm is not None else ""),
                source="mean of ratio × advantage = mean of the advantages = 0",
            ),
        ),
        fix=Fix("Nothing: judge by reward, gradient norm and entropy."),
        confidence=0.9,
    )


@rule(
    "clip-zero-is-usual",
    "thermometer",
    needs=("train/clip_fraction",),
    source="TRL and verl issues: clip ratio 0 with one step a batch",
)
def clip_zero_is_usual(log: RunLog) -> Finding | None:
    """Explain a clip fraction of exactly 0 where each batch makes one step."""
    clip = log["train/clip_fraction"]
    epochs = log.setting("region.epochs")
    one_step = log.is_language and (epochs is None or epochs == 1)
    norm = log.get("train/gradient_norm")
    if not one_step or clip.values.any() or (norm is not None and norm.median() <= 0.0):
        return None
    return Finding(
        cause=f"{clip.label} is 0 because each batch makes one step: the ratio is 1 until then, "
        "and 1 is never clipped",
        level="usual",
        evidence=(evidence(clip, f"exactly 0 in {len(clip)} of {len(clip)} values"),),
        fix=Fix("Nothing; with several steps a batch it is above 0."),
        confidence=0.85,
    )


@rule(
    "k1-negative-is-usual",
    "thermometer",
    needs=("train/kl_k1",),
    source="Schulman, Approximating KL divergence: k1 is unbiased and noisy",
    number=6,
)
def k1_negative_is_usual(log: RunLog) -> Finding | None:
    """Explain small negative values of k1."""
    k1 = log["train/kl_k1"]
    negative = where(k1, k1.values < 0.0)
    if log.framework == "keel" or not len(negative) or negative.values.min() < -SMALL:
        return None
    if k1.median() < -SMALL / 10:
        return None  # no noise around 0
    return Finding(
        cause=f"{k1.label} is below 0 in {len(negative)} of {len(k1)} updates, as k1 may be: the "
        "mean of log π_old − log π_new is a noisy estimate of a small KL",
        level="usual",
        evidence=(
            evidence(
                k1,
                f"between {float(k1.values.min()):.3g} and {float(k1.values.max()):.3g}",
                float(negative.values.min()),
                threshold=-SMALL,
                source=f"noise stays within ±{SMALL:g} nats",
            ),
        ),
        fix=Fix("Nothing; log k3, the mean of r − 1 − log r, which is never negative."),
        confidence=0.85,
    )


@rule(
    "last-minibatch-is-usual",
    "thermometer",
    needs=("train/approx_kl",),
    source="CleanRL's ppo.py: approx_kl and losses are those of the last minibatch",
    rows=10,
)
def last_minibatch_is_usual(log: RunLog) -> Finding | None:
    """Explain noise of metrics that are of the last minibatch only."""
    kl = log["train/approx_kl"]
    known = kl.values[kl.values > 0.0]
    if log.framework != "cleanrl" or len(known) < 10:
        return None
    low, high = np.percentile(known, [10.0, 90.0])
    if high < 3.0 * low:
        return None
    return Finding(
        cause=f"{kl.label} jumps between {low:.2g} and {high:.2g} because CleanRL logs the last "
        "minibatch of an update: its median says how far updates go, single values do not",
        level="usual",
        evidence=(
            evidence(
                kl,
                f"10 % below {low:.3g}, 10 % above {high:.3g}, median {np.median(known):.3g}",
                float(np.median(known)),
                threshold=3.0,
                source="a factor of 3 between them is noise of one minibatch",
            ),
        ),
        fix=Fix("Nothing; average approx_kl over the minibatches of the last epoch for a record."),
        confidence=0.7,
    )
