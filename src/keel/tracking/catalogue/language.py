"""Metrics of token-level RL: completions, the reference, and the accounting of KL."""

from __future__ import annotations

from keel.tracking.catalogue.metric import Metric, complement, elsewhere

COMPLETIONS = "mean over the completions of an update"
TOKENS = "mean over the tokens that count"

METRICS = (
    Metric(
        "rollout/success",
        "mean of the task's own score",
        "How much of the training prompts is solved, whatever is rewarded.",
        COMPLETIONS,
        aliases=elsewhere(sb3="rollout/success_rate"),
    ),
    Metric(
        "rollout/ended",
        "share with an end of text",
        "Completions that ended by themselves, and were not cut off.",
        COMPLETIONS,
        aliases=elsewhere(
            trl=complement("completions/clipped_ratio"),
            verl=complement("response_length/clip_ratio"),
            openrlhf=(
                complement("rollout/truncated_rate"),
                complement("truncated"),
                complement("response_clip_ratio"),
            ),
            swift=complement("completions/clipped_ratio"),
        ),
    ),
    Metric(
        "rollout/informative",
        "share of groups whose scores differ",
        "A group in which all completions score the same teaches nothing.",
        "share over the prompts of an update",
        healthy_note="near 0: nothing is left to learn, or nothing can be learned",
        aliases=elsewhere(
            trl=complement("frac_reward_zero_std"), swift=complement("frac_reward_zero_std")
        ),
    ),
    Metric(
        "rollout/failures",
        "count",
        "Rewards that raised, hung or were not finite; their completions are not learned from.",
        "sum over the completions of an update",
        "completions",
        healthy=(None, 0.0),
        healthy_note="Keel: 0; look at the reward",
    ),
    Metric(
        "rollout/reward",
        "mean of one reward function",
        "Under its name, before its weight: `rollout/reward/task`.",
        COMPLETIONS,
        aliases=elsewhere(trl="rewards/*/mean", swift="rewards/*/mean"),
    ),
    Metric(
        "rollout/tool_calls",
        "calls per completion",
        "Answered by the tool.",
        COMPLETIONS,
        aliases=elsewhere(trl="tools/call_frequency"),
    ),
    Metric(
        "rollout/tool_failures",
        "count",
        "Calls for which the tool raised.",
        "sum over the completions of an update",
        "calls",
        healthy=(None, 0.0),
        healthy_note="Keel: 0; look at the tool",
    ),
    Metric(
        "eval/success",
        "mean of the task's own score",
        "Of held-out prompts, one completion each.",
        "mean over the prompts",
        aliases=elsewhere(sb3="eval/success_rate"),
    ),
    Metric(
        "eval/warmup_success",
        "mean of the task's own score",
        "What was solved before RL began.",
        "mean over the held-out prompts",
    ),
    Metric(
        "eval/control_success",
        "mean of the task's own score",
        "What more imitation of the warm-up data solves at best, with the computing that RL took.",
        "mean over the held-out prompts",
    ),
    *(
        Metric(
            f"train/kl_reference_{name}_bias",
            f"mean {name} − exact KL(π‖reference)",
            f"How far the estimator {name} is off on the tokens of this update.",
            TOKENS,
            "nats",
        )
        for name in ("k1", "k2", "k3")
    ),
    *(
        Metric(
            f"train/kl_reference_{name}_std",
            f"standard deviation of {name}",
            f"How much the estimator {name} varies from token to token.",
            "over the tokens that count",
            "nats",
        )
        for name in ("k1", "k2", "k3")
    ),
    Metric(
        "kl/old_token",
        "exact KL(old‖new)",
        "What an update spent, per token that the policy wrote.",
        TOKENS,
        "nats",
    ),
    Metric(
        "kl/old_sequence",
        "Σ over tokens of exact KL(old‖new)",
        "What an update spent, per completion.",
        COMPLETIONS,
        "nats",
    ),
    Metric(
        "kl/reference_token",
        "exact KL(π‖reference)",
        "How far the policy that sampled is from the reference, per token.",
        TOKENS,
        "nats",
    ),
    Metric(
        "kl/reference_sequence",
        "Σ over tokens of exact KL(π‖reference)",
        "How far the policy that sampled is from the reference, per completion.",
        COMPLETIONS,
        "nats",
        healthy=(None, 10.0),
        healthy_note="TRL: between 0 and 10",
    ),
    Metric(
        "kl/sampler_token",
        "exact KL(sampler‖π)",
        "What top-k and top-p put between what is drawn from and the policy.",
        TOKENS,
        "nats",
    ),
    Metric(
        "kl/sampler_sequence",
        "Σ over tokens of exact KL(sampler‖π)",
        "The same per completion.",
        COMPLETIONS,
        "nats",
    ),
    Metric(
        "kl/spent_token",
        "Σ over updates of exact KL(old‖new)",
        "All that was spent so far; the policy cannot have moved further by small steps.",
        "sum over updates",
        "nats",
    ),
    Metric(
        "time/score_seconds",
        "seconds",
        "Rewards, the reference's pass and advantages.",
        "of an update",
        "seconds",
    ),
    Metric(
        "time/tokens_per_second",
        "tokens the policy wrote / seconds of the whole update",
        "Sampling, scoring, learning and certifying together.",
        "of an update",
        "tokens/s",
    ),
)
