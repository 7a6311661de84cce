"""Metrics of the outcome: what was earned, in training and in evaluation, and what it cost."""

from __future__ import annotations

from keel.tracking.catalogue.metric import CLOCK, EPISODES, EVALUATION, Metric, elsewhere

ROLLOUTS = (
    Metric(
        "rollout/return_mean",
        "mean of Σ reward over an episode",
        "Undiscounted, unnormalized. As SB3 and RLlib do it; CleanRL logs "
        "single ones; TRL and verl mean the score of a completion.",
        f"mean {EPISODES}; agents: sum",
        "reward",
        aliases=elsewhere(
            sb3="rollout/ep_rew_mean",
            cleanrl="charts/episodic_return",
            trl=("objective/scores", "reward"),
            verl=("critic/score/mean", "critic/rewards/mean"),
            openrlhf=("rollout/reward_mean", "reward"),
            rllib=("env_runners/episode_return_mean", "episode_reward_mean"),
            rsl_rl=("Train/mean_reward", "Mean reward"),
            swift="reward",
        ),
    ),
    Metric(
        "rollout/return_std",
        "standard deviation of the returns",
        "Over the episodes of return_mean.",
        f"{EPISODES}; agents: of their sum",
        "reward",
    ),
    Metric(
        "rollout/length_mean",
        "mean length of an episode",
        "In steps of the agent, frame skip not counted; tokens for TRL and verl.",
        f"mean {EPISODES}",
        "steps",
        aliases=elsewhere(
            sb3="rollout/ep_len_mean",
            cleanrl="charts/episodic_length",
            trl="completions/mean_length",
            verl="response_length/mean",
            openrlhf=("rollout/response_length_mean", "response_length"),
            rllib=("env_runners/episode_len_mean", "episode_len_mean"),
            rsl_rl=("Train/mean_episode_length", "Mean episode length"),
            swift="completions/mean_length",
        ),
    ),
    Metric(
        "rollout/action_share_max",
        "share of the commonest action",
        "Of policies with one discrete choice. Near 1 where several actions are good, the policy "
        "has collapsed onto one, whatever the return says.",
        "share over the steps of an update",
        healthy=(None, 0.99),
        healthy_note="Keel: nothing else is tried; of four equal actions below half is wanted",
    ),
    Metric(
        "env/*",
        "mean over the episodes that ended",
        "What the environment itself measures, under its own names: `env/npv`, `env/share_L`.",
        "mean over the episodes of the rollout that know it",
        "the environment's",
    ),
    Metric(
        "rollout/episodes",
        "episodes that ended",
        "In this iteration, not since the start.",
        "count; agents share their episodes",
        "episodes",
        aliases=elsewhere(rllib=("env_runners/num_episodes", "episodes_this_iter")),
    ),
    Metric(
        "rollout/reward_mean",
        "mean reward of a step",
        "As the environment gave it, before normalizing; it exists before any episode ends.",
        "mean over the valid rows of the rollout; agents: sum",
        "reward",
        aliases=elsewhere(origins="total_reward"),
    ),
)

EVALUATIONS = (
    Metric(
        "eval/return_mean",
        "mean of Σ reward over an episode",
        "Of the policy as it is deployed; statistics of the normalizers frozen.",
        f"mean {EVALUATION}; agents: sum",
        "reward",
        aliases=elsewhere(
            sb3="eval/mean_reward",
            cleanrl="eval/episodic_return",
            rllib="evaluation/env_runners/episode_return_mean",
        ),
    ),
    Metric(
        "eval/return_std", "standard deviation of the returns", "Of them.", EVALUATION, "reward"
    ),
    Metric(
        "eval/length_mean",
        "mean length of an episode",
        "In steps of the agent.",
        f"mean {EVALUATION}",
        "steps",
        aliases=elsewhere(
            sb3="eval/mean_ep_length", rllib="evaluation/env_runners/episode_len_mean"
        ),
    ),
    Metric("eval/episodes", "episodes evaluated", "How many.", EVALUATION, "episodes"),
    Metric(
        "eval/episodes_cut",
        "episodes that were cut",
        "Those that had not ended after `evaluation.max_episode_steps`; their returns count up to "
        "the cut. More than 0 with an environment that has no time limit: a policy that does "
        "nothing may play for ever.",
        EVALUATION,
        "episodes",
        healthy=(None, 0.0),
        healthy_note="Keel: 0; the environment has no time limit",
    ),
)

TIMES = (
    Metric(
        "time/steps",
        "steps of the environments",
        "Since the start, all environments together, frame skip not counted; autoreset rows are "
        "no steps.",
        "cumulative over the run",
        "steps",
        aliases=elsewhere(
            sb3="time/total_timesteps",
            rllib=("num_env_steps_sampled_lifetime", "timesteps_total"),
            rsl_rl=("Total timesteps", "Total steps"),
        ),
    ),
    Metric(
        "time/seconds",
        "seconds of training",
        "Since the start, pauses between a stop and its resume left out.",
        "cumulative over the run",
        "s",
        aliases=elsewhere(sb3="time/time_elapsed", rllib="time_total_s"),
    ),
    Metric(
        "time/steps_per_second",
        "steps of this iteration / its seconds",
        "SB3's fps and CleanRL's SPS are averages since the start.",
        CLOCK,
        "steps/s",
        aliases=elsewhere(
            sb3="time/fps",
            cleanrl="charts/SPS",
            rsl_rl=("Perf/total_fps", "Steps per second", "Computation"),
        ),
    ),
    Metric(
        "time/rollout_seconds",
        "seconds of collecting",
        "Acting and stepping.",
        CLOCK,
        "s",
        aliases=elsewhere(
            verl="timing_s/gen",
            openrlhf="timing/generation",
            rsl_rl=("Perf/collection_time", "Perf/collection time", "Collection time"),
        ),
    ),
    Metric(
        "time/update_seconds",
        "seconds of the update",
        "Advantages and gradient steps; certification not included.",
        CLOCK,
        "s",
        aliases=elsewhere(
            verl="timing_s/update_actor",
            openrlhf="timing/ppo_train",
            rsl_rl=("Perf/learning_time", "Learning time"),
        ),
    ),
    Metric(
        "time/certify_seconds",
        "seconds of measuring the exact KL and what goes with it",
        "The price of the certificate; walking back, where it was needed, is not in it.",
        CLOCK,
        "s",
    ),
    Metric(
        "time/gate_seconds",
        "seconds of replaying all rows before the update",
        "The price of the consistency gate; 0 in updates where it looks at the first pass only.",
        CLOCK,
        "s",
    ),
)

METRICS = (*ROLLOUTS, *EVALUATIONS, *TIMES)
