"""TRPO: line search, natural step, conjugate gradient, and how well the quadratic model holds."""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.measures import OUTCOMES, improves, onset_of, percent, share_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach, breach_where

OVER = 20
"""Updates that a share is taken over (research notes, N2)."""
FEW = 0.3
VANISHED = 0.05
GAIN = (0.25, 3.0)
"""Actual over predicted improvement. The line search accepts from 0.1 on, so that a median below
0.25 is a model that does not hold; healthy runs of Keel have 0.87 to 0.99, with a bound of 2 nats
0.15."""
RESIDUAL = 0.8
"""What conjugate gradient may leave over: healthy runs of Keel on Hopper reach 0.4."""
BATCH = 512
"""Rows of a batch of TRPO: ideally 2,048 and more (research notes, N0 and 54)."""


def _lowest_mean(series: Series) -> float:
    """Return the lowest mean of `OVER` values in a row, of all if there are fewer."""
    if len(series) <= OVER:
        return float(series.values.mean())
    sums = np.cumsum(np.concatenate([[0.0], series.values]))
    return float((sums[OVER:] - sums[:-OVER]).min() / OVER)


def _newest_mean(series: Series) -> float:
    return float(series.values[-OVER:].mean())


@rule(
    "line-search-fails",
    "trust region",
    needs=("train/line_search_success",),
    source="research notes, N2: below 30 % over 20 updates",
    rows=10,
    suppresses=(
        "step-vanishes",
        "gain-ratio-off",
        "steps-too-small",
        "rejected-logged-as-zero",
        *OUTCOMES,
    ),
    number=16,
)
def line_search_fails(log: RunLog) -> Finding | None:
    """Find line searches that hardly ever accept a step."""
    success = log["train/line_search_success"]
    newest, lowest = _newest_mean(success), _lowest_mean(success)
    value = newest if newest < FEW else lowest
    if not value < FEW or not (success.values < 0.5).any():
        return None
    batch = _batch(log)
    small = batch is not None and batch < BATCH
    entropy = (log.setting("explore.entropy_coef") or 0.0) > 0.0
    predicted, tried = log.get("train/improvement_predicted"), log.get("train/kl_tried")
    promised = predicted is not None and predicted.median() > 0.0
    if small:
        why = f"the batch of {batch:g} rows is too small for a direction"
    elif entropy and promised:
        why = "what is accepted is another objective than what the gradient is of"
    else:
        why = "the direction is noise, or its objective is not the one that is accepted"
    span = min(OVER, len(success))
    parts = [
        evidence(
            success,
            f"{percent(value)} over {span} updates; {percent(FEW)} is the least",
            value,
            threshold=FEW,
            source="research notes, N2: below 30 % for long is sick",
            onset=onset_of(success, success.values < 0.5),
        )
    ]
    if tried is not None:
        parts.append(evidence(tried, f"the first length tried has {tried.median():.3g} nats"))
    return Finding(
        cause=f"line searches fail: {percent(value)} of {span} updates found an acceptable step; "
        f"{why}",
        level="sick" if newest < FEW else "watch",
        evidence=tuple(parts),
        others=(
            Suspect(
                "gradient and acceptance use different objectives (entropy bonus, penalty)",
                "set the entropy coefficient to 0: searches succeed",
            ),
            Suspect(
                "the batch is too small, its gradient is noise",
                "four times the rollout: searches succeed",
            ),
            Suspect("the Fisher-vector product is wrong", "tenfold damping: searches succeed"),
        ),
        fix=_search_fix(small, entropy and promised),
        confidence=0.75,
    )


def _search_fix(small: bool, two_objectives: bool) -> Fix:
    """Return what lets line searches succeed again."""
    if small:
        return Fix("Use a larger rollout.", (Change("rollout_steps", times=4.0),))
    if two_objectives:
        return Fix(
            "Accept what the gradient is of, entropy bonus included; until the code does, train "
            "without the bonus.",
            (Change("explore.entropy_coef", to=0.0),),
        )
    return Fix(
        "Accept what the gradient is of; tighten the bound, raise the damping.",
        (Change("region.max_kl", times=0.5), Change("natural.damping", times=2.0)),
    )


