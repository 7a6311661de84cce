"""Metrics that other trainers log, or that callbacks and probes measure, and Keel's runs do not."""

from __future__ import annotations

from keel.tracking.catalogue.metric import CLOCK, ROLLOUT, SETTING, Metric, elsewhere

GENERATED = "over the completions of an update"
STEPPED = "over the steps of the rollout"
MEASURED = "measured by a callback, once an update"
PROBED = "a constant: mean over the episodes of a probe"

SAMPLER = (
    Metric(
        "train/sampler_gap",
        "mean |log π_sampler(a) − log π_trainer(a)|",
        "Between what drew the tokens (vLLM, SGLang) and what is trained, before any step; float32 "
        "explains 0.002 nats, bfloat16 0.03. verl's is the difference of probabilities, which is "
        "smaller.",
        "mean over tokens or rows",
        "nats",
        aliases=elsewhere(
            trl="sampling/sampling_logp_difference/mean",
            verl=(
                "training/rollout_probs_diff_mean",
                "rollout_corr/log_ppl_abs_diff",
                "mismatch/mismatch_log_ppl_abs_diff",
            ),
            swift="rollout_correction/log_ppl_abs_diff",
        ),
    ),
    Metric(
        "train/sampler_gap_max",
        "max |log π_sampler(a) − log π_trainer(a)|",
        "The largest of them; verl's is the difference of probabilities, at most 1.",
        "maximum over tokens or rows",
        "nats",
        aliases=elsewhere(
            trl="sampling/sampling_logp_difference/max", verl="training/rollout_probs_diff_max"
        ),
    ),
    Metric(
        "train/sampler_ratio_mean",
        "mean π_trainer(a) / π_sampler(a)",
        "Importance weight between trainer and sampler; 1 in expectation. NeMo's "
        "token_mult_prob_error is the mean of exp |log ratio| and at least 1.",
        "mean over tokens or rows",
        aliases=elsewhere(
            trl="sampling/importance_sampling_ratio/mean",
            verl=("rollout_corr/rollout_is_mean", "mismatch/rollout_is_mean"),
            swift="rollout_correction/is_weight_mean",
        ),
    ),
    Metric(
        "train/sampler_ratio_min",
        "min π_trainer(a) / π_sampler(a)",
        "The smallest importance weight between trainer and sampler.",
        "minimum over tokens, rows or sequences",
        aliases=elsewhere(
            trl="sampling/importance_sampling_ratio/min",
            verl=("rollout_corr/rollout_is_min", "mismatch/rollout_is_min"),
        ),
    ),
    Metric(
        "train/sampler_ratio_max",
        "max π_trainer(a) / π_sampler(a)",
        "The largest importance weight between trainer and sampler, often truncated.",
        "maximum over tokens, rows or sequences",
        aliases=elsewhere(
            trl="sampling/importance_sampling_ratio/max",
            verl=("rollout_corr/rollout_is_max", "mismatch/rollout_is_max"),
        ),
    ),
    Metric(
        "train/sampler_ratio_std",
        "standard deviation of π_trainer(a) / π_sampler(a)",
        "Of the importance weights between trainer and sampler.",
        "over tokens, rows or sequences",
        healthy_note="verl's documentation: at most 1",
        aliases=elsewhere(verl=("rollout_corr/rollout_is_std", "mismatch/rollout_is_std")),
    ),
    Metric(
        "train/sampler_effective_size",
        "(Σw)² / (n Σw²)",
        "Kish's effective sample size of the importance weights between trainer and sampler.",
        "over tokens, rows or sequences",
        "share",
        healthy_note="verl's documentation: at least 0.3",
        aliases=elsewhere(
            verl=("rollout_corr/rollout_is_eff_sample_size", "mismatch/rollout_is_eff_sample_size"),
            swift="rollout_correction/ess",
        ),
    ),
    Metric(
        "train/sampler_kl",
        "mean log π_sampler(a) − log π_trainer(a)",
        "The k1 estimate of KL(sampler‖trainer); it can be negative.",
        "mean over tokens",
        "nats",
        healthy_note="verl's documentation: at most 0.1 in size",
        aliases=elsewhere(
            verl=("rollout_corr/kl", "mismatch/mismatch_kl"),
            openrlhf="vllm_kl",
            swift="rollout_correction/kl",
        ),
    ),
)

