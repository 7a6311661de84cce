"""Metrics of the trust region: divergences, certification, ratios and their alarms."""

from __future__ import annotations

from keel.tracking.catalogue.metric import (
    LARGEST,
    MINIBATCHES,
    ROWS,
    SETTING,
    UPDATE,
    WHOLE,
    Metric,
    elsewhere,
)

ALARM = "over the update, written when it happens; agents: the most extreme"
RATIO = f"over {WHOLE}; agents: pooled"
POOLED = f"mean over {WHOLE}; agents: pooled"

DIVERGENCES = (
    Metric(
        "train/kl_exact",
        "mean KL(π_old‖π_new)",
        "The KL that is bounded, in closed form, of the policy that was kept; 0 after a rejection. "
        "No other library logs it: theirs are estimates, of minibatches, before the last steps.",
        LARGEST,
        "nats",
        (0.0, 0.05),
        "Keel: at most max_kl, 0.05 in the PPO presets; 0.01 is a common target",
        at_most="train/max_kl",
    ),
    Metric(
        "train/kl_requested",
        "mean KL(π_old‖π_requested)",
        "The KL of the step before any walk-back: what controllers steer by.",
        LARGEST,
        "nats",
        healthy_note="above max_kl means a walk-back; presets for tokens have one in most updates",
    ),
    Metric(
        "train/kl_reverse",
        "mean KL(π_new‖π_old)",
        "The other direction, reported and not bounded. sb3-contrib's TRPO bounds this one and "
        "logs 0 when its line search fails.",
        LARGEST,
        "nats",
        aliases=elsewhere(sb3="train/kl_divergence_loss"),
    ),
    Metric(
        "train/kl_p99",
        "99th percentile of KL(π_old‖π_new)",
        "How far the policy moved in its most changed states, one in a hundred.",
        f"percentile over {WHOLE}; agents: pooled",
        "nats",
    ),
    Metric(
        "train/kl_max",
        "max KL(π_old‖π_new)",
        "The largest KL of any row. The mean is bounded, this is not: 5× the mean is usual for "
        "PPO, 17× for TRPO.",
        f"maximum over {WHOLE}; agents: the largest",
        "nats",
    ),
    Metric(
        "train/kl_approx",
        "mean k1 = log π_old − log π_new",
        "The k1 estimate, the same as kl_k1, over the very rows of kl_exact, so that the two "
        "can be compared. It can be negative. Runs of version 0.1 have k3 here.",
        POOLED,
        "nats",
        aliases=elsewhere(origins=("train/kl_approx", "train/approx_kl", "approx_kl")),
    ),
    Metric(
        "train/kl_error",
        "|kl_approx − kl_exact|",
        "Error of the k1 estimate.",
        "from the two means; agents: the largest",
        "nats",
        healthy_note="rule of thumb: small",
        aliases=elsewhere(origins="train/kl_error"),
    ),
    Metric(
        "train/approx_kl",
        "mean k3 = r − 1 − log r",
        "The estimate others log under this name, for comparison only: SB3's is the mean of the "
        "last epoch, CleanRL's the last minibatch, TRL's is k2 with padding, RLlib's the exact KL "
        "of the last minibatches before their step; Spinning Up's is k1 (see kl_approx).",
        POOLED,
        "nats",
        healthy_note="rule of thumb: within [0, target_kl]; judged by kl_exact, which it estimates",
        aliases=elsewhere(
            sb3="train/approx_kl",
            cleanrl="losses/approx_kl",
            trl="policy/approxkl_avg",
            rllib=("learners/*/mean_kl_loss", "info/learner/*/learner_stats/kl"),
        ),
    ),
    Metric(
        "train/kl_k1",
        "mean k1 = −log r",
        "Unbiased and noisy: it can be negative, and near 0 while the policy moves. CleanRL's "
        "is the last minibatch, verl's the mean over micro-batches.",
        POOLED,
        "nats",
        aliases=elsewhere(
            cleanrl="losses/old_approx_kl",
            verl="actor/ppo_kl",
            openrlhf="ppo_kl",
            origins="kl_div",
        ),
    ),
    Metric(
        "train/kl_step",
        "mean KL(π_old‖π_new) of the accepted step",
        "As kl_exact, but NaN when the step was rejected, so that a failure cannot pass for 0.",
        LARGEST,
        "nats",
    ),
    Metric(
        "train/kl_normaliser",
        "mean KL(π‖π with the new observation statistics)",
        "The part of kl_exact that new observation statistics brought, before any step; they are "
        "held back where it would be more than a quarter of the bound.",
        LARGEST,
        "nats",
    ),
    Metric(
        "train/kl_temperature",
        "mean KL(π‖π at the next temperature)",
        "The part of kl_exact that statistics and another temperature brought, before any step; 0 "
        "while the temperature stays. It moves as far as half of the bound allows.",
        LARGEST,
        "nats",
    ),
    Metric(
        "train/kl_reference",
        "mean KL(π‖π_ref)",
        "Divergence from the frozen reference, not from the policy before the update. TRL's "
        "objective/kl is k1 summed over a sequence, verl's its configured estimator per token.",
        ROWS,
        "nats",
        aliases=elsewhere(
            trl=("objective/kl", "kl"),
            verl=("actor/kl_loss", "actor/reward_kl_penalty"),
            openrlhf="kl",
            swift="kl",
        ),
    ),
    Metric(
        "train/kl_is_exact",
        "1 if closed form, 0 if estimated",
        "Where no closed form exists kl_exact is an estimate, and certification refuses.",
        UPDATE,
        healthy=(1.0, 1.0),
        healthy_note="Keel: an estimate certifies nothing",
    ),
)

