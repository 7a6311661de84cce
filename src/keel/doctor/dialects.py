"""Names of settings in other frameworks, by Keel's dotted names.

Looked up in their sources: Stable-Baselines3 2.9 and sb3-contrib (`PPO`, `TRPO`), CleanRL's
`ppo.py`, TRL 1.x (`GRPOConfig`, `experimental.ppo.PPOConfig`), verl's generated trainer
configuration, OpenRLHF's `train_ppo_ray`, RLlib's `PPOConfig` (new API stack), rsl_rl's runner
configuration and `PPO`, ms-swift's `swift rlhf --rlhf_type grpo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Style = Literal["keel", "call", "flag", "override", "yaml"]
"""How a setting is written: `name: value`, `Call(name=value)`, `--name value`, `name=value`."""
Convert = Callable[[Any, Mapping[str, Any]], Any]
"""A value of Keel's, and the settings that are known, to the value there; None: not known."""


class There(NamedTuple):
    """A setting in another framework."""

    name: str
    where: str = ""
    """call or section that it belongs to"""
    convert: Convert | None = None
    note: str = ""
    """in what it differs"""


class Dialect(NamedTuple):
    """A framework's names."""

    title: str
    style: Style
    where: str
    """what takes the settings, unless one says otherwise"""
    names: Mapping[str, There]


def _count_of_minibatches(rows: Any, settings: Mapping[str, Any]) -> Any:
    steps, envs = settings.get("rollout_steps"), settings.get("envs.num")
    if not all(isinstance(x, int | float) and x > 0 for x in (rows, steps, envs)):
        return None
    return max(1, round(steps * envs / rows))  # type: ignore[operator]


def _rollout_rows(steps: Any, settings: Mapping[str, Any]) -> Any:
    envs = settings.get("envs.num")
    return steps * envs if isinstance(envs, int) and isinstance(steps, int) else None


def _is_normalized(value: Any, _: Mapping[str, Any]) -> Any:
    return value not in ("none", False, None)


def _std(log_std: Any, _: Mapping[str, Any]) -> Any:
    from math import exp

    return exp(log_std) if isinstance(log_std, int | float) else None


def _trl_loss(reduction: Any, _: Mapping[str, Any]) -> Any:
    known = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}
    return known.get(str(reduction))


def _scaling(value: Any, _: Mapping[str, Any]) -> Any:
    return {"group": "group", "batch": "batch", "none": "none"}.get(str(value))


def _level(form: Any, _: Mapping[str, Any]) -> Any:
    return {"token": "token", "sequence": "sequence"}.get(str(form))


def _openrlhf_loss(form: Any, _: Mapping[str, Any]) -> Any:
    return {"token": "ppo", "sequence": "gspo"}.get(str(form))