LEARNING = (
    Metric(
        "train/action_std",
        "mean σ of a Gaussian policy",
        "In the units of the actions that the distribution draws.",
        "mean over dimensions, and over rows where it depends on them",
        aliases=elsewhere(
            sb3="train/std",
            rsl_rl=(
                "Policy/mean_std",
                "Policy/mean_noise_std",
                "Mean action noise std",
                "Mean action std",
            ),
        ),
    ),
    Metric(
        "train/gradient_effect",
        "‖Δθ‖₂ / ‖θ‖₂ of the policy's parameters over one update",
        "How far an update moved the parameters; exactly 0: nothing is learned.",
        MEASURED,
    ),
    Metric(
        "train/parameters_trained",
        "parameters that an optimizer holds and that require gradients / all of the policy's",
        "Far below 1 with adapters; 0: nothing is trained.",
        MEASURED,
        "share",
    ),
    Metric(
        "train/entropy_max",
        "log K of K discrete actions; else the entropy at the start",
        "What the entropy is compared with.",
        SETTING,
        "nats",
    ),
    Metric("train/value_std", "standard deviation of V", "Before the update.", ROLLOUT, "reward"),
    Metric(
        "train/dead_units",
        "share of hidden units that are 0 on every row",
        "ReLU units that no row activates learn nothing.",
        ROLLOUT,
        "share",
    ),
    Metric(
        "train/kl_first_epoch",
        "mean k3 over the first epoch",
        "What the first pass over the data moved; the difference to the last epoch tells "
        "whether there are too many.",
        "mean over the minibatches of the first epoch",
        "nats",
    ),
    Metric(
        "train/kl_last_epoch",
        "mean k3 over the last epoch",
        "As kl_first_epoch.",
        "mean over the minibatches of the last epoch",
        "nats",
    ),
    Metric(
        "train/critic_gradient_norm",
        "‖g‖₂ of the critic before clipping",
        "Of a critic with an optimizer of its own.",
        "mean over the minibatches of all epochs",
        aliases=elsewhere(verl="critic/grad_norm", openrlhf="critic_grad_norm"),
    ),
    Metric(
        "train/value_clip_fraction",
        "share of rows where the clipped value loss decides",
        "Above ½: the critic is held back by its clip.",
        "mean over the minibatches of all epochs",
        "share",
        aliases=elsewhere(verl="critic/vf_clipfrac", trl="val/clipfrac_avg"),
    ),
    Metric(
        "train/clip_fraction_low",
        "share of tokens or rows clipped at the lower bound",
        "With a negative advantage and r < 1 − ε.",
        "mean over the minibatches of all epochs",
        "share",
        aliases=elsewhere(trl="clip_ratio/low_mean", swift="clip_ratio/low_mean"),
    ),
    Metric(
        "train/clip_fraction_high",
        "share of tokens or rows clipped at the upper bound",
        "With a positive advantage and r > 1 + ε.",
        "mean over the minibatches of all epochs",
        "share",
        aliases=elsewhere(trl="clip_ratio/high_mean", swift="clip_ratio/high_mean"),
    ),
    Metric(
        "train/clip_fraction_dual",
        "share of tokens clipped by the bound for large ratios of negative advantage",
        "Dual-clip PPO's third bound; what verl logs as pg_clipfrac_lower.",
        "mean over the minibatches of all epochs",
        "share",
        aliases=elsewhere(verl="actor/pg_clipfrac_lower"),
    ),
)