CERTIFICATION = (
    Metric(
        "train/max_kl",
        "the bound",
        "The hard bound of this update's kl_exact.",
        SETTING,
        "nats",
        aliases=elsewhere(origins="max_kl"),
    ),
    Metric(
        "train/alpha",
        "share of the step that was kept",
        "1: all of it; 0: rolled back.",
        "one value an update; agents: the smallest",
        healthy_note="below 1 in most updates: the step is too large for the bound",
    ),
    Metric(
        "train/rollbacks",
        "number of updates with α < 1",
        "Updates walked back or rejected so far in this run.",
        "cumulative over the run; agents: sum",
        "updates",
    ),
    Metric(
        "train/walk_back",
        "1 if α < 1, else 0",
        "Whether this update was not kept whole: walked back, or rejected by its line search.",
        "one value an update; agents: any",
    ),
    Metric("train/verdict", "accepted, walked_back or rejected", "What became of it.", UPDATE),
    Metric("train/reason", "text", "Why an update was not accepted as it was.", UPDATE),
    Metric(
        "train/early_stop_epoch",
        "epoch in which the KL stopped the update",
        "Counted from 0; null when nothing stopped it.",
        "one value an update; agents: the earliest",
        "epochs",
        aliases=elsewhere(origins="train/early_stop_epoch"),
    ),
    Metric(
        "train/early_stop_kl",
        "KL that stopped the update",
        "Null when nothing stopped it.",
        "one value an update; agents: the largest",
        "nats",
        aliases=elsewhere(origins="train/early_stop_kl"),
    ),
)

