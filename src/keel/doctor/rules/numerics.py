"""Are the numbers finite? Losses, gradients, ratios and rewards, and metrics that turn into NaN.

A log keeps no NaN as a value: a metric that is there in every update and then no more has become
one, while its neighbors go on.
"""

from __future__ import annotations

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.consistency import REGION
from keel.doctor.rules.measures import OUTCOMES, onset_of, present, spacing
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, align

LOSSES = (
    "train/loss",
    "train/policy_loss",
    "train/value_loss",
    "train/entropy",
    "train/approx_kl",
    "train/kl_exact",
)
"""Metrics that are numbers in every update."""
GRADIENT = "train/gradient_norm"
REWARDS = (
    "rollout/reward_mean",
    "rollout/return_mean",
    "rollout/reward_abs_max",
    "eval/return_mean",
)
RATIOS = (
    "error/non_finite_ratio_count",
    "error/non_finite_ratio_frac",
    "warn/ratio_all_nonfinite",
)
GONE = 3
"""Updates without a value that stood in all before."""
EXPLODES, FACTOR = 10.0, 100.0
"""k3 in nats, and times the size of k1 or the exact KL, that only exp of few rows gives."""
FOLLOWS = (*REGION, *OUTCOMES, "gradient-vanishes", "value-targets-large", "critic-dominates")


def turned_nan(log: RunLog, series: Series) -> int | None:
    """Return the step after which a metric that stood in every update is there no more.

    Args:
        log: The log, whose last step tells how far it goes.
        series: The metric.
    """
    step = spacing(series)
    if len(series) < GONE or not step > 0:
        return None
    even = float(np.max(np.diff(series.step))) <= 1.5 * step
    others = [
        other
        for name, other in log.series.items()
        if name.startswith(("train/", "rollout/"))
        and len(other) >= len(series) + GONE
        and 0.5 <= spacing(other) / step <= 1.5
    ]
    if not even or len(others) < 1 or log.last_step - int(series.step[-1]) < GONE * step:
        return None
    return int(series.step[-1])


@rule(
    "rewards-non-finite",
    "numerics",
    needs=("|".join(REWARDS),),
    source="rsl_rl and IsaacLab issues: infinities from sensors in rewards",
    suppresses=("loss-non-finite", "gradients-non-finite", "ratios-non-finite", *FOLLOWS),
    number=15,
)
def rewards_non_finite(log: RunLog) -> Finding | None:
    """Find rewards that are infinite."""
    for series in present(log, REWARDS):
        infinite = np.isinf(series.values)
        if not infinite.any():
            continue
        return Finding(
            cause=f"the environment gives infinite rewards: {series.label} is "
            f"{float(series.values[infinite][0]):g} since step {onset_of(series, infinite):,}",
            level="sick",
            evidence=(
                evidence(
                    series,
                    f"infinite in {int(infinite.sum())} of {len(series)} values",
                    float(series.values[infinite][-1]),
                    source="a return is a finite number",
                    onset=onset_of(series, infinite),
                ),
            ),
            others=(
                Suspect(
                    "a sensor or a division by 0 in the reward",
                    "assert np.isfinite(reward) in step(), and print the observation",
                ),
                Suspect(
                    "the simulation blew up because of huge actions",
                    "clip actions to the action space: rewards stay finite",
                ),
            ),
            fix=Fix(
                "Stop at the first reward that is not finite, and bound what feeds it.",
                (Change("envs.guard", to=True),),
            ),
            confidence=0.9,
        )
    return None


