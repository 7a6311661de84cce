"""Does learning reach the policy? Optimizers without parameters, gradients without effect."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import outcome
from keel.doctor.rule import rule
from keel.doctor.rules.measures import KLS, OUTCOMES, onset_of, percent, present, share_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import breach_where, is_constant

NOTHING = (*OUTCOMES, "steps-too-small", "kl-zero", "nothing-moves", "gradient-vanishes")
"""What follows when nothing is learned."""
STILL = 5
FEW = 0.02
"""Share of the parameters that small adapters have."""
VANISHED = 1e-6
"""A gradient norm below which nothing is learned (research notes, 52)."""


@rule(
    "optimizer-empty",
    "consistency",
    needs=("train/parameters_trained",),
    source="TRL, rsl_rl, CleanRL issues: an optimizer without the policy's parameters",
    suppresses=(*NOTHING, "gradient-without-effect", "reference-kl-zero"),
)
def optimizer_empty(log: RunLog) -> Finding | None:
    """Find an optimizer that does not hold the policy's parameters."""
    share = log["train/parameters_trained"]
    value = share.last
    partly = value < 0.999 if not log.is_language else value < FEW and _nothing_happens(log)
    if value > 0.0 and not partly:
        return None
    cause = (
        "no parameter of the policy is trained: none of them is in an optimizer with "
        "requires_grad, so every step changes nothing"
        if value <= 0.0
        else f"only {percent(value)} of the policy's parameters are trained: the others are in no "
        "optimizer, or frozen"
    )
    return Finding(
        cause=cause,
        level="sick" if value <= 0.0 else "watch",
        evidence=(
            evidence(
                share,
                f"{percent(value)} of the parameters are in an optimizer and require gradients",
                value,
                threshold=1.0,
                source="counted before the first update",
                onset=int(share.step[0]),
            ),
        ),
        others=(
            Suspect(
                "the optimizer was made before the network was replaced or wrapped",
                "compare id() of optimizer.param_groups[0]['params'][0] with the network's",
            ),
            Suspect(
                "parameters were frozen on purpose",
                "list the names of those with requires_grad False",
            ),
        ),
        fix=Fix("Make the optimizer from the parameters of the network that is trained."),
        confidence=0.95 if value <= 0.0 else 0.6,
    )


def _nothing_happens(log: RunLog) -> bool:
    """Return whether neither reward nor entropy changes; adapters are few by design."""
    now, entropy = outcome(log), log.get("train/entropy")
    if now is None or not now.stagnates or entropy is None:
        return False
    return abs(entropy.end() - entropy.start()) < 0.005 * abs(entropy.start())


@rule(
    "learning-rate-zero",
    "consistency",
    needs=("train/learning_rate",),
    source="TRL, SB3 issues: a schedule that ends before the run, or never begins",
    suppresses=(*NOTHING, "gradient-without-effect", "reference-kl-zero"),
)
def learning_rate_zero(log: RunLog) -> Finding | None:
    """Find updates with a learning rate of exactly 0."""
    rate = log["train/learning_rate"]
    zero = rate.values == 0.0
    # one zero row may be the warm-up's first or the schedule's last
    few = zero.sum() < 2 if len(rate) > 1 else not zero.all()
    if few or share_of(zero) < 0.1:
        return None
    positive = rate.values[~zero]
    ended = len(positive) and bool(zero[-1])
    first = onset_of(rate, zero)
    return Finding(
        cause=f"the schedule ends too early: the learning rate is 0 from step {first:,} on, for "
        f"{percent(share_of(zero))} of the updates"
        if ended
        else f"nothing is learned: the learning rate is 0 in {percent(share_of(zero))} of the "
        "updates",
        level="sick" if share_of(zero) > 0.25 and len(rate) > 1 else "watch",
        evidence=(
            evidence(
                rate,
                f"0 in {int(zero.sum())} of {len(rate)} updates"
                + (f", largest {positive.max():.3g}" if len(positive) else ""),
                0.0,
                threshold=0.0,
                source="a step of length 0 changes nothing",
                onset=first,
            ),
        ),
        others=(
            Suspect(
                "total steps of the schedule are counted in another unit than those of the run",
                "compare the schedule's length with the number of optimizer steps",
            ),
            Suspect(
                "the log rounds a small learning rate to 0",
                "print it with six digits; the KL of the updates is above 0 then",
            ),
        ),
        fix=Fix(
            "Give the schedule the run's length, or keep the learning rate constant.",
            (Change("region.schedule", to="constant"),),
        ),
        confidence=0.9 if len(rate) > 1 else 0.5,
    )