@rule(
    "step-vanishes",
    "trust region",
    needs=("train/step_fraction",),
    source="research notes, N2: step fraction to 0",
    rows=10,
    suppresses=("gain-ratio-off",),
    number=17,
)
def step_vanishes(log: RunLog) -> Finding | None:
    """Find accepted steps that shrink to nothing."""
    fraction = log["train/step_fraction"]
    success = log.get("train/line_search_success")
    if success is not None and _newest_mean(success) < FEW:
        return None  # `line-search-fails` names that
    value = _newest_mean(fraction)
    if value >= VANISHED:
        return None
    return Finding(
        cause=f"steps shrink to {percent(value)} of the length at the bound: the curvature that "
        "the step was computed with is not that of the objective",
        level="sick",
        evidence=(
            evidence(
                fraction,
                f"mean {value:.3g} over the last {min(OVER, len(fraction))} updates",
                value,
                threshold=VANISHED,
                source="registry: near 0 for long is sick",
                onset=onset_of(fraction, fraction.values < VANISHED),
            ),
        ),
        others=(
            Suspect("too few rows for the Fisher matrix", "take all rows: the fraction rises"),
            Suspect("conjugate gradient stops early", "log its residual; double the iterations"),
        ),
        fix=Fix(
            "Raise the damping and take more rows.",
            (Change("natural.damping", times=3.0), Change("natural.fisher_fraction", to=1.0)),
        ),
        confidence=0.75,
    )


@rule(
    "curvature-not-positive",
    "trust region",
    needs=("train/curvature|train/curvature_min",),
    source="research notes, N2: xᵀFx ≤ 0; the Fisher matrix is positive semidefinite",
    suppresses=("line-search-fails", "step-vanishes", "gain-ratio-off", "conjugate-gradient-stops"),
    number=18,
)
def curvature_not_positive(log: RunLog) -> Finding | None:
    """Find directions in which the Fisher matrix has no positive curvature."""
    for name in ("train/curvature", "train/curvature_min"):
        series = log.get(name)
        if series is None:
            continue
        outside = (series.values <= 0.0) | np.isinf(series.values)
        found = breach_where(series, outside)
        if found is None:
            continue
        return Finding(
            cause=f"the Fisher-vector product is wrong or too little damped: xᵀFx is "
            f"{found.value:.3g}, and a Fisher matrix has none below 0",
            level="sick",
            evidence=(
                evidence(
                    series,
                    f"{found.value:.3g} in {found.count} of {len(series)} updates",
                    found.value,
                    threshold=0.0,
                    source="F = E[∇ log π ∇ log πᵀ] is positive semidefinite",
                    onset=found.onset,
                ),
            ),
            others=(
                Suspect(
                    "the KL whose Hessian is taken is not at its minimum (old ≠ current policy)",
                    "its gradient at the start must be 0",
                ),
                Suspect("float32 cancels", "take the product in float64: it is positive"),
                Suspect("the gradient is exactly 0", "log the norm of the policy's gradient"),
            ),
            fix=Fix(
                "Check F·v against finite differences.", (Change("natural.damping", times=10.0),)
            ),
            confidence=0.8,
        )
    return None


