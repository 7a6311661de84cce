"""Metrics of learning: losses, entropy, coefficients, gradients, advantages and values."""

from __future__ import annotations

from keel.tracking.catalogue.metric import (
    COUNT,
    MINIBATCHES,
    ROLLOUT,
    ROWS,
    SETTING,
    UPDATE,
    Metric,
    elsewhere,
    half,
    minus,
)

LOSSES = (
    Metric(
        "train/policy_loss",
        "mean surrogate loss",
        "Near 0 with normalized advantages; its size says little. SB3 averages all epochs, "
        "CleanRL logs the last minibatch; TRPO's objective has the opposite sign.",
        MINIBATCHES,
        aliases=elsewhere(
            sb3=("train/policy_gradient_loss", minus("train/policy_objective")),
            cleanrl="losses/policy_loss",
            trl=("loss/policy_avg", "policy_loss"),
            verl="actor/pg_loss",
            openrlhf="policy_loss",
            rsl_rl=("Loss/surrogate", "Mean surrogate loss", "Surrogate loss", "surrogate"),
            rllib=("learners/*/policy_loss", "info/learner/*/learner_stats/policy_loss"),
        ),
    ),
    Metric(
        "train/value_loss",
        "mean ½(V − R)², or the critic's own loss",
        "With the half, as CleanRL, TRL, verl and OpenRLHF; SB3, RLlib and rsl_rl log it without.",
        MINIBATCHES,
        "reward²",
        aliases=elsewhere(
            sb3=half("train/value_loss"),
            cleanrl="losses/value_loss",
            trl="loss/value_avg",
            verl="critic/vf_loss",
            openrlhf="critic_loss",
            rsl_rl=(
                half("Loss/value_function"),
                half("Loss/value"),
                half("Mean value_function loss"),
                half("Mean value loss"),
                half("Value function loss"),
                half("value_function"),
            ),
            rllib=(half("learners/*/vf_loss"), half("info/learner/*/learner_stats/vf_loss")),
        ),
    ),
    Metric(
        "train/loss",
        "policy + value − entropy + penalties, with their coefficients",
        "What was differentiated. SB3's is the last minibatch only.",
        MINIBATCHES,
        aliases=elsewhere(
            sb3="train/loss",
            trl="loss",
            verl="actor/loss",
            swift="loss",
            rllib=("learners/*/total_loss", "info/learner/*/learner_stats/total_loss"),
        ),
    ),
    Metric(
        "train/entropy",
        "mean H(π)",
        "Positive; SB3's entropy_loss is its negative, averaged over all epochs, CleanRL's is the "
        "last minibatch; TRL's objective/entropy is summed over a sequence and not this.",
        ROWS,
        "nats",
        healthy_note="rule of thumb: falls slowly; above 0.5 with four equal actions",
        aliases=elsewhere(
            sb3=minus("train/entropy_loss"),
            cleanrl="losses/entropy",
            trl=("policy/entropy_avg", "entropy"),
            verl=("actor/entropy", "actor/entropy_loss"),
            openrlhf="entropy_loss",
            rsl_rl=("Loss/entropy", "Mean entropy loss", "entropy"),
            swift=("entropy/mean", "entropy"),
            rllib=("learners/*/entropy", "info/learner/*/learner_stats/entropy"),
            origins=("train/entropy", "entropy"),
        ),
    ),
    Metric(
        "train/entropy_is_exact",
        "1 if closed form, 0 if estimated",
        "That of a squashed Gaussian is the Gaussian's plus the log-Jacobian at its mean: first "
        "order in the spread. What the bonus pulls at is then an estimate, too.",
        "once an update",
    ),
    Metric(
        "train/sequence_entropy",
        "mean over sequences of −Σ log π",
        "An estimate that grows with the length of the sequence.",
        "mean over the sequences of the rollout",
        "nats",
        aliases=elsewhere(trl="objective/entropy"),
    ),
    Metric(
        "train/coverage_80",
        "share of targets between the predicted 10 % and 90 % quantiles",
        "Of distributional critics, before the update. Targets are λ-returns, which vary less than "
        "returns themselves unless λ is 1.",
        ROLLOUT,
        healthy_note="0.8 is perfect; below, the critic is too sure of itself",
    ),
    Metric(
        "train/calibration_error",
        "mean over levels τ of |share of targets below the predicted τ-quantile − τ|",
        "Of distributional critics, before the update; 0 is perfect, 0.25 means nothing.",
        ROLLOUT,
        healthy_note="above 0.15 for long: the distribution is not to be believed",
    ),
    Metric(
        "train/explained_variance",
        "1 − Var(R − V) / Var(R)",
        "Of the values before the update; 1 is perfect, 0 no better than a constant. RLlib takes "
        "it per minibatch, after earlier steps.",
        ROLLOUT,
        healthy_note="below 0 for long: the critic misleads, unless returns hardly vary, as in a "
        "task that is solved",
        aliases=elsewhere(
            sb3="train/explained_variance",
            cleanrl="losses/explained_variance",
            verl="critic/vf_explained_var",
            rllib=("learners/*/vf_explained_var", "info/learner/*/learner_stats/vf_explained_var"),
        ),
    ),
)