@rule(
    "gradient-without-effect",
    "consistency",
    needs=("train/gradient_effect", "train/gradient_norm"),
    source="TRL issues: adapters baked in by a compiler, gradients that never reach the weights",
    suppresses=NOTHING,
)
def gradient_without_effect(log: RunLog) -> Finding | None:
    """Find gradients that do not change the parameters."""
    effect, norm = log["train/gradient_effect"], log["train/gradient_norm"]
    found = breach_where(effect, effect.values == 0.0)
    if found is None or norm.median() <= 0.0 or not found.lasting:
        return None
    return Finding(
        cause="gradients do not reach the weights: the parameters are bit for bit the same after "
        f"an update, with a gradient norm of {norm.median():.3g}",
        level="sick",
        evidence=(
            evidence(
                effect,
                f"‖Δθ‖/‖θ‖ exactly 0 in {found.count} of {len(effect)} updates",
                0.0,
                threshold=0.0,
                source="an optimizer step with a gradient changes its parameters",
                onset=found.onset,
            ),
            evidence(norm, f"median {norm.median():.3g}"),
        ),
        others=(
            Suspect(
                "the optimizer holds copies of the parameters",
                "compare id() of its parameters with those of the network",
            ),
            Suspect(
                "the learning rate is 0, or below the resolution of bf16",
                "train one step with a learning rate of 1: the weights must change",
            ),
            Suspect(
                "steps are skipped (loss scaling, non-finite gradients, accumulation never ends)",
                "count calls of optimizer.step() that are not skipped",
            ),
        ),
        fix=Fix("Make the optimizer after wrapping and compiling, from the network that acts."),
        confidence=0.9,
    )


@rule(
    "gradient-vanishes",
    "consistency",
    needs=("train/gradient_norm",),
    source="rldoctor: gradients of exactly zero; research notes, 52",
    suppresses=("steps-too-small", "returns-flat", "entropy-stuck", "nothing-moves"),
    number=52,
)
def gradient_vanishes(log: RunLog) -> Finding | None:
    """Find gradients of 0, unless no group of completions has anything to teach."""
    norm = log["train/gradient_norm"]
    informative = log.get("rollout/informative")
    if informative is not None and informative.end() < 0.2:
        return None  # `groups-uninformative` names that
    advantages = log.get("train/advantage_raw_std")
    if advantages is not None and advantages.end() < VANISHED:
        return None  # `advantages-vanish` names that
    std = log.get("rollout/reward_std_group") or log.get("rollout/return_std")
    if log.is_language and std is not None and std.end() == 0.0:
        return None
    found = breach_where(norm, norm.values < VANISHED, lasting=0.5)
    if found is None:
        return None
    exactly = "exactly 0" if found.value == 0.0 else f"{found.value:.2g}"
    return Finding(
        cause=f"no gradient reaches the policy: its norm is {exactly} in {found.count} of "
        f"{len(norm)} updates (a detached loss, all advantages 0, or a loss behind a clamp)",
        level="sick" if len(norm) >= 3 else "watch",
        evidence=(
            evidence(
                norm,
                f"{exactly} in {found.count} of {len(norm)} updates",
                found.value,
                threshold=VANISHED,
                source="research notes, 52: below 1e-6 nothing is learned",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "all advantages are 0: rewards are constant, or equal within each group",
                "log the standard deviation of the advantages: it is 0",
            ),
            Suspect(
                "the log-probs are detached, or come from the rollout",
                "loss.requires_grad must be True, and each parameter's .grad must not be None",
            ),
            Suspect(
                "all activations are dead or saturated",
                "lower the initial scale; log the share of dead units",
            ),
        ),
        fix=Fix("Log the standard deviation of the advantages and which parameters have .grad."),
        confidence=0.7 if len(norm) >= 3 else 0.5,
    )


@rule(
    "nothing-moves",
    "consistency",
    needs=("train/entropy", "|".join(KLS), "train/loss|train/value_loss|train/policy_loss"),
    source="public issues: nothing is learned though everything moves",
    rows=STILL,
    suppresses=(*OUTCOMES, "steps-too-small", "kl-zero"),
    number=7,
)
def nothing_moves(log: RunLog) -> Finding | None:
    """Find a loss that moves while entropy and KL stand exactly still."""
    entropy, kl = log["train/entropy"], present(log, KLS)[0]
    loss = present(log, ("train/loss", "train/value_loss", "train/policy_loss"))[0]
    if log.is_language and "train/kl_reference" not in log:
        return None  # a KL of 0 is usual with one step a batch
    rate = log.get("train/learning_rate")
    if rate is not None and rate.median() <= 0.0:
        return None
    still = is_constant(entropy, STILL) and is_constant(kl, STILL) and kl.last == 0.0
    if not still or is_constant(loss, 2) or len(loss) < STILL:
        return None
    if len(np.unique(loss.finite)) < STILL:
        return None
    return Finding(
        cause=f"updates do not reach the policy that acts: {loss.label} moves, while its "
        f"entropy is exactly {entropy.last:.6g} and its KL exactly 0 in {len(kl)} updates",
        level="sick",
        evidence=(
            evidence(
                entropy,
                f"{entropy.last:.6g} in {len(entropy)} of {len(entropy)} values",
                threshold=STILL,
                source="a policy that learns changes its entropy",
                onset=int(entropy.step[0]),
            ),
            evidence(kl, f"exactly 0 in {len(kl)} of {len(kl)} values", 0.0, threshold=0.0),
            evidence(
                loss, f"between {float(loss.values.min()):.3g} and {float(loss.values.max()):.3g}"
            ),
        ),
        others=(
            Suspect(
                "the optimizer holds the critic's parameters only",
                "print the policy's first weight before and after an update: it must change",
            ),
            Suspect(
                "every update is rolled back or its line search fails",
                "log α or the success of the line search",
            ),
            Suspect(
                "another copy of the network acts",
                "compare id() of the network that acts with the one that is trained",
            ),
        ),
        fix=Fix("Make the optimizer from the parameters of the network that acts."),
        confidence=0.85,
    )
