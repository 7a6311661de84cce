"""Does the sampler of a language model have the trainer's weights and its log-probs?

The gap is the mean |log-prob of the sampler − log-prob of the trainer| per token. Its course
over time tells the cause: a jump that stays, growth from the start, or a constant.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import rule
from keel.doctor.rules.consistency import REGION
from keel.doctor.rules.measures import OUTCOMES, paired, percent, share_of
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, breach, spread, trend

GAP = "train/sampler_gap"
BF16 = 0.05
"""Mean gap that bf16 explains: 0.03 nats RMS in public issues, float32 0.002."""
CLEAR = 0.1
"""A mean gap that no rounding explains; verl's documentation allows a KL of 0.1."""
JUMP = 3.0
GROWTH = 3.0
SURE = 0.01
"""p-value of a trend."""
ERROR, RATIO = (0.95, 1.05), (0.5, 2.0)
"""NeMo-RL: a multiplicative error (`token_mult_prob_error`) above 1.05 is the framework's fault;
verl's documentation: the mean importance weight lies between 0.5 and 2."""


class Jump(NamedTuple):
    """A level that changes once and stays."""

    step: int
    before: float
    after: float


def find_jump(series: Series, least: int = 3) -> Jump | None:
    """Return the jump of a series to a higher level that it does not leave again.

    Args:
        series: The values.
        least: Values that must stand on either side.
    """
    values = series.values
    if len(values) < 2 * least:
        return None
    tops = np.maximum.accumulate(values)[:-1]
    lows = np.minimum.accumulate(values[::-1])[::-1][1:]
    gaps = (lows - tops)[least - 1 : len(values) - least]
    at = least - 1 + int(np.argmax(np.nan_to_num(gaps, nan=-np.inf)))
    if not lows[at] > tops[at]:
        return None
    before, after = float(np.median(values[: at + 1])), float(np.median(values[at + 1 :]))
    return Jump(int(series.step[at + 1]), before, after)


def _is_jump(series: Series) -> Jump | None:
    """Return the jump of a gap, if it is one and not steady growth."""
    jump = find_jump(series)
    if jump is None or jump.after < max(JUMP * jump.before, BF16):
        return None
    after = series.values[series.step >= jump.step]
    first = float(after[0])
    return jump if first > jump.before + 0.5 * (jump.after - jump.before) else None


@rule(
    "sampler-stale",
    "consistency",
    needs=(GAP,),
    source="TRL, verl, OpenRLHF issues: weights of the sampler not updated",
    rows=6,
    suppresses=(
        "sampler-gap-grows",
        "sampler-gap-constant",
        "sampler-ratio-off",
        *REGION,
        *OUTCOMES,
    ),
)
def sampler_stale(log: RunLog) -> Finding | None:
    """Find a gap that jumps and stays: the sampler stopped getting weights."""
    gap = log[GAP]
    jump = _is_jump(gap)
    if jump is None:
        return None
    return Finding(
        cause=f"the sampler has had stale weights since step {jump.step:,}: its log-probs differ "
        f"from the trainer's by {jump.after:.3g} a token, before that by {jump.before:.3g}, and "
        "they have not come back",
        level="sick",
        evidence=(
            evidence(
                gap,
                f"{jump.before:.3g} before step {jump.step:,}, {jump.after:.3g} since: "
                f"{jump.after / max(jump.before, 1e-12):.3g} × as large",
                jump.after,
                threshold=max(JUMP * jump.before, BF16),
                source=f"{JUMP:g} × the level before; bf16 explains {BF16:g}",
                onset=jump.step,
            ),
        ),
        others=(
            Suspect(
                "sampling settings changed at that step (temperature, top-p)",
                "compare the configuration and the run's restarts around it",
            ),
            Suspect(
                "the sampler was restarted with other kernels or another data type",
                "score one batch with both engines before training: the gap is there at once",
            ),
        ),
        fix=Fix(
            "Send the weights to the sampler before every rollout, and log a checksum of both."
        ),
        confidence=0.85,
    )


@rule(
    "sampler-gap-grows",
    "consistency",
    needs=(GAP,),
    source="TRL, verl issues: adapters that are not part of the sync; rotary settings",
    rows=8,
    suppresses=("sampler-gap-constant", "sampler-ratio-off", *REGION, *OUTCOMES),
)
def sampler_gap_grows(log: RunLog) -> Finding | None:
    """Find a gap that grows from the start: the sampler never gets the new weights."""
    gap = log[GAP]
    start, end = gap.start(), gap.end()
    found = trend(gap)
    if found.p > SURE or end < max(GROWTH * start, BF16) or _is_jump(gap):
        return None
    longer = _grows_with_length(log)
    cause = (
        "sampler and trainer disagree more the longer completions are (positions, rotary settings "
        "or padding)"
        if longer
        else "the sampler never gets the trainer's new weights (an adapter or a part that is not "
        "synchronized)"
    )
    return Finding(
        cause=f"{cause}: the gap of their log-probs grows from {start:.3g} to {end:.3g} a token",
        level="sick",
        evidence=(
            evidence(
                gap,
                f"{start:.3g} at the start, {end:.3g} at the end: "
                f"{end / max(start, 1e-12):.3g} × as large (Mann–Kendall p = {found.p:.1g})",
                end,
                threshold=max(GROWTH * start, BF16),
                source=f"{GROWTH:g} × the start; bf16 explains {BF16:g}",
                onset=int(gap.step[0]),
            ),
        ),
        others=(
            Suspect(
                "updates between two synchronizations become larger",
                "synchronize before every rollout: the gap stays",
            )
            if longer
            else Suspect(
                "positions or rotary settings differ, and completions grow longer",
                "plot the gap by position in the completion: it grows with it",
            ),
            Suspect(
                "the policy becomes sharper, and rounding shows more",
                "score with float32 in both: the gap falls tenfold",
            ),
        ),
        fix=Fix("Compare a checksum of every weight, adapters merged, in sampler and trainer."),
        confidence=0.75,
    )


