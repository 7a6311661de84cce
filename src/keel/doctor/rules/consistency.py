"""Is the policy that sampled the one that is trained? Ratios before a step, masks, log-probs."""

from __future__ import annotations

import math

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import (
    KL,
    OUTCOMES,
    actions_of,
    onset_of,
    paired,
    percent,
    present,
    share_of,
    update_kl,
)
from keel.doctor.run_log import RunLog
from keel.doctor.series import align, breach, breach_where
from keel.tracking.metrics import REGISTRY

GATE = "train/gate_log_ratio"
ROUNDED = 1.0
"""The largest |log ratio| that bf16 gives among many tokens of a language model: 0.03 nats RMS."""
SLIGHT = 1e-2
"""A gap that reduced precision of some kernels (TF32) explains as well."""
REGION = (
    "kl-over-target",
    "kl-spikes",
    "learning-rate-too-high",
    "clip-fraction-high",
    "clip-does-not-bound",
    "too-many-epochs",
    "ratios-extreme",
    "early-stop-at-once",
    "walk-backs-frequent",
    "sample-size-low",
    "region-drifts",
    "k3-explodes",
)
"""Rules of the trust region that read ratios, which mean nothing if the policies differ."""
NEARLY_ALL = 0.999
"""A clip fraction over all minibatches that even 1,000 of them do not reach: the first has 0."""
FEWEST = 3
APART, MEANT = 5.0, 0.02
"""An estimate of KL from the actions that is so many times the exact one, and at least this, in
nats; in healthy runs of Keel they differ by less than 1.6 in the median, with a bug of 30 % random
actions by 43."""
CANCELS = 0.2
"""k1 below this share of the KL says nothing of it."""


@rule(
    "replay-differs",
    "consistency",
    needs=(GATE,),
    source="37 implementation details of PPO; Keel's gate",
    suppresses=(*REGION, *OUTCOMES, "ratio-mean-off", "samples-not-from-policy"),
    number=1,
)
def replay_differs(log: RunLog) -> Finding | None:
    """Find a policy that does not give the log-probs with which it sampled, before any step."""
    gate = log[GATE]
    rounds = log.is_language and log.framework != "keel"
    high = ROUNDED if rounds else (REGISTRY[GATE].healthy or (None, 1e-3))[1]
    found = breach(gate, high=high)
    if found is None or high is None:
        return None
    late = found.onset > int(gate.step[0])
    when = f"from step {found.onset:,} on" if late else "from the first update on"
    slight = log.framework != "keel" and found.value <= SLIGHT
    explains = "bf16 explains" if rounds else "float32 explains"
    return Finding(
        cause="the policy that is trained is not the one that sampled: before the first step, "
        f"log-probs differ by up to {found.value:.3g}, {when}",
        level="watch" if slight else "sick",
        evidence=(
            evidence(
                gate,
                f"max |log ratio| {found.value:.3g} before the first step, in {found.count} of "
                f"{len(gate)} updates; {explains} {high:g}",
                found.value,
                threshold=high,
                source="bf16: 0.03 nats RMS" if rounds else REGISTRY[GATE].healthy_note,
                onset=found.onset,
            ),
        ),
        others=_replay_suspects(late),
        fix=Fix(
            "Store what sampling used (observation, mask, statistics, log-prob), replay that.",
            (Change("region.gate", to=True),),
        ),
        confidence=0.6 if slight else 0.95,
    )


def _replay_suspects(late: bool) -> tuple[Suspect, ...]:
    """Return causes of a replay that differs, the likeliest first."""
    mask = Suspect(
        "another action mask in sampling than in training",
        "store the mask with the observation and replay: the gate becomes 0",
    )
    outside = Suspect(
        "temperature, ε-greedy or dropout outside of the log-prob",
        "sample one rollout without it: the gate becomes 0",
    )
    statistics = Suspect(
        "observations normalized with other statistics in training",
        "freeze the statistics for one rollout and its update: the gate becomes 0",
    )
    network = Suspect(
        "another network, or older weights, sampled",
        "copy the weights before sampling, with a learning rate of 0: the gate becomes 0",
    )
    return (statistics, network, mask, outside) if late else (mask, outside, network, statistics)