SETTINGS = (
    Metric(
        "train/learning_rate",
        "step size of the optimizer",
        "After schedules and controllers.",
        SETTING,
        aliases=elsewhere(
            sb3="train/learning_rate",
            cleanrl="charts/learning_rate",
            trl=("lr", "learning_rate"),
            verl="actor/lr",
            openrlhf="actor_lr",
            rsl_rl="Loss/learning_rate",
            swift="learning_rate",
            rllib=(
                "learners/*/default_optimizer_learning_rate",
                "info/learner/*/learner_stats/cur_lr",
            ),
        ),
    ),
    Metric(
        "train/critic_learning_rate",
        "step size of the optimizer for the critic's own layers",
        "The policy's, unless region.critic_learning_rate says otherwise.",
        SETTING,
        aliases=elsewhere(verl="critic/lr", openrlhf="critic_lr"),
    ),
    Metric(
        "train/clip_range",
        "ε in 1 ± ε",
        "The upper one where the two differ.",
        SETTING,
        aliases=elsewhere(sb3="train/clip_range"),
    ),
    Metric(
        "train/entropy_coef",
        "coefficient of H(π)",
        "After decay or control.",
        SETTING,
        aliases=elsewhere(
            trl="entropy_coef",
            rllib=("learners/*/curr_entropy_coeff", "info/learner/*/learner_stats/entropy_coeff"),
            origins="entropy_coef",
        ),
    ),
    Metric(
        "train/kl_coef",
        "coefficient of the KL penalty",
        "Bounded, so that it cannot wind up.",
        SETTING,
        aliases=elsewhere(
            verl=("actor/kl_coef", "actor/reward_kl_penalty_coeff"),
            rllib=("learners/*/curr_kl_coeff", "info/learner/*/learner_stats/cur_kl_coeff"),
            origins="kl_coef",
        ),
    ),
    Metric(
        "train/temperature",
        "divisor of the logits",
        "Part of the policy: it is in the log-prob and in the KL.",
        SETTING,
        aliases=elsewhere(origins="temperature"),
    ),
    Metric(
        "train/temp_is_pulsing",
        "1 during a temperature pulse, else 0",
        "Never 1 in a stagnant run means a dead controller.",
        SETTING,
        healthy_note="rule of thumb: 1 from time to time",
        aliases=elsewhere(origins="temp_is_pulsing"),
    ),
    Metric("train/epochs", "epochs completed", "A stopped one does not count.", UPDATE, "epochs"),
)

GRADIENTS = (
    Metric(
        "train/gradient_norm",
        "‖g‖₂ before clipping",
        "Of all parameters together; verl and RLlib log it per optimizer.",
        MINIBATCHES,
        healthy_note="0: nothing is learned, as where every group of completions scores the same",
        aliases=elsewhere(
            trl="grad_norm",
            verl="actor/grad_norm",
            openrlhf="actor_grad_norm",
            swift="grad_norm",
            rllib=(
                "learners/*/gradients_default_optimizer_global_norm",
                "info/learner/*/learner_stats/grad_gnorm",
            ),
        ),
    ),
    Metric(
        "train/gradient_clipped",
        "share of steps whose gradient was shortened",
        "1 all the time means that the clip sets the step size.",
        MINIBATCHES,
        "share",
    ),
    Metric(
        "train/non_finite_gradients",
        "steps with a NaN or infinite gradient",
        "Counted and never applied.",
        COUNT,
        "steps",
        (None, 0.0),
        "Keel: 0",
    ),
)


def _advantage(stat: str, kind: str) -> Metric:
    raw = kind == "raw"
    name = f"train/advantage_raw_{stat}" if raw else f"train/advantage_{stat}"
    normal = None if raw else {"mean": "near 0", "std": "near 1"}.get(stat)
    verl = f"critic/advantages/{stat}"
    return Metric(
        name,
        f"{stat} A" if raw else f"{stat} of the normalized A",
        f"The advantages {'as GAE gives them' if raw else 'that the loss sees'}.",
        ROLLOUT if raw else "all valid rows, as normalized; agents: mean",
        "reward" if raw else "1",
        healthy_note="" if normal is None else f"{normal} where a batch is normalized",
        aliases=elsewhere(verl=verl) if not raw and stat != "std" else {},
    )


ADVANTAGES = (
    *(_advantage(stat, "raw") for stat in ("min", "max", "mean", "std")),
    *(_advantage(stat, "normalized") for stat in ("min", "max", "mean", "std")),
    Metric(
        "train/advantage_sign_flips",
        "number of rows whose sign changes in normalizing",
        "Rows that were better than expected and are now pushed down, or the reverse.",
        COUNT,
        "rows",
    ),
)

VALUES = (
    Metric(
        "train/value_mean",
        "mean V",
        "Before the update.",
        ROLLOUT,
        "reward",
        aliases=elsewhere(
            verl=("critic/values/mean", "critic/vpred_mean"), openrlhf="values", trl="val/mean"
        ),
    ),
    Metric(
        "train/target_mean",
        "mean R",
        "Of the critic's targets.",
        ROLLOUT,
        "reward",
        aliases=elsewhere(verl="critic/returns/mean"),
    ),
    Metric("train/target_std", "std R", "Of the critic's targets.", ROLLOUT, "reward"),
)

METRICS = (*LOSSES, *SETTINGS, *GRADIENTS, *ADVANTAGES, *VALUES)