REWARDS = (
    Metric(
        "rollout/length_max",
        "length of the longest completion",
        "In tokens.",
        f"maximum {GENERATED}",
        "tokens",
        aliases=elsewhere(
            trl="completions/max_length", verl="response_length/max", swift="completions/max_length"
        ),
    ),
    Metric(
        "rollout/length_limit",
        "largest length that is allowed",
        "Completions that reach it are cut.",
        SETTING,
        "tokens",
    ),
    Metric(
        "rollout/length_ended",
        "mean length of completions that ended by themselves",
        "Those that were cut are left out.",
        f"mean {GENERATED}",
        "tokens",
        aliases=elsewhere(trl="completions/mean_terminated_length"),
    ),
    Metric(
        "rollout/reward_std_group",
        "mean over groups of the standard deviation of rewards in a group",
        "0: every completion of a prompt scores the same, and nothing is learned.",
        "mean over the prompts of an update",
        "reward",
        aliases=elsewhere(openrlhf="group_reward_std", swift="reward_std"),
    ),
    Metric(
        "rollout/reward_std",
        "standard deviation of the rewards",
        "Over the whole batch: above 0 also where no group has a spread. In older versions TRL's "
        "name is the mean over groups; what its 0 says, rollout/informative says better.",
        "over the rows or completions of an update",
        "reward",
        aliases=elsewhere(trl="reward_std", openrlhf="rollout/reward_std"),
    ),
    Metric(
        "rollout/reward_zero_share",
        "share of rewards that are exactly 0",
        "Near 1: the reward is sparse.",
        STEPPED,
        "share",
    ),
    Metric(
        "rollout/reward_clipped_share",
        "share of rewards at a bound of their clip",
        "What lies beyond the bound is not seen.",
        STEPPED,
        "share",
    ),
    Metric(
        "rollout/reward_abs_max",
        "max |reward|",
        "Of a step, before normalizing.",
        f"maximum {STEPPED}",
        "reward",
    ),
    Metric(
        "rollout/reward_min",
        "min reward",
        "Of a step or a completion.",
        "minimum over the rows or completions of an update",
        "reward",
        aliases=elsewhere(verl=("critic/score/min", "critic/rewards/min")),
    ),
    Metric(
        "rollout/reward_max",
        "max reward",
        "Of a step or a completion.",
        "maximum over the rows or completions of an update",
        "reward",
        aliases=elsewhere(verl=("critic/score/max", "critic/rewards/max")),
    ),
    Metric(
        "rollout/reward_share_max",
        "max over components c of Σ|r_c| / Σ_k Σ|r_k|",
        "Near 1: one component of the reward drowns the others.",
        STEPPED,
        "share",
    ),
    Metric(
        "eval/reward_heldout",
        "mean reward on held-out prompts",
        "Falls while the training reward rises: the reward is gamed, or learned by heart.",
        "mean over the prompts of one evaluation",
        "reward",
        aliases=elsewhere(verl=("val-core/**", "val/test_score/**")),
    ),
)

ENVIRONMENT = (
    Metric(
        "rollout/obs_abs_max",
        "max |observation|",
        "As the policy sees it, after normalizing.",
        f"maximum over dimensions and {STEPPED}",
        "the observation's",
    ),
    Metric(
        "rollout/obs_dead_dims",
        "share of dimensions whose standard deviation is below 1e-3",
        "Dimensions that say nothing.",
        STEPPED,
        "share",
    ),
    Metric(
        "rollout/action_effect",
        "share of states in which another action changes observation or reward",
        "By resetting to the same state and trying others; 0: the action does nothing.",
        "over the states that a probe tried",
        "share",
    ),
    Metric(
        "rollout/truncated_share",
        "truncations / ends of episodes",
        "Episodes that a time limit cut.",
        "over the episodes that ended in the rollout",
        "share",
    ),
    Metric(
        "rollout/bootstrap_error",
        "share of truncations whose target has no bootstrap",
        "Above 0: the critic learns that running out of time is the end of all reward.",
        MEASURED,
        "share",
    ),
    Metric(
        "rollout/illegal_actions",
        "sampled actions that their mask forbids",
        "Above 0: sampling and training use different masks.",
        f"sum {STEPPED}",
        "actions",
    ),
)

BASELINES = tuple(
    Metric(
        f"baseline/{name}_return",
        "mean of Σ reward over an episode",
        meaning,
        PROBED,
        "reward",
    )
    for name, meaning in (
        ("random", "Of uniformly random actions."),
        ("noop", "Of the action that does nothing, or the first one."),
        ("greedy", "Of the action that earns most at once."),
    )
)

TIMES = (
    Metric(
        "time/iteration_seconds",
        "seconds",
        "A whole iteration: collecting, scoring and learning.",
        CLOCK,
        "s",
        aliases=elsewhere(
            trl="step_time",
            verl=("perf/time_per_step", "timing_s/step"),
            openrlhf="timing/step_total",
            rllib="time_this_iter_s",
            rsl_rl="Iteration time",
        ),
    ),
)

METRICS = (*SAMPLER, *LEARNING, *REWARDS, *ENVIRONMENT, *BASELINES, *TIMES)