@rule(
    "clipped-before-first-step",
    "consistency",
    needs=("train/clip_fraction",),
    source="research notes, N0: clip fraction 1.0; the ratio is 1 in the first minibatch",
    suppresses=(*REGION, *OUTCOMES, "ratio-mean-off"),
    number=2,
)
def clipped_before_first_step(log: RunLog) -> Finding | None:
    """Find a clip fraction that only a wrong mask or distribution gives.

    It is a mean over the minibatches of an update. Those of the first have ratio 1, so that M of
    them give at most 1 − 1/M.
    """
    clip = log["train/clip_fraction"]
    limit = _largest_clip_fraction(log)
    outside = (clip.values > limit) & (clip.values <= 1.0 + 1e-6)
    found = breach_where(clip, outside)
    if found is None:
        return None
    entropy, actions = log.get("train/entropy"), actions_of(log)
    uniform = entropy is not None and actions >= 2 and entropy.end() > 0.98 * math.log(actions)
    proof = [
        evidence(
            clip,
            f"{found.value:.4g} in {found.count} of {len(clip)} updates; at most {limit:.4g} with "
            "a ratio of 1 in the first minibatch",
            found.value,
            threshold=limit,
            source="a mean over M minibatches whose first is 0: 1 − 1/M",
            onset=found.onset,
        )
    ]
    if entropy is not None and uniform:
        proof.append(
            evidence(
                entropy,
                f"{entropy.end():.3g} nats: still that of {actions:g} random actions",
                entropy.end(),
                threshold=math.log(actions),
                source="log K",
            )
        )
    return Finding(
        cause="log-probs are taken from another distribution than the one that sampled (mask, "
        f"action index or network): {percent(found.value)} of the ratios are clipped, in the first "
        "minibatch as well, where nothing has changed yet"
        + ("; and the policy stays uniform" if uniform else ""),
        level="sick",
        evidence=tuple(proof),
        others=(
            Suspect(
                "the learning rate is so large that one step leaves the clip's range",
                "train with a learning rate of 0: the clip fraction must be 0",
            ),
            Suspect(
                "the metric is of the last minibatch only",
                "log the first minibatch's ratio: it must be 1",
            ),
        ),
        fix=Fix(
            "Replay a rollout before any step and assert ratio 1; keep the mask with each row.",
            (Change("region.gate", to=True),),
        ),
        confidence=0.85 if len(clip) >= FEWEST else 0.7,
    )


def _largest_clip_fraction(log: RunLog) -> float:
    """Return the largest mean clip fraction with ratio 1 in the first minibatch."""
    epochs, minibatch = log.setting("region.epochs"), log.setting("region.minibatch")
    steps, envs = log.setting("rollout_steps"), log.setting("envs.num")
    if not (epochs and minibatch and steps and envs) or log.framework not in ("keel", "sb3"):
        return NEARLY_ALL
    passes = epochs * math.ceil(steps * envs / minibatch)
    return max(1.0 - 0.5 / passes, 0.9)


@rule(
    "illegal-actions",
    "consistency",
    needs=("rollout/illegal_actions",),
    source="research notes, N0: mask drift, action index remapped",
    suppresses=("replay-differs", *REGION, *OUTCOMES),
    number=3,
)
def illegal_actions(log: RunLog) -> Finding | None:
    """Find sampled actions that their own mask forbids."""
    illegal = log["rollout/illegal_actions"]
    outside = illegal.values > 0.0
    if not outside.any():
        return None
    count = float(illegal.values[outside][-1])
    return Finding(
        cause=f"actions were sampled that their mask forbids ({count:g} in one rollout): the mask "
        "belongs to another step, or actions are renumbered between policy and environment",
        level="sick",
        evidence=(
            evidence(
                illegal,
                f"{count:g} in the newest, above 0 in {int(outside.sum())} of {len(illegal)} "
                "rollouts",
                count,
                threshold=0.0,
                source="a masked action has probability 0",
                onset=onset_of(illegal, outside),
            ),
        ),
        others=(
            Suspect(
                "ε-greedy draws among all actions",
                "set ε to 0 for one rollout: the count becomes 0",
            ),
            Suspect(
                "the mask is read after the step in place of before it",
                "compare with the mask of the step before: all actions are legal there",
            ),
        ),
        fix=Fix("Keep the mask that sampling used with its row, and replay with that one."),
        confidence=0.95,
    )


