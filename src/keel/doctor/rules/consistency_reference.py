"""Does the penalty towards the reference do what it says? Its KL, its coefficient, its sign."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import paired, update_kl
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach, trend

REFERENCE = "train/kl_reference"
LEAST = 5
NEGATIVE_SEQUENCE = -1.0
"""TRL warns where the mean KL of a sequence is below −1 nats."""
NEGATIVE_TOKEN = -0.01
AT_START = 0.1
"""KL of a token to the reference before learning, which is 0 where the policy starts from it."""
SURE = 0.01
WIND_UP, RISING, STILL = 100.0, 1.2, 0.9
"""A coefficient that grew so many times and is still growing in the last fifth, and a KL that kept
so much of its size. A controller that works raises its coefficient, too, until the KL is on target.
"""


def _per_sequence(series: Series) -> bool:
    """Return whether a KL to the reference is summed over a completion: TRL's `objective/kl`."""
    return "objective" in series.label or "sequence" in series.label


def coefficient(log: RunLog) -> float:
    """Return the coefficient of the penalty in the loss; 0 where none is known."""
    if log.settings.get("kl.place") in ("none", "reward"):
        return 0.0
    logged = log.get("train/kl_coef")
    if any(series and "reward" in series.label for series in (logged, log.get(REFERENCE))):
        return 0.0  # verl's `actor/reward_kl_penalty`
    known = log.setting("kl.coef")
    return known if known is not None else logged.median() if logged and log.is_language else 0.0


@rule(
    "kl-reference-negative",
    "consistency",
    needs=(REFERENCE,),
    source="TRL: a negative KL to the reference announces failed training",
    suppresses=("reference-kl-high", "kl-penalty-sign"),
    number=56,
)
def kl_reference_negative(log: RunLog) -> Finding | None:
    """Find a KL to the reference that is negative beyond the noise of k1."""
    kl = log[REFERENCE]
    low = NEGATIVE_SEQUENCE if _per_sequence(kl) else NEGATIVE_TOKEN
    found = breach(kl, low=low)
    if found is None or kl.median() > 0.0:
        return None
    return Finding(
        cause=f"completions are not samples of the policy that is scored (decoding settings): "
        f"the KL to the reference is {found.value:.3g}, and no KL is negative",
        level="sick",
        evidence=(
            evidence(
                kl,
                f"{found.value:.3g} nats, below {low:g} in {found.count} of {len(kl)} updates; "
                f"median {kl.median():.3g}",
                found.value,
                threshold=low,
                source="TRL warns below −1 a sequence; a token has 0.01 of it",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "top-k, top-p, a temperature or a minimal length shape what is sampled",
                "sample with temperature 1, top-k 0 and top-p 1: the KL becomes positive",
            ),
            Suspect(
                "padding or tokens after the end are in the sum",
                "sum over the completion's mask only",
            ),
            Suspect(
                "policy and reference are swapped in the difference",
                "print log π − log π_ref of one completion: its mean must be positive",
            ),
        ),
        fix=Fix(
            "Sample from the plain distribution that is scored; log k3, which is never negative.",
            (
                Change("sample.temperature", to=1.0),
                Change("sample.top_p", to=1.0),
                Change("sample.top_k", to=0),
            ),
        ),
        confidence=0.85,
    )