MINIBATCHES = "their number, not their size"
SB3_ENVS, SB3_NORMALIZE = "make_vec_env", "VecNormalize"
SB3 = {
    "region.learning_rate": There("learning_rate"),
    "region.epochs": There("n_epochs"),
    "region.minibatch": There("batch_size"),
    "region.clip": There("clip_range"),
    "region.value_clip": There("clip_range_vf"),
    "region.target_kl": There("target_kl", note="stops the update at 1.5 × this"),
    "region.value_coef": There("vf_coef"),
    "region.max_grad_norm": There("max_grad_norm"),
    "explore.entropy_coef": There("ent_coef"),
    "advantage.gamma": There("gamma"),
    "advantage.lam": There("gae_lambda"),
    "advantage.normalize": There("normalize_advantage", convert=_is_normalized),
    "rollout_steps": There("n_steps"),
    "envs.num": There("n_envs", SB3_ENVS),
    "envs.normalize_obs": There("norm_obs", SB3_NORMALIZE),
    "envs.normalize_reward": There("norm_reward", SB3_NORMALIZE),
    "envs.clip_reward": There("clip_reward", SB3_NORMALIZE),
    "network.log_std": There("policy_kwargs['log_std_init']"),
    "total_steps": There("total_timesteps", "model.learn"),
    "seed": There("seed"),
}
SB3_TRPO = {
    **{
        name: SB3[name]
        for name in SB3
        if not name.startswith(("region.", "explore.")) or name == "region.learning_rate"
    },
    "region.minibatch": There("batch_size", note="of the critic"),
    "region.epochs": There("n_critic_updates"),
    "region.max_kl": There("target_kl"),
    "natural.damping": There("cg_damping"),
    "natural.cg_iters": There("cg_max_steps"),
    "natural.backtrack_iters": There("line_search_max_iter"),
    "natural.backtrack_coeff": There("line_search_shrinking_factor"),
}
CLEANRL = {
    "region.learning_rate": There("learning-rate"),
    "region.epochs": There("update-epochs"),
    "region.minibatch": There("num-minibatches", convert=_count_of_minibatches, note=MINIBATCHES),
    "region.clip": There("clip-coef"),
    "region.target_kl": There("target-kl"),
    "region.value_coef": There("vf-coef"),
    "region.max_grad_norm": There("max-grad-norm"),
    "explore.entropy_coef": There("ent-coef"),
    "advantage.gamma": There("gamma"),
    "advantage.lam": There("gae-lambda"),
    "advantage.normalize": There("norm-adv", convert=_is_normalized),
    "rollout_steps": There("num-steps"),
    "envs.num": There("num-envs"),
    "total_steps": There("total-timesteps"),
    "seed": There("seed"),
}
GRPO = {
    "region.learning_rate": There("learning_rate"),
    "region.epochs": There("num_iterations"),
    "region.minibatch": There(
        "per_device_train_batch_size", note="× gradient_accumulation_steps × processes"
    ),
    "region.clip": There("epsilon"),
    "region.clip_high": There("epsilon_high"),
    "region.dual_clip": There("delta", note="on the ratio, where A < 0"),
    "region.max_grad_norm": There("max_grad_norm"),
    "region.entropy_coef": There("entropy_coef", note="TRL from 2026 on"),
    "region.form": There("importance_sampling_level", convert=_level),
    "region.reduction": There("loss_type", convert=_trl_loss),
    "region.schedule": There("lr_scheduler_type"),
    "advantage.normalize": There("scale_rewards", convert=_scaling),
    "kl.coef": There("beta"),
    "sample.temperature": There("temperature"),
    "sample.top_p": There("top_p"),
    "sample.top_k": There("top_k"),
    "sample.group": There("num_generations"),
    "sample.max_new_tokens": There("max_completion_length"),
    "sample.max_importance": There(
        "vllm_importance_sampling_clip_max", note="vllm_importance_sampling_cap before 2026"
    ),
    "seed": There("seed"),
}
TRL_PPO = {
    "region.learning_rate": There("learning_rate"),
    "region.epochs": There("num_ppo_epochs"),
    "region.minibatch": There("mini_batch_size"),
    "region.clip": There("cliprange"),
    "region.value_clip": There("cliprange_value"),
    "region.value_coef": There("vf_coef"),
    "region.max_grad_norm": There("max_grad_norm"),
    "region.schedule": There("lr_scheduler_type"),
    "advantage.gamma": There("gamma"),
    "advantage.lam": There("lam"),
    "kl.coef": There("kl_coef"),
    "sample.temperature": There("temperature"),
    "sample.max_new_tokens": There("response_length"),
    "seed": There("seed"),
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = {
    "region.learning_rate": There(f"{ACTOR}.optim.lr"),
    "region.critic_learning_rate": There("critic.optim.lr"),
    "region.epochs": There(f"{ACTOR}.ppo_epochs"),
    "region.minibatch": There(f"{ACTOR}.ppo_mini_batch_size", note="prompts, not completions"),
    "region.clip": There(f"{ACTOR}.clip_ratio", note="with clip_ratio_low and clip_ratio_high"),
    "region.clip_high": There(f"{ACTOR}.clip_ratio_high"),
    "region.dual_clip": There(f"{ACTOR}.clip_ratio_c"),
    "region.value_clip": There("critic.cliprange_value"),
    "region.max_grad_norm": There(f"{ACTOR}.grad_clip"),
    "region.entropy_coef": There(f"{ACTOR}.entropy_coeff"),
    "region.reduction": There(f"{ACTOR}.loss_agg_mode"),
    "region.schedule": There(f"{ACTOR}.optim.lr_scheduler_type"),
    "advantage.gamma": There("algorithm.gamma"),
    "advantage.lam": There("algorithm.lam"),
    "advantage.normalize": There("algorithm.norm_adv_by_std_in_grpo", convert=_is_normalized),
    "kl.coef": There(f"{ACTOR}.kl_loss_coef", note="in the reward: algorithm.kl_ctrl.kl_coef"),
    "kl.target": There("algorithm.kl_ctrl.target_kl"),
    "kl.horizon": There("algorithm.kl_ctrl.horizon"),
    "kl.controller": There("algorithm.kl_ctrl.type"),
    "sample.temperature": There(f"{ROLLOUT}.temperature"),
    "sample.top_p": There(f"{ROLLOUT}.top_p"),
    "sample.top_k": There(f"{ROLLOUT}.top_k"),
    "sample.group": There(f"{ROLLOUT}.n"),
    "sample.prompts": There("data.train_batch_size"),
    "sample.max_new_tokens": There("data.max_response_length"),
    "sample.max_importance": There(
        "algorithm.rollout_correction.rollout_is_threshold", note="with rollout_is=token"
    ),
}
OPENRLHF = {
    "region.learning_rate": There("actor_learning_rate"),
    "region.critic_learning_rate": There("critic_learning_rate"),
    "region.epochs": There("max_epochs"),
    "region.minibatch": There("train_batch_size"),
    "region.clip": There("eps_clip"),
    "region.dual_clip": There("dual_clip"),
    "region.value_clip": There("value_clip"),
    "region.max_grad_norm": There("max_norm"),
    "region.entropy_coef": There("entropy_loss_coef"),
    "region.form": There("policy_loss_type", convert=_openrlhf_loss),
    "region.schedule": There("lr_scheduler"),
    "advantage.gamma": There("gamma"),
    "advantage.lam": There("lambd"),
    "kl.coef": There("init_kl_coef"),
    "kl.target": There("kl_target"),
    "kl.horizon": There("kl_horizon"),
    "sample.temperature": There("temperature"),
    "sample.top_p": There("top_p"),
    "sample.group": There("n_samples_per_prompt"),
    "sample.prompts": There("rollout_batch_size"),
    "sample.max_new_tokens": There("generate_max_len"),
    "sample.max_importance": There(
        "vllm_is_truncated_threshold", note="with --enable_vllm_is_correction"
    ),
    "seed": There("seed"),
}
RUNNERS = ".env_runners"
RLLIB = {
    "region.learning_rate": There("lr"),
    "region.epochs": There("num_epochs"),
    "region.minibatch": There("minibatch_size"),
    "region.clip": There("clip_param"),
    "region.value_clip": There("vf_clip_param"),
    "region.target_kl": There("kl_target"),
    "region.kl_coef": There("kl_coeff"),
    "region.value_coef": There("vf_loss_coeff"),
    "region.max_grad_norm": There("grad_clip"),
    "explore.entropy_coef": There("entropy_coeff"),
    "advantage.gamma": There("gamma"),
    "advantage.lam": There("lambda_"),
    "rollout_steps": There(
        "train_batch_size_per_learner", convert=_rollout_rows, note="steps × environments"
    ),
    "envs.num": There("num_envs_per_env_runner", RUNNERS),
    "seed": There("seed", ".debugging"),
}
RUNNER = "runner"
RSL_RL = {
    "region.learning_rate": There("learning_rate"),
    "region.epochs": There("num_learning_epochs"),
    "region.minibatch": There("num_mini_batches", convert=_count_of_minibatches, note=MINIBATCHES),
    "region.clip": There("clip_param"),
    "region.target_kl": There("desired_kl"),
    "region.value_coef": There("value_loss_coef"),
    "region.max_grad_norm": There("max_grad_norm"),
    "explore.entropy_coef": There("entropy_coef"),
    "advantage.gamma": There("gamma"),
    "advantage.lam": There("lam"),
    "rollout_steps": There("num_steps_per_env", RUNNER),
    "envs.num": There("num_envs", "scene"),
    "envs.normalize_obs": There(
        "actor_obs_normalization", "policy", note="empirical_normalization before rsl_rl 3"
    ),
    "network.log_std": There("init_noise_std", "policy", convert=_std),
    "seed": There("seed", RUNNER),
}
DIALECTS: dict[str, Dialect] = {
    "sb3": Dialect("Stable-Baselines3", "call", "PPO", SB3),
    "sb3-trpo": Dialect("sb3-contrib", "call", "TRPO", SB3_TRPO),
    "cleanrl": Dialect("CleanRL", "flag", "python ppo.py", CLEANRL),
    "trl": Dialect("TRL", "call", "GRPOConfig", GRPO),
    "trl-ppo": Dialect("TRL", "call", "PPOConfig", TRL_PPO),
    "verl": Dialect("verl", "override", "python3 -m verl.trainer.main_ppo", VERL),
    "openrlhf": Dialect("OpenRLHF", "flag", "python3 -m openrlhf.cli.train_ppo_ray", OPENRLHF),
    "rllib": Dialect("RLlib", "call", ".training", RLLIB),
    "rsl_rl": Dialect("rsl_rl", "yaml", "algorithm", RSL_RL),
    "swift": Dialect("ms-swift", "flag", "swift rlhf --rlhf_type grpo", GRPO),
}
"""By framework, as `RunLog.framework` names it, and algorithm where the names depend on it."""
SAME = {
    "gamma": "advantage.gamma",
    "lam": "advantage.lam",
    "region.entropy_coef": "explore.entropy_coef",
    "explore.entropy_coef": "region.entropy_coef",
    "learning_rate": "region.learning_rate",
}
"""Settings that kinds of runs have under another name."""


def dialect_of(framework: str, settings: Mapping[str, Any]) -> Dialect | None:
    """Return the names that a framework uses; None for Keel itself and for logs of unknown origin.

    Args:
        framework: As in `RunLog.framework`.
        settings: Those that are known; `algo` says which algorithm.
    """
    algo = str(settings.get("algo", "")).lower()
    return DIALECTS.get(f"{framework}-{algo}") or DIALECTS.get(framework)