@rule(
    "conjugate-gradient-stops",
    "trust region",
    needs=("train/cg_residual",),
    source="research notes, N2: residual of conjugate gradient",
    rows=5,
    number=18,
)
def conjugate_gradient_stops(log: RunLog) -> Finding | None:
    """Find a system that conjugate gradient hardly solves, where steps suffer from it."""
    residual = log["train/cg_residual"]
    found = breach(residual, high=RESIDUAL, lasting=0.5)
    if found is None:
        return None
    success, gain = log.get("train/line_search_success"), log.get("train/gain_ratio")
    suffers = (success is not None and _newest_mean(success) < 0.7) or (
        gain is not None and gain.median() < GAIN[0]
    )
    return Finding(
        cause=f"conjugate gradient does not solve for the natural step: {percent(found.value)} of "
        "the right-hand side is left over" + (", and steps suffer" if suffers else ""),
        level="sick" if suffers else "watch",
        evidence=(
            evidence(
                residual,
                f"‖b − Fx‖ / ‖b‖ = {found.value:.3g} in {found.count} of {len(residual)} updates",
                found.value,
                threshold=RESIDUAL,
                source="Keel: healthy runs reach 0.4",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect("the matrix is badly conditioned", "tenfold damping: the residual falls"),
            Suspect(
                "the Fisher-vector product is wrong",
                "compare it with finite differences of the KL's gradient",
            ),
        ),
        fix=Fix(
            "More iterations, or more damping.",
            (Change("natural.cg_iters", times=2.0), Change("natural.damping", times=3.0)),
        ),
        confidence=0.65,
    )


@rule(
    "gain-ratio-off",
    "trust region",
    needs=("train/gain_ratio",),
    source="trust-region methods (Conn, Gould, Toint); Keel, calibrated",
    rows=5,
    number=20,
)
def gain_ratio_off(log: RunLog) -> Finding | None:
    """Find steps that bring much less, or more, than was predicted."""
    gain = log["train/gain_ratio"]
    low, high = GAIN
    typical = gain.median()
    if low <= typical <= high:
        return None
    outside = (gain.values < low) | (gain.values > high)
    if share_of(outside) < 0.5:
        return None
    bound = log.setting("region.max_kl")
    told = "" if bound is None else f" (max_kl {bound:g})"
    return Finding(
        cause=f"the quadratic model of the step does not hold{told}: steps bring {typical:.3g} × "
        "what was predicted",
        level="watch",
        evidence=(
            evidence(
                gain,
                f"median {typical:.3g}; outside of [{low:g}, {high:g}] in "
                f"{percent(share_of(outside))} of {len(gain)} updates",
                typical,
                threshold=low if typical < low else high,
                source="Keel: 0.87 to 0.99 in healthy runs; a line search accepts from 0.1 on",
                onset=onset_of(gain, outside),
            ),
        ),
        others=(
            Suspect(
                "the bound is too wide for a linear objective",
                "halve max_kl: the ratio comes nearer to 1",
            ),
            Suspect(
                "prediction and measurement are of different objectives",
                "at a hundredth of the step the ratio must be 1",
            ),
        ),
        fix=Fix("Tighten the bound.", (Change("region.max_kl", times=0.3),)),
        confidence=0.7,
    )


@rule(
    "trpo-batch-small",
    "trust region",
    needs=("train/line_search_success", "setting:rollout_steps", "setting:envs.num"),
    source="Schulman, nuts and bolts: TRPO needs batches of 100,000 on pixels at a KL of 0.01",
    rows=10,
    suppresses=("rollouts-tiny",),
    number=19,
)
def trpo_batch_small(log: RunLog) -> Finding | None:
    """Find TRPO on so few rows that its one step an update follows noise."""
    batch, success = _batch(log), log["train/line_search_success"]
    if batch is None or batch >= BATCH or log.is_language:
        return None
    returns = log.get("rollout/return_mean")
    if returns is not None and improves(returns):
        return None  # few rows suffice here
    return Finding(
        cause=f"TRPO makes one step from {batch:g} rows: noise outweighs the gradient",
        level="watch",
        evidence=(
            evidence(
                success,
                f"{batch:g} rows a batch; {percent(float(success.values.mean()))} of the searches "
                "succeed, which says nothing of rows that were not seen",
                batch,
                threshold=BATCH,
                source="research notes: at least 512, ideally 2,048",
                onset=int(success.step[0]),
            ),
        ),
        others=(
            Suspect(
                "the task is so simple that few rows suffice",
                "compare the return with one of a batch of 2,048 after as many steps",
            ),
        ),
        fix=Fix(
            "Collect longer rollouts.",
            (Change("rollout_steps", times=float(np.ceil(2048 / max(batch, 1.0)))),),
        ),
        confidence=0.65,
    )


def _batch(log: RunLog) -> float | None:
    """Return the rows of a rollout, where the settings say."""
    steps, envs = log.setting("rollout_steps"), log.setting("envs.num")
    return None if steps is None or envs is None else steps * envs