def _grows_with_length(log: RunLog) -> bool:
    """Return whether completions grow longer and the gap goes with them."""
    if "rollout/length_mean" not in log:
        return False
    gap, length = paired(log, GAP, "rollout/length_mean")
    if len(gap) < 8 or length.end() < 1.3 * length.start() or trend(length).p > SURE:
        return False
    steps = np.diff(np.log(np.maximum(gap.values, 1e-9))), np.diff(length.values)
    if min(np.ptp(steps[0]), np.ptp(steps[1])) == 0.0:
        return False
    return float(np.corrcoef(*steps)[0, 1]) > 0.5


@rule(
    "sampler-gap-constant",
    "consistency",
    needs=(GAP,),
    source="TRL, verl issues: raw against processed log-probs; verl's documentation (|KL| ≤ 0.1)",
    suppresses=("sampler-ratio-off", *REGION),
)
def sampler_gap_constant(log: RunLog) -> Finding | None:
    """Find a gap that is large from the first update on: another distribution is scored."""
    gap = log[GAP]
    if gap.median() < CLEAR or gap.start() < CLEAR or _is_jump(gap):
        return None
    steady = len(gap) < 5 or spread(gap.finite) < 0.5 * gap.median()
    if not steady or (trend(gap).p < SURE and gap.end() > GROWTH * gap.start()):
        return None
    temperature = log.setting("sample.temperature") or 1.0
    top_p = log.setting("sample.top_p") or 1.0
    shaped = temperature != 1.0 or top_p < 1.0
    known = f" (temperature {temperature:g}, top-p {top_p:g})" if shaped else ""
    return Finding(
        cause="the sampler draws from another distribution than the trainer scores, temperature or "
        f"top-p in one of them only{known}: log-probs differ by {gap.median():.3g} a token from "
        "the first update on",
        level="sick",
        evidence=(
            evidence(
                gap,
                f"median {gap.median():.3g}, first {gap.values[0]:.3g}, last {gap.last:.3g}; bf16 "
                f"explains {BF16:g}",
                gap.median(),
                threshold=CLEAR,
                source="verl's documentation: |KL| of rollout and training at most 0.1",
                onset=int(gap.step[0]),
            ),
        ),
        others=(
            Suspect(
                "the sampler returns raw log-probs, the trainer divides logits by the temperature",
                "sample with temperature 1 and top-p 1: the gap falls to rounding",
            ),
            Suspect(
                "a mask shifted by one token, or the chat template differs",
                "print token ids and log-probs of one completion side by side",
            ),
            Suspect(
                "quantized weights or routing of experts differ",
                "score with the trainer's own forward pass in the sampler's place",
            ),
        ),
        fix=Fix(
            "Score with the temperature and the truncation that sampled, or sample with 1 and 1.",
            (Change("sample.temperature", to=1.0), Change("sample.top_p", to=1.0)),
        ),
        confidence=0.85 if shaped else 0.7,
    )


@rule(
    "sampler-ratio-off",
    "consistency",
    needs=("train/sampler_ratio_mean",),
    source="NeMo-RL (token_mult_prob_error ≤ 1.05); verl's documentation (0.5 to 2)",
    suppresses=REGION,
)
def sampler_ratio_off(log: RunLog) -> Finding | None:
    """Find an importance weight between sampler and trainer far from 1."""
    mean = log["train/sampler_ratio_mean"]
    limits = ERROR if "error" in mean.label else RATIO
    found = breach(mean, *limits)
    if found is None:
        return None
    sick = not RATIO[0] <= found.value <= RATIO[1]
    threshold = limits[0] if found.value < 1.0 else limits[1]
    return Finding(
        cause="sampler and trainer give the same tokens other probabilities: the mean importance "
        f"weight is {found.value:.4g} where 1 is right",
        level="sick" if sick else "watch",
        evidence=(
            evidence(
                mean,
                f"{found.value:.4g} in {found.count} of {len(mean)} updates",
                found.value,
                threshold=threshold,
                source="NeMo-RL: above 1.05 the framework is at fault; verl: 0.5 to 2",
                onset=found.onset,
            ),
        ),
        others=(
            Suspect(
                "stale weights in the sampler",
                "synchronize before every rollout: the weight becomes 1",
            ),
            Suspect(
                "bf16 kernels that depend on the size of the batch",
                "score twice with different batch sizes: log-probs differ",
            ),
        ),
        fix=Fix(
            "Send the weights before every rollout; score in the trainer, and cap the weights."
        ),
        confidence=0.75,
    )


@rule(
    "sampler-gap-is-usual",
    "consistency",
    needs=(GAP,),
    source="public issues: bf16 gives 0.03 nats RMS, float32 0.002",
)
def sampler_gap_is_usual(log: RunLog) -> Finding | None:
    """Explain a small gap between sampler and trainer."""
    gap = log[GAP]
    small = (gap.values > 1e-3) & (gap.values <= BF16)
    if share_of(small) < 0.9:
        return None
    return Finding(
        cause=f"sampler and trainer differ by {gap.median():.3g} a token, which is rounding of "
        "bf16 in two engines",
        level="usual",
        evidence=(
            evidence(
                gap,
                f"at most {BF16:g} in {percent(share_of(small))} of the updates",
                gap.median(),
                threshold=BF16,
                source="0.03 nats RMS in bf16, 0.002 in float32",
            ),
        ),
        fix=Fix("Nothing; truncated importance weights take away the rest."),
        confidence=0.8,
    )
