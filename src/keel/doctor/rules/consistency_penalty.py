"""Does the KL penalty reach the loss?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.consistency_reference import LEAST, REFERENCE, coefficient
from keel.doctor.rules.measures import percent, share_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align


@rule(
    "beta-not-forwarded",
    "consistency",
    needs=(REFERENCE, "train/loss"),
    source="TRL, verl, ms-swift issues: β not forwarded",
    rows=LEAST,
)
def beta_not_forwarded(log: RunLog) -> Finding | None:
    """Find a coefficient of the KL penalty that does not reach the loss."""
    coef = coefficient(log)
    policy = _policy_loss(log)
    if coef <= 0.0 or policy is None:
        return None
    loss, policy = align(log["train/loss"], policy)
    kl, loss = align(log[REFERENCE], loss)
    policy, _ = align(policy, loss)
    if len(loss) < LEAST:
        return None
    penalty = coef * kl.values
    told = penalty > 1e-6 + 0.01 * np.abs(policy.values)
    missing = told & (np.abs(loss.values - policy.values) < 1e-3 * penalty)
    if missing.sum() < LEAST or share_of(missing) < 0.8:
        return None
    return Finding(
        cause=f"the KL penalty is not in the loss: its coefficient is {coef:g} and the KL to the "
        f"reference {kl.end():.3g}, yet {loss.label} equals {policy.label}",
        level="sick",
        evidence=(
            evidence(
                loss,
                f"loss − policy loss = {float(np.median(loss.values - policy.values)):.3g}, where "
                f"{coef:g} × {kl.end():.3g} = {coef * kl.end():.3g} is missing, in "
                f"{percent(share_of(missing))} of the updates",
                float(np.median(loss.values - policy.values)),
                threshold=coef * kl.end(),
                source="loss = policy loss + β × KL(π‖reference)",
                onset=int(loss.step[np.flatnonzero(missing)[0]]),
            ),
        ),
        others=(
            Suspect(
                "the penalty is part of the reward in place of the loss",
                "set β to 0: rewards change where it is",
            ),
            Suspect(
                "the policy loss has the penalty in it already",
                "set β tenfold: the policy loss grows with it",
            ),
        ),
        fix=Fix("Forward β to the loss.", (Change("kl.place", to="loss"),)),
        confidence=0.75,
    )


def _policy_loss(log: RunLog) -> Series | None:
    """Return the loss without the penalty; of one step on centred advantages it is 0."""
    if "train/policy_loss" in log:
        return log["train/policy_loss"]
    if log.framework != "trl" or log.setting("region.epochs", 1.0) != 1.0:
        return None
    loss = log["train/loss"]
    return replace(loss, name="train/policy_loss", label="0", values=np.zeros(len(loss)))
