"""Metrics of learning from demonstrations; they are there only where `demos.path` is given."""

from __future__ import annotations

from keel.tracking.catalogue.metric import MINIBATCHES, ROLLOUT, SETTING, UPDATE, Metric, elsewhere

DOMINATES = 2.0
"""Ratio of gradients from which on demonstrations dominate."""
SHOWN = "over the demonstrated steps drawn for the update, before it"

METRICS = (
    Metric(
        "train/policy_loss_ppo",
        "mean surrogate loss, without cloning",
        "What the loss on demonstrations is compared with; near 0 with normalized advantages.",
        MINIBATCHES,
        aliases=elsewhere(origins="train/policy_loss_ppo"),
    ),
    Metric(
        "train/bc_loss",
        "mean −w log π(a|s) of what was shown",
        "Falls while the policy comes to do as it was shown; flat means wrong data, or no say.",
        MINIBATCHES,
        "nats",
    ),
    Metric(
        "train/policy_loss_bc_weighted",
        "bc_coef × train/bc_loss",
        "What cloning adds to the loss.",
        MINIBATCHES,
        aliases=elsewhere(origins="train/policy_loss_bc_weighted"),
    ),
    Metric(
        "train/bc_ppo_ratio",
        "|policy_loss_bc_weighted| / (|policy_loss_ppo| + 1e-8)",
        "The ratio of losses. Its denominator is near 0 whatever PPO teaches, so it is large "
        "without meaning much: look at bc_gradient_ratio.",
        MINIBATCHES,
        healthy_note="rule of thumb: below 1",
        aliases=elsewhere(origins="train/bc_ppo_ratio"),
    ),
    Metric(
        "train/bc_gradient_ratio",
        "bc_coef · ‖∇ cloning‖ / ‖∇ surrogate‖ in the policy's parameters",
        "Who moves the policy: above 1 it is the demonstrations.",
        ROLLOUT,
        healthy=(None, DOMINATES),
        healthy_note="Keel: above, demonstrations rule; lower demos.coef or demos.control adaptive",
    ),
    Metric(
        "train/bc_cosine",
        "cosine between ∇ cloning and ∇ surrogate",
        "Whether demonstrations and reward teach the same; below 0 for long they contradict each "
        "other.",
        ROLLOUT,
    ),
    Metric(
        "train/bc_gradient_norm",
        "‖∇ cloning‖₂, before its coefficient",
        "In the policy's parameters.",
        ROLLOUT,
    ),
    Metric(
        "train/bc_coef",
        "coefficient of cloning",
        "As it was during the update, after decay, control and the limit on its pull.",
        SETTING,
        aliases=elsewhere(origins="bc_coef"),
    ),
    Metric(
        "train/bc_coef_adjusted",
        "coefficient of cloning",
        "Another name of bc_coef: the coefficient that this update used, after decay, control "
        "and the limit on its pull.",
        SETTING,
        aliases=elsewhere(origins="train/bc_coef_adjusted"),
    ),
    Metric(
        "train/bc_advantage_mean",
        "mean return − V(s) of what was shown",
        "Above 0: it earned more than the policy expects of itself.",
        SHOWN,
        "reward",
    ),
    Metric(
        "train/bc_share_used",
        "share of demonstrated steps with a weight above 0",
        "Of `demos.loss` filtered: falls as the policy outgrows what it was shown.",
        SHOWN,
    ),
    Metric(
        "train/bc_share_at_cap",
        "share of demonstrated steps at the largest weight",
        "Of `demos.loss` weighted. Many: the temperature is too low, and a few steps are all that "
        "is learned.",
        SHOWN,
        healthy=(None, 0.2),
        healthy_note="Keel: raise demos.temperature",
    ),
    Metric(
        "train/kl_demos",
        "mean KL(old‖new) on demonstrated states",
        "Exact, but not bounded: the bound is on the rollout's states.",
        "mean over the demonstrated steps drawn for the update, after it, in float64",
        "nats",
    ),
    Metric(
        "warn/bc_dominates",
        "bc_ppo_ratio if above 2",
        "A warning by the ratio of losses, whatever demos.steer says. Its denominator is near "
        "0 in healthy runs as well, and exactly 0 under TRPO: what demonstrations really do is "
        "judged by bc_gradient_ratio.",
        UPDATE,
        healthy_note="rule of thumb: written above 2",
        aliases=elsewhere(origins="warn/bc_dominates"),
    ),
)
