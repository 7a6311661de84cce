"""Metrics of TRPO: natural gradient, line search, and the critic fitted apart."""

from __future__ import annotations

from keel.tracking.catalogue.metric import SETTING, UPDATE, Metric, elsewhere

METRICS = (
    Metric(
        "train/line_search_success",
        "1 if a step was accepted, else 0",
        "A rejection restores the parameters bit for bit.",
        UPDATE,
        healthy=(0.3, None),
        healthy_note="rule of thumb: below 30 % for long is sick",
        mean_over=20,
        aliases=elsewhere(sb3="train/is_line_search_success", origins="LS_OK"),
    ),
    Metric(
        "train/line_search_iters",
        "step lengths tried",
        "Backtracks + 1; 0 when there was no direction to search.",
        UPDATE,
        aliases=elsewhere(origins="line_search_iters"),
    ),
    Metric(
        "train/step_fraction",
        "accepted share of the step at the bound",
        "1 when the first length was taken, 0 when rejected.",
        UPDATE,
        healthy=(0.05, None),
        healthy_note="rule of thumb: near 0 for long is sick",
        mean_over=20,
        aliases=elsewhere(origins="StepFrac"),
    ),
    Metric(
        "train/step_scale",
        "length at the exact KL bound / length by the quadratic model",
        "Below 1 where the model promised too little KL, above 1 where damping wasted the bound.",
        UPDATE,
    ),
    Metric(
        "train/kl_tried",
        "mean KL(π_old‖π_tried) of the first length",
        "Where the line search began, whether or not anything was accepted.",
        UPDATE,
        "nats",
    ),
    Metric(
        "train/improvement",
        "objective(new) − objective(old)",
        "Surrogate and entropy, over the whole rollout, of the accepted step; NaN when rejected.",
        UPDATE,
        healthy=(0.0, None),
        healthy_note="Keel: what is accepted improves",
    ),
    Metric(
        "train/improvement_predicted",
        "gradient · step",
        "The same to first order; of the last length tried when rejected.",
        UPDATE,
    ),
    Metric(
        "train/gain_ratio",
        "actual / predicted improvement",
        "Near 1 while the quadratic model of the step holds; NaN when rejected.",
        UPDATE,
        healthy=(0.1, 3.0),
        healthy_note="Keel: outside, the quadratic model does not hold; lower max_kl",
    ),
    Metric("train/cg_residual", "‖b − Fx‖ / ‖b‖", "What conjugate gradient left over.", UPDATE),
    Metric("train/cg_iterations", "iterations done", "Fisher-vector products spent.", UPDATE),
    Metric(
        "train/curvature",
        "xᵀFx",
        "Of the natural step; not positive means that the direction cannot be trusted.",
        UPDATE,
        healthy=(0.0, None),
        healthy_note="Keel: raise the damping",
    ),
    Metric(
        "train/curvature_min",
        "min dᵀFd / dᵀd",
        "The least that conjugate gradient met; ≤ 0 stops it and raises the damping.",
        UPDATE,
        healthy=(0.0, None),
        healthy_note="Keel: raise the damping",
    ),
    Metric(
        "train/policy_gradient_norm",
        "‖∇ objective‖",
        "Of the policy's parameters, over the whole rollout.",
        UPDATE,
    ),
    Metric(
        "train/critic_loss_first",
        "½ mean (V − R)² on the first minibatch",
        "Before the critic's fit has begun.",
        UPDATE,
    ),
    Metric(
        "train/critic_loss_last",
        "½ mean (V − R)² on the last minibatch",
        "After its last pass: no lower than the first means passes spent for nothing.",
        UPDATE,
    ),
    Metric(
        "train/damping",
        "λ in F + λI",
        "What is added to the Fisher matrix.",
        SETTING,
        aliases=elsewhere(origins="damping"),
    ),
)