RATIOS = (
    Metric(
        "train/clip_fraction",
        "share of elements where the clip decides",
        "Counts elements that lost their gradient; SB3 and CleanRL count every ratio outside the "
        "range, also where the advantage pulls it back, so theirs is larger.",
        MINIBATCHES,
        "share",
        (None, 0.3),
        "rule of thumb: 0.1–0.3, best about 0.2. Less than 0.1 is no alarm: small steps, and "
        "all steps at the end of a schedule, clip nothing",
        elsewhere(
            sb3="train/clip_fraction",
            cleanrl="losses/clipfrac",
            trl=("policy/clipfrac_avg", "clip_ratio/region_mean", "clip_ratio"),
            verl="actor/pg_clipfrac",
            openrlhf=("ppo_clip_ratio", "clip_ratio"),
            swift=("clip_ratio/region_mean", "clip_ratio"),
            origins=("train/clip_fraction", "clipfrac"),
        ),
    ),
    Metric(
        "train/ratio_outside",
        "share of rows with r beyond 1 ± ε after the update",
        "What SB3 and CleanRL call the clip fraction, here of the policy that was kept.",
        RATIO,
        "share",
        (None, 0.6),
        "Keel: beyond, most samples have left the clip's range",
    ),
    Metric("train/ratio_p01", "1st percentile of r", "Lower tail of π_new/π_old.", RATIO),
    Metric("train/ratio_p50", "median of r", "Middle of π_new/π_old.", RATIO),
    Metric("train/ratio_p99", "99th percentile of r", "Upper tail of π_new/π_old.", RATIO),
    Metric("train/ratio_min", "min r", "Smallest π_new/π_old.", RATIO),
    Metric(
        "train/ratio_max",
        "max r",
        "Largest π_new/π_old.",
        RATIO,
        healthy_note="rule of thumb: below 10; judged by warn/extreme_ratio_max",
    ),
    Metric(
        "train/ratio_mean",
        "mean r",
        "1 in expectation whatever the step, so it shows sampling faults and not the step's size; "
        "TRL's is over epochs and minibatches, padding included.",
        POOLED,
        aliases=elsewhere(trl="val/ratio"),
    ),
    Metric(
        "train/log_ratio_max",
        "max |log r|",
        "Before the clamp.",
        RATIO,
        "nats",
        healthy_note="rule of thumb: below 5; judged by warn/large_log_ratio",
    ),
    Metric(
        "train/effective_sample_size",
        "(Σr)² / (n Σr²)",
        "Kish's, as a share of the rows: 1 when all ratios are equal.",
        RATIO,
        "share",
    ),
    Metric(
        "train/gate_log_ratio",
        "max |log r| before the first step",
        "The consistency gate: replaying the rollout must give the policy that sampled it.",
        "over all rows where gate_all_rows is 1, else over those of the objective's first pass; "
        "NaN where statistics or temperature moved in between; agents: the largest",
        "nats",
        (None, 1e-3),
        "Keel: as much as float32 explains; above it the run stops, unless `--region.no-gate`",
    ),
    Metric(
        "train/gate_all_rows",
        "1 if all rows were replayed",
        "All rows are in the first 10 updates, in every 10th after them, and wherever a log-ratio "
        "or a KL is odd.",
        "once an update",
        "1",
    ),
)


def _alarm(
    name: str, formula: str, meaning: str, unit: str = "1", high: float = 0.0, note: str = ""
) -> Metric:
    return Metric(name, formula, meaning, ALARM, unit, (None, high), note, elsewhere(origins=name))


ALARMS = (
    _alarm(
        "warn/large_log_ratio",
        "max |log r| if above 5",
        "A policy that leaps.",
        "nats",
        high=7.0,
        note="Keel: above 5 is written, and single samples of healthy runs reach it",
    ),
    _alarm(
        "warn/extreme_ratio_max",
        "max r if above 100 (or min r below 0.01)",
        "Clamping the log-ratio at ±10 does not keep it small: exp(10) = 22,026.",
        high=10.0,
        note="rule of thumb: below 10",
    ),
    Metric(
        "warn/extreme_ratio_min",
        "min r if below 0.01 (or max r above 100)",
        "Actions that the new policy has all but forbidden.",
        ALARM,
        healthy=(1e-3, None),
        healthy_note="Keel: below 0.01 is written, and single samples of healthy runs reach it",
        aliases=elsewhere(origins="warn/extreme_ratio_min"),
    ),
    _alarm(
        "warn/ratio_all_nonfinite",
        "minibatches without one finite ratio",
        "Such a minibatch makes no step.",
        "minibatches",
        note="rule of thumb: 0",
    ),
    _alarm(
        "error/non_finite_ratio_count",
        "samples with a non-finite ratio",
        "Quarantined: weight 0 and located, never replaced by 1.",
        "samples",
        note="rule of thumb: 0",
    ),
    _alarm(
        "error/non_finite_ratio_frac",
        "share of samples with a non-finite ratio",
        "The same as a share of the rows that count.",
        "share",
        note="rule of thumb: 0",
    ),
)

METRICS = (*DIVERGENCES, *CERTIFICATION, *RATIOS, *ALARMS)