@rule(
    "loss-non-finite",
    "numerics",
    needs=("|".join(LOSSES),),
    source="research notes, N1: overflow, bad mask; TRL, rsl_rl issues",
    suppresses=("gradients-non-finite", *FOLLOWS),
    number=15,
)
def loss_non_finite(log: RunLog) -> Finding | None:
    """Find losses, entropies or KL that are infinite or have become NaN."""
    broken: list[tuple[int, Series, str]] = []
    for series in present(log, LOSSES):
        infinite = np.isinf(series.values)
        if infinite.any():
            broken.append((onset_of(series, infinite), series, "is infinite"))
        elif (last := turned_nan(log, series)) is not None:
            broken.append((last, series, "is NaN, or not written any more,"))
    if not broken:
        return None
    step, first, how = min(broken, key=lambda entry: entry[0])
    gradient = log.get(GRADIENT)
    rising = gradient is not None and _rises_before(gradient, step)
    names = ", ".join(sorted({series.label for _, series, _ in broken}))
    return Finding(
        cause=f"{first.label} {how} since step {step:,}"
        + (": the gradient grew before, so the updates diverged" if rising else "")
        + (f"; with it {names}" if len(broken) > 1 else ""),
        level="sick",
        evidence=tuple(
            evidence(
                series,
                f"{how} from step {at:,} on; the last finite value is "
                f"{series.finite[-1] if len(series.finite) else float('nan'):.4g}",
                source="a number in every update",
                onset=at,
            )
            for at, series, how in sorted(broken, key=lambda entry: entry[0])[:3]
        ),
        others=(
            Suspect(
                "the learning rate is too high: log-probs or values overflow",
                "train again with a tenth of it: the loss stays finite",
            ),
            Suspect(
                "an action with probability 0 in one of the two distributions (mask)",
                "look for log-probs of −inf in the batch at that step",
            ),
            Suspect(
                "a standard deviation that is a raw parameter went below 0, or to 0",
                "log the smallest standard deviation before that step",
            ),
        ),
        fix=Fix(
            "Halt at the first value that is not finite and keep the batch; lower the learning "
            "rate.",
            (Change("region.learning_rate", times=0.1),) if rising else (),
        ),
        confidence=0.8 if rising else 0.75,
    )


def _rises_before(series: Series, step: int) -> bool:
    """Return whether a metric was ten times its usual size just before a step."""
    before = series.values[series.step <= step]
    if len(before) < 2 * GONE:
        return False
    early, late = float(np.median(before[:-GONE])), float(np.max(before[-GONE:]))
    return late > 10.0 * early > 0.0


@rule(
    "gradients-non-finite",
    "numerics",
    needs=(f"train/non_finite_gradients|{GRADIENT}",),
    source="public issues: 0·inf in the backward pass of a branch that is not selected",
    suppresses=FOLLOWS,
    number=15,
)
def gradients_non_finite(log: RunLog) -> Finding | None:
    """Find gradients that are not finite although the loss is."""
    counted, norm = log.get("train/non_finite_gradients"), log.get(GRADIENT)
    onset, series, text = None, counted, ""
    if counted is not None and (counted.values > 0.0).any():
        onset = onset_of(counted, counted.values > 0.0)
        text = f"{float(counted.values[counted.values > 0.0].sum()):g} steps were not applied"
    elif norm is not None and np.isinf(norm.values).any():
        onset, series = onset_of(norm, np.isinf(norm.values)), norm
        text = f"infinite in {int(np.isinf(norm.values).sum())} of {len(norm)} updates"
    elif norm is not None and (last := turned_nan(log, norm)) is not None:
        onset, series, text = last, norm, f"NaN, or not written any more, after step {last:,}"
    if onset is None or series is None:
        return None
    loss = log.get("train/loss") or log.get("train/policy_loss")
    after = loss is not None and bool(np.isfinite(loss.values[loss.step >= onset]).any())
    once = series is counted and (counted.values > 0.0).sum() < GONE
    return Finding(
        cause="the gradient is not finite while the loss is: 0 · inf in the backward pass of a "
        f"branch that is not selected (torch.where, masks of −inf); {text}"
        if after
        else f"the gradient is not finite since step {onset:,}: {text}",
        level="watch" if once else "sick",
        evidence=(
            evidence(
                series,
                text,
                source="Keel: 0",
                threshold=0.0 if series is counted else None,
                onset=onset,
            ),
        ),
        others=(
            Suspect(
                "values overflow: the norm grows for some updates before",
                "train with a tenth of the learning rate: the gradient stays finite",
            ),
            Suspect(
                "sqrt, log or division at exactly 0",
                "torch.autograd.set_detect_anomaly(True) names the operation",
            ),
        ),
        fix=Fix(
            "Replace the operand before the operation (where(mask, x, 1).log()), not its result; "
            "skip steps whose gradient is not finite."
        ),
        confidence=0.8,
    )


