"""Runs of Stable-Baselines3 for the corpus: its own trainers, its own CSV log, Keel's callback.

Faults are patches of one model, at the places where programs go wrong: what is sampled, what is
stored, what is learned from, and what is logged.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from benchmarks.doctor_corpus.serving import serve
from benchmarks.doctor_corpus.wrappers import INSIDE, OUTSIDE, wrap
from keel.integrations.sb3 import DoctorCallback

ALGOS = {"ppo": PPO, "a2c": A2C}
LOG, ROWS, SETTINGS = "progress.csv", "callback.jsonl", "settings.json"


def run(job: dict[str, Any], folder: Path) -> None:
    """Train as a job says."""
    torch.set_num_threads(1)
    settings = dict(job["settings"])
    inject = [(name, value) for name, value in job["inject"]]
    algo = ALGOS[settings.pop("algo", "ppo")]
    num, normalize = settings.pop("n_envs", 1), settings.pop("normalize", None)
    net = {"activation_fn": getattr(nn, settings.pop("activation", "Tanh"))}
    for name in ("learning_rate", "clip_range"):
        if isinstance(settings.get(name), str):
            settings[name] = LinearSchedule(float(settings[name].removeprefix("lin_")), 0.0, 1.0)
    env: Any = DummyVecEnv([lambda: _env(job["env"], inject)] * num)
    if normalize is not None:
        env = VecNormalize(env, gamma=settings.get("gamma", 0.99), **normalize)
    policy_kwargs = net | settings.pop("policy_kwargs", {})
    model: Any = algo("MlpPolicy", env, seed=job["seed"], policy_kwargs=policy_kwargs, **settings)
    model.set_logger(configure(str(folder), ["csv"]))
    after: list[Callable[..., None]] = []
    watching: list[BaseCallback] = []
    for name, value in inject:
        if name in PATCHES:
            PATCHES[name](model, value, after, watching)
    doctor = DoctorCallback(path=folder, rows=folder / ROWS, every=10)
    model.learn(job["steps"], callback=[*watching, doctor], log_interval=1)
    (folder / SETTINGS).write_text(json.dumps(doctor.speaker.settings))


def _env(env_id: str, inject: list[tuple[str, Any]]) -> Any:
    env = wrap(gymnasium.make(env_id), inject, INSIDE)
    return wrap(Monitor(env), inject, OUTSIDE)


def _after_rollout(model: Any, change: Callable[[Any], None]) -> None:
    """Change the buffer once it is full and its advantages are computed."""
    buffer = model.rollout_buffer
    own = buffer.compute_returns_and_advantage

    def computed(last_values: Any, dones: Any) -> None:
        own(last_values, dones)
        change(buffer)

    buffer.compute_returns_and_advantage = computed


def _recorded(model: Any, key: str, change: Callable[[float], float]) -> None:
    """Change what is logged under a name."""
    own = model.logger.record

    def record(name: str, value: Any, exclude: Any = None) -> None:
        own(name, change(float(value)) if name == key else value, exclude)

    model.logger.record = record


def temperature(model: Any, value: float, *_: Any) -> None:
    """Sample at a temperature that the log-probs do not know of."""
    _sampled(model, lambda logits: torch.distributions.Categorical(logits=logits / value).sample())


def epsilon_greedy(model: Any, value: float, *_: Any) -> None:
    """Take a share of the actions at random; stored are the action taken and the prob. of the one
    that was meant."""
    policy = model.policy
    own = policy.forward

    def forward(obs: Any, deterministic: bool = False) -> Any:
        actions, values, log_prob = own(obs, deterministic)
        stray = torch.rand(len(actions)) < value
        drawn = torch.randint_like(actions, int(model.action_space.n))
        return torch.where(stray, drawn, actions), values, log_prob

    policy.forward = forward


def _sampled(model: Any, draw: Callable[[Any], Any]) -> None:
    policy = model.policy

    def forward(obs: Any, deterministic: bool = False) -> Any:
        dist = policy.get_distribution(obs)
        actions = draw(dist.distribution.logits)
        meant = dist.distribution.sample()
        return actions, policy.predict_values(obs), dist.log_prob(meant)

    policy.forward = forward


def processed(model: Any, value: float, *_: Any) -> None:
    """Store the log-probs at the temperature of sampling, and learn at a temperature of 1."""
    policy = model.policy

    def forward(obs: Any, deterministic: bool = False) -> Any:
        logits = policy.get_distribution(obs).distribution.logits
        dist = torch.distributions.Categorical(logits=logits / value)
        actions = dist.sample()
        return actions, policy.predict_values(obs), dist.log_prob(actions)

    policy.forward = forward


def dropout(model: Any, value: float, *_: Any) -> None:
    """Dropout that is on when the policy learns, and off when it acts."""
    net = model.policy.mlp_extractor.policy_net
    model.policy.mlp_extractor.policy_net = nn.Sequential(*net, nn.Dropout(value))


def renormalized(model: Any, *_: Any) -> None:
    """Normalize stored observations with statistics from after the rollout."""
    env = model.env
    before = [copy.deepcopy(env.obs_rms)]

    def change(buffer: Any) -> None:
        old, new = before[0], env.obs_rms
        raw = buffer.observations * np.sqrt(old.var + 1e-8) + old.mean
        buffer.observations = ((raw - new.mean) / np.sqrt(new.var + 1e-8)).astype(np.float32)
        before[0] = copy.deepcopy(new)

    _after_rollout(model, change)


def stale(model: Any, value: int, *_: Any) -> None:
    """Act with weights that are refreshed only every so many rollouts."""
    policy = model.policy
    actor, count = copy.deepcopy(policy), [0]

    def forward(obs: Any, deterministic: bool = False) -> Any:
        with torch.no_grad():
            actions, _, log_prob = type(policy).forward(actor, obs, deterministic)
        return actions, policy.predict_values(obs), log_prob

    def refresh(_: Any) -> None:
        count[0] += 1
        if count[0] % int(value) == 0:
            actor.load_state_dict(policy.state_dict())

    policy.forward = forward
    _after_rollout(model, refresh)


def misaligned(model: Any, *_: Any) -> None:
    """Store each action one row late."""

    def change(buffer: Any) -> None:
        buffer.actions = np.roll(buffer.actions, 1, axis=0)

    _after_rollout(model, change)


def advantage_sign(model: Any, *_: Any) -> None:
    """Learn to do what is worse."""

    def change(buffer: Any) -> None:
        buffer.advantages = -buffer.advantages

    _after_rollout(model, change)


def never_ends(model: Any, *_: Any) -> None:
    """Bootstrap through the ends of episodes."""
    buffer = model.rollout_buffer
    own = buffer.compute_returns_and_advantage

    def computed(last_values: Any, dones: Any) -> None:
        starts = buffer.episode_starts.copy()
        buffer.episode_starts[:] = 0.0
        own(last_values, np.zeros_like(dones))
        buffer.episode_starts[:] = starts

    buffer.compute_returns_and_advantage = computed


def optimizer_elsewhere(model: Any, *_: Any) -> None:
    """Give the optimizer a copy of the policy, as after moving or wrapping a module."""
    other = copy.deepcopy(model.policy)
    model.policy.optimizer = torch.optim.Adam(other.parameters(), lr=model.learning_rate)


def actor_frozen(model: Any, *_: Any) -> None:
    """Learn nothing but the critic."""
    for part in (model.policy.mlp_extractor.policy_net, model.policy.action_net):
        part.requires_grad_(False)


def critic_rate(model: Any, value: float, *_: Any) -> None:
    """Give the critic a learning rate so many times that of the actor."""
    policy, rate = model.policy, model.lr_schedule(1.0)
    critic = [*policy.mlp_extractor.value_net.parameters(), *policy.value_net.parameters()]
    ids = {id(p) for p in critic}
    actor = [p for p in policy.parameters() if id(p) not in ids]
    groups = [{"params": actor, "lr": rate}, {"params": critic, "lr": rate * value}]
    policy.optimizer = torch.optim.Adam(groups, eps=1e-5)
    model._update_learning_rate = lambda _: model.logger.record("train/learning_rate", rate)


def dead_units(model: Any, value: float, *_: Any) -> None:
    """Begin with biases below what any observation reaches."""
    for module in model.policy.mlp_extractor.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, -float(value))


def rate_zero(model: Any, value: float, *_: Any) -> None:
    """A schedule that ends long before the training does."""
    rate = model.learning_rate if isinstance(model.learning_rate, float) else 3e-4
    model.lr_schedule = lambda left: rate if left > 1.0 - float(value) else 0.0


def evaluate_unnormalized(model: Any, value: int, _: Any, watching: list[BaseCallback]) -> None:
    """Evaluate without the statistics that observations were normalized by."""
    env = Monitor(gymnasium.make(model.env.envs[0].spec.id))

    class Evaluation(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            mean, _ = evaluate_policy(model, env, int(value), warn=False)
            self.logger.record("eval/mean_reward", mean)

    watching.append(Evaluation())


def nan_rows(model: Any, value: int, *_: Any) -> None:
    """A division by zero in the advantages, now and then."""
    count = [0]

    def change(buffer: Any) -> None:
        count[0] += 1
        if count[0] == int(value):
            buffer.advantages[0, 0] = np.nan

    _after_rollout(model, change)


PATCHES: dict[str, Callable[..., None]] = {
    "temperature": temperature,
    "epsilon_greedy": epsilon_greedy,
    "processed": processed,
    "dropout": dropout,
    "renormalized": renormalized,
    "stale": stale,
    "misaligned": misaligned,
    "advantage_sign": advantage_sign,
    "never_ends": never_ends,
    "optimizer_elsewhere": optimizer_elsewhere,
    "actor_frozen": actor_frozen,
    "critic_rate": critic_rate,
    "dead_units": dead_units,
    "rate_zero": rate_zero,
    "evaluate_unnormalized": evaluate_unnormalized,
    "nan_rows": nan_rows,
    "kl_zero": lambda model, *_: _recorded(model, "train/approx_kl", lambda _: 0.0),
    "kl_sum": lambda model, rows, *_: _recorded(model, "train/approx_kl", lambda x: x * rows),
    "kl_sign": lambda model, *_: _recorded(model, "train/approx_kl", lambda x: -x),
    "clip_sum": lambda model, n, *_: _recorded(model, "train/clip_fraction", lambda x: x * n),
    "entropy_sum": lambda model, n, *_: _recorded(model, "train/entropy_loss", lambda x: x * n),
    "entropy_sign": lambda model, *_: _recorded(model, "train/entropy_loss", lambda x: -x),
    "variance_ratio": lambda model, *_: _recorded(
        model, "train/explained_variance", lambda x: 2.0 - x
    ),
}

if __name__ == "__main__":
    serve(run)