@rule(
    "reference-differs-at-start",
    "consistency",
    needs=(REFERENCE,),
    source="TRL, verl issues: dropout, adapters or another checkpoint as reference",
)
def reference_differs_at_start(log: RunLog) -> Finding | None:
    """Find a reference that is not the model that training starts from."""
    kl = log[REFERENCE]
    first = float(kl.values[0])
    gap = int(np.median(np.diff(kl.step))) if len(kl) > 1 else int(kl.step[0])
    from_start = int(kl.step[0]) <= 2 * gap
    if not log.is_language or _per_sequence(kl) or not from_start or not np.isfinite(first):
        return None
    if first < AT_START or (len(kl) >= LEAST and kl.end() > 5.0 * first and kl.step[0] > 1):
        return None
    return Finding(
        cause=f"the reference is not the model that training started from: the KL to it is "
        f"{first:.3g} nats a token in the first update, where it is about 0",
        level="watch",
        evidence=(
            evidence(
                kl,
                f"{first:.3g} in the first update (step {int(kl.step[0]):,}); {AT_START:g} allowed",
                first,
                threshold=AT_START,
                source="a policy that starts from its reference has a KL of 0 to it",
                onset=int(kl.step[0]),
            ),
        ),
        others=(
            Suspect(
                "the run was resumed, or the reference is another checkpoint on purpose",
                "compare the paths of both models",
            ),
            Suspect(
                "dropout is on while one of them scores",
                "call eval() on both: the first KL becomes 0",
            ),
            Suspect(
                "log-probs are summed over the completion",
                f"divide by the mean length: {first:.3g} becomes small",
            ),
        ),
        fix=Fix(
            "Load the reference from the checkpoint that training starts from, without dropout."
        ),
        confidence=0.6,
    )


@rule(
    "reference-kl-zero",
    "consistency",
    needs=(REFERENCE,),
    source="TRL, verl issues: frozen adapters, adapters baked in, the policy as its own reference",
    rows=LEAST,
    suppresses=("gradient-without-effect", "returns-flat", "nothing-moves", "beta-not-forwarded"),
)
def reference_kl_zero(log: RunLog) -> Finding | None:
    """Find a KL to the reference that stays exactly 0 although there is a gradient."""
    kl = log[REFERENCE]
    known = kl.values[1:]  # the first is 0 by right
    if len(known) < LEAST - 1 or known.any():
        return None
    norm, rate = log.get("train/gradient_norm"), log.get("train/learning_rate")
    if norm is None or norm.median() <= 0.0 or (rate is not None and rate.median() <= 0.0):
        return None
    entropy = log.get("train/entropy")
    moves = entropy is not None and float(np.ptp(entropy.finite)) > 1e-3 * abs(entropy.median())
    trained = log.get("train/kl_exact") or log.get("train/approx_kl")
    moves = moves and (trained is None or trained.median() > 0.0)
    cause = (
        "the reference is the policy itself: their KL is exactly 0 while the policy's entropy moves"
        if moves and trained is not None
        else "the policy never leaves the reference: its adapters are frozen, baked in, or in no "
        "optimizer"
    )
    return Finding(
        cause=f"{cause} ({len(kl)} updates with a KL of 0 and a gradient norm of "
        f"{norm.median():.3g})",
        level="sick",
        evidence=(
            evidence(
                kl,
                f"exactly 0 in {len(kl)} of {len(kl)} updates",
                0.0,
                threshold=LEAST,
                source="a policy that learns leaves its reference",
                onset=int(kl.step[0]),
            ),
            evidence(norm, f"median {norm.median():.3g}: there is something to learn"),
        ),
        others=(
            Suspect(
                "adapters are merged or switched off in the forward pass",
                "print the norm of the adapters before and after one step: it must change",
            ),
            Suspect(
                "reference and policy share their weights",
                "compare id(policy.weight) and id(reference.weight)",
            ),
            Suspect(
                "the KL is switched off, and its metric is 0 by construction",
                "set the coefficient to 0.1: the KL stays exactly 0",
            ),
        ),
        fix=Fix("Check that parameters change in a step, and that the reference is a frozen copy."),
        confidence=0.75,
    )