@rule(
    "samples-not-from-policy",
    "consistency",
    needs=("train/kl_exact", "train/approx_kl"),
    source="Keel, calibrated: an estimate from actions agrees with the exact KL of their policy",
    rows=5,
    suppresses=(*REGION, *OUTCOMES),
    number=4,
)
def samples_not_from_policy(log: RunLog) -> Finding | None:
    """Find actions that were not drawn from the distribution that is stored with them."""
    exact, estimate = paired(log, "train/kl_exact", "train/approx_kl")
    outside = (estimate.values > APART * exact.values) & (estimate.values > MEANT)
    if outside.sum() < FEWEST or share_of(outside) < 0.5:
        return None
    high, low = float(np.median(estimate.values[outside])), float(np.median(exact.values[outside]))
    return Finding(
        cause="actions are not samples of the policy that is stored with them (ε-greedy, "
        f"temperature or another action's log-prob): by the actions the KL is {high:.3g} nats, by "
        f"the distributions {low:.3g}",
        level="sick",
        evidence=(
            evidence(
                estimate,
                f"{high:.3g} against {low:.3g} nats in {percent(share_of(outside))} of the updates",
                high,
                threshold=APART * low,
                source=f"Keel: within a factor of 1.6 in healthy runs; {APART:g} allowed",
                onset=onset_of(estimate, outside),
            ),
        ),
        others=(
            Suspect(
                "a few rows have huge ratios, and k3 is exponential in them",
                "look at the median ratio and the largest: without outliers they agree",
            ),
            Suspect(
                "log-probs are of the action before clipping or squashing, or the reverse",
                "store the action that the log-prob was taken of",
            ),
        ),
        fix=Fix(
            "Explore inside of the distribution (entropy bonus, temperature), or store the "
            "log-prob of the mixture that was sampled.",
            (Change("faults.epsilon_greedy", to=0.0), Change("region.gate", to=True))
            if (log.setting("faults.epsilon_greedy") or 0.0) > 0.0
            else (Change("region.gate", to=True),),
        ),
        confidence=0.85,
    )


@rule(
    "kl-k1-stops",
    "consistency",
    needs=("train/kl_k1|train/kl_approx", KL, "setting:region.kl_measure"),
    source="Andy Jones, Debugging RL; research notes, N3: k1 cancels",
    rows=FEWEST,
    number=6,
)
def k1_stops(log: RunLog) -> Finding | None:
    """Find updates that k1 should have stopped, and could not."""
    target = log.setting("region.target_kl")
    if log.settings.get("region.kl_measure") != "k1" or target is None:
        return None
    if log.settings.get("region.early_stop") in (None, "off"):
        return None
    k1, kl = align(present(log, ("train/kl_k1", "train/kl_approx"))[0], update_kl(log))
    outside = (kl.values > 1.5 * target) & (k1.values < 1.5 * target)
    outside &= k1.values < CANCELS * kl.values
    if outside.sum() < FEWEST:
        return None
    at = int(np.flatnonzero(outside)[-1])
    return Finding(
        cause=f"updates are stopped by k1, which cancels: it says {k1.values[at]:.3g} where the KL "
        f"is {kl.values[at]:.3g} nats, so nothing stops at 1.5 × {target:g}",
        level="sick" if share_of(outside) > 0.25 else "watch",
        evidence=(
            evidence(
                k1,
                f"{k1.values[at]:.3g} beside {kl.values[at]:.3g} nats, in {int(outside.sum())} of "
                f"{len(k1)} updates",
                float(k1.values[at]),
                threshold=CANCELS * float(kl.values[at]),
                source="k1 averages positive and negative log ratios",
                onset=onset_of(k1, outside),
            ),
        ),
        others=(
            Suspect(
                "one large last step passed the limit at once",
                "halve the learning rate: the KL stays below the limit",
            ),
        ),
        fix=Fix(
            "Stop by the exact KL, or by k3.",
            (Change("region.kl_measure", to="exact"),),
        ),
        confidence=0.85,
        suppresses=("kl-over-target", "kl-spikes"),
    )