@rule(
    "ratios-non-finite",
    "numerics",
    needs=("|".join(RATIOS),),
    source="research notes, N0 and N1: log-prob −inf, dropped samples",
    suppresses=("loss-non-finite", "gradients-non-finite", "ratios-extreme", "k3-explodes"),
    number=5,
)
def ratios_non_finite(log: RunLog) -> Finding | None:
    """Find samples whose ratio is not finite."""
    for series in present(log, RATIOS):
        outside = series.values > 0.0
        if not outside.any():
            continue
        value = float(series.values[outside].max())
        return Finding(
            cause="samples have a log-prob of −inf: the policy that is trained gives actions that "
            f"were taken the probability 0 ({series.label} up to {value:.3g})",
            level="sick",
            evidence=(
                evidence(
                    series,
                    f"up to {value:.3g}, above 0 in {int(outside.sum())} of {len(series)} updates",
                    value,
                    threshold=0.0,
                    source="Keel: 0; a sample that is dropped breaks the advantages around it",
                    onset=onset_of(series, outside),
                ),
            ),
            others=(
                Suspect(
                    "the mask of training forbids actions that sampling allowed",
                    "count sampled actions that their stored mask forbids",
                ),
                Suspect(
                    "logits overflow in half precision",
                    "compute log-probs in float32: the ratios are finite",
                ),
            ),
            fix=Fix("Keep the mask that sampled with each row; take log-softmax in float32."),
            confidence=0.85,
        )
    return None


@rule(
    "action-std-negative",
    "numerics",
    needs=("train/action_std",),
    source="rsl_rl and IsaacLab issues: std as a raw parameter",
    suppresses=("loss-non-finite", "entropy-collapsed"),
)
def action_std_negative(log: RunLog) -> Finding | None:
    """Find a standard deviation of the actions that is not positive, or not finite."""
    std = log["train/action_std"]
    outside = (std.values <= 0.0) | np.isinf(std.values)
    if not outside.any():
        return None
    value = float(std.values[outside][0])
    return Finding(
        cause=f"the standard deviation of the actions is a raw parameter: the optimizer moved "
        f"it to {value:.3g}, where no Gaussian exists",
        level="sick",
        evidence=(
            evidence(
                std,
                f"{value:.4g} at step {onset_of(std, outside):,}; the smallest before was "
                f"{float(np.min(std.values[~outside], initial=np.inf)):.3g}",
                value,
                threshold=0.0,
                source="a Gaussian has a standard deviation above 0",
                onset=onset_of(std, outside),
            ),
        ),
        others=(
            Suspect(
                "its logarithm is logged",
                f"take exp of it: {np.exp(min(value, 50.0)):.3g} should be plausible",
            ),
        ),
        fix=Fix("Learn log σ (or softplus) in place of σ, with a floor."),
        confidence=0.8,
    )


@rule(
    "k3-explodes",
    "numerics",
    needs=("train/approx_kl", "train/kl_exact|train/kl_k1|train/clip_fraction"),
    source="TRL and verl issues: k3 of 1e6, exp on few tokens",
    suppresses=("kl-over-target", "kl-spikes", "learning-rate-too-high", "clip-does-not-bound"),
    number=12,
)
def k3_explodes(log: RunLog) -> Finding | None:
    """Find an estimate that few rows with a huge ratio make, while the others hardly moved."""
    k3 = log["train/approx_kl"]
    other = present(log, ("train/kl_exact", "train/kl_k1", "train/clip_fraction"))[0]
    k3, other = align(k3, other)
    size = np.abs(other.values)
    if other.name == "train/clip_fraction":
        outside = (k3.values > EXPLODES) & (size < 0.05)
    else:
        outside = (k3.values > EXPLODES) & (k3.values > FACTOR * size)
    if not outside.any():
        return None
    value = float(k3.values[outside].max())
    at = int(np.flatnonzero(outside & (k3.values == value))[0])
    return Finding(
        cause=f"few rows or tokens make the whole KL: k3 is {value:.3g}, by exp of their log "
        f"ratio, and {other.label} is {other.values[at]:.3g}",
        level="watch" if outside.sum() < 3 else "sick",
        evidence=(
            evidence(
                k3,
                f"{value:.3g} beside {other.label} {other.values[at]:.3g}, in "
                f"{int(outside.sum())} of {len(k3)} updates",
                value,
                threshold=EXPLODES,
                source=f"k3 = r − 1 − log r: {EXPLODES:g} and {FACTOR:g} × the other measure",
                onset=onset_of(k3, outside),
            ),
        ),
        others=(
            Suspect(
                "those tokens are padding, or after the end",
                "print the ten largest |log ratio| with their tokens and the mask",
            ),
            Suspect(
                "the sampler gave them log-probs of rounding (bf16, top-k renormalized)",
                "score them again in float32 with the trainer: the ratio is near 1",
            ),
        ),
        fix=Fix(
            "Use the exact KL or k2; keep the clamp of the log-ratio, and find those tokens.",
            (Change("region.kl_measure", to="exact"),),
        ),
        confidence=0.7,
    )