@rule(
    "kl-penalty-sign",
    "consistency",
    needs=(REFERENCE, "train/loss"),
    source="TRL, verl issues: sign of the KL term",
    rows=8,
    suppresses=("reference-kl-high", "penalty-without-effect", "entropy-collapsed"),
)
def kl_penalty_sign(log: RunLog) -> Finding | None:
    """Find a penalty that drives the policy away: the loss falls as the KL grows."""
    coef = coefficient(log)
    if coef == 0.0:
        return None
    kl, loss = paired(log, REFERENCE, "train/loss")
    coef = abs(coef)  # a negative one is the wrong sign
    if len(kl) < 8 or trend(kl).p > SURE or kl.end() < 5.0 * max(kl.start(), 0.01):
        return None
    change, expected = loss.end() - loss.start(), coef * (kl.end() - kl.start())
    spreads = float(np.ptp(kl.values)), float(np.ptp(loss.values))
    if min(spreads) == 0.0 or not np.isfinite(change) or expected <= 0.0:
        return None
    together = float(np.corrcoef(kl.values, loss.values)[0, 1])
    if together > -0.8 or not -2.0 < change / expected < -0.5:
        return None
    return Finding(
        cause="the KL penalty has the wrong sign: the loss falls by "
        f"{-change:.3g} while the KL to the reference grows from {kl.start():.3g} to "
        f"{kl.end():.3g}, which is −β × its growth ({coef:g} × {kl.end() - kl.start():.3g} = "
        f"{expected:.3g})",
        level="sick",
        evidence=(
            evidence(
                kl,
                f"{kl.start():.3g} at the start, {kl.end():.3g} at the end; correlation with the "
                f"loss {together:.2g}",
                kl.end(),
                threshold=5.0 * max(kl.start(), 0.01),
                source="with the right sign the loss grows by β × KL",
                onset=int(kl.step[0]),
            ),
        ),
        others=(
            Suspect(
                "the reward pulls harder than the penalty, and the loss falls for it",
                "raise β tenfold: with the right sign the KL falls",
            ),
            Suspect(
                "the gradient of k1 in the loss is taken, which is 0 in expectation",
                "use k2, or k3, as the loss: the KL falls",
            ),
        ),
        fix=Fix("Add β × KL to the loss that is minimized (subtract it from the reward)."),
        confidence=0.75,
    )


@rule(
    "penalty-without-effect",
    "consistency",
    needs=("train/kl_coef", f"{REFERENCE}|train/kl_requested|train/kl_exact|train/approx_kl"),
    source="research notes, N4: .item() or a clamp; RLlib #18492: a coefficient without bounds",
    rows=8,
    suppresses=("coefficient-runs-away",),
    number=58,
)
def penalty_without_effect(log: RunLog) -> Finding | None:
    """Find a coefficient that a controller keeps raising, and a KL that does not answer."""
    coef = log["train/kl_coef"]
    kl = log[REFERENCE] if REFERENCE in log else update_kl(log)
    positive = coef.values[coef.values > 0.0]
    if len(positive) < 8 or len(kl) < 8:
        return None
    growth = float(positive[-1] / positive[0])
    stays = kl.end() >= STILL * kl.start() and kl.end() > 0.0
    rising = positive[-1] > RISING * positive[int(0.8 * len(positive))]
    if growth < WIND_UP or not rising or trend(coef).p > SURE or not stays:
        return None
    return Finding(
        cause=f"the KL penalty has no gradient: its coefficient grew {growth:.3g}-fold to "
        f"{positive[-1]:.3g}, and the KL went from {kl.start():.3g} to {kl.end():.3g}",
        level="sick",
        evidence=(
            evidence(
                coef,
                f"{positive[0]:.3g} to {positive[-1]:.3g}: {growth:.3g} × as large",
                float(positive[-1]),
                threshold=WIND_UP * float(positive[0]),
                source=f"a penalty that is {WIND_UP:g} × as strong lowers what it penalizes",
                onset=int(coef.step[0]),
            ),
            evidence(
                kl,
                f"{kl.start():.3g} at the start, {kl.end():.3g} at the end",
                kl.end(),
                threshold=STILL * kl.start(),
            ),
        ),
        others=(
            Suspect(
                "the coefficient is still too small against the reward",
                f"{positive[-1]:.3g} × {kl.end():.3g} = {positive[-1] * kl.end():.3g}: compare it "
                "with the policy loss",
            ),
            Suspect(
                "the controller aims at another unit (sequence against token)",
                "compare its target with the KL in the log",
            ),
        ),
        fix=Fix(
            "Keep the penalty differentiable (no .item(), no clamp at 0), and bound the "
            "coefficient."
        ),
        confidence=0.65,
    )
