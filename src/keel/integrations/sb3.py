"""The doctor beside a training of Stable-Baselines3 (PPO, A2C, and sb3-contrib's TRPO).

    model = PPO("MlpPolicy", "CartPole-v1")
    model.learn(50_000, callback=DoctorCallback(path="logs/ppo"))

It reads what the model logs, and measures once a rollout what it does not log: whether the policy
that is about to learn gives the log-probs that were stored while sampling, how large observations
and targets are, which of them never change, and whether time limits are bootstrapped.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keel.errors import InputError
from keel.integrations.speaking import EVERY, Moves, Speaker, plain_settings, share_trained

PEER = "stable_baselines3"
try:
    BaseCallback: Any = importlib.import_module(f"{PEER}.common.callbacks").BaseCallback
    KVWriter: Any = importlib.import_module(f"{PEER}.common.logger").KVWriter
except ImportError:
    BaseCallback = KVWriter = None

ROWS = 2048
"""Rows of a rollout that are measured."""
STILL = 1e-3
"""Standard deviation below which a dimension of the observation says nothing, as the registry of
metrics defines `rollout/obs_dead_dims`."""


class DoctorCallback(BaseCallback or object):  # type: ignore[misc]
    """Callback that prints the doctor's verdict when it changes, and writes `doctor.json`."""

    def __init__(
        self,
        *,
        every: int = EVERY,
        path: Path | str | None = None,
        rows: Path | str | None = None,
        measure: bool = True,
        ignore: tuple[str, ...] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Prepare a callback for one training.

        Args:
            every: Logged rows between two looks.
            path: Folder of `doctor.json`, or a file for it; None: nothing is written.
            rows: File for what was collected, as lines of JSON; None: none.
            measure: Evaluate the policy on each rollout before it learns from it.
            ignore: Rules that shall not speak.
            say: Takes each line.
        """
        if BaseCallback is None:
            raise InputError("stable-baselines3 is not installed: pip install stable-baselines3")
        super().__init__()
        self.speaker = Speaker("sb3", every=every, path=path, ignore=ignore, say=say)
        self._rows = None if rows is None else Path(rows)
        self._measures = measure
        self._measured: dict[str, float] = {}
        self._rewards: list[Any] = []
        self._limits = [0, 0]
        self._moves: Moves | None = None

    def _on_training_start(self) -> None:
        """Read the settings, and listen to what the model logs."""
        self.speaker.guarded(self._begin)

    def _on_step(self) -> bool:
        """Count rewards and ends of episodes; never stop a training."""
        if self._measures:
            self.speaker.guarded(self._count)
        return True

    def _on_rollout_end(self) -> None:
        """Measure what the model is about to learn from."""
        if self._measures:
            self.speaker.guarded(self._measure)

    def _on_training_end(self) -> None:
        """Say the last verdict and write it."""
        self.speaker.close()
        if self._rows is not None:
            self.speaker.guarded(self._write_rows)

    def _begin(self) -> None:
        self.speaker.settings = settings_of(self.model)
        self.logger.output_formats.append(_Listener(self._hear))

    def _hear(self, values: dict[str, Any], step: int) -> None:
        self.speaker.add(step, {**self._measured, **values})

    def _count(self) -> None:
        self._rewards.append(np.array(self.locals["rewards"], dtype=np.float64))
        for info, done in zip(self.locals["infos"], self.locals["dones"], strict=False):
            limit = self.speaker.settings.get("facts.horizon")
            if done and "episode" in info and info["episode"]["l"] == limit:
                self._limits[0] += 1
                self._limits[1] += not info.get("TimeLimit.truncated", False)

    def _measure(self) -> None:
        buffer = getattr(self.model, "rollout_buffer", None)
        if buffer is None or isinstance(buffer.observations, dict):
            return
        self._measured = {**of_buffer(buffer), **of_policy(self.model, buffer)}
        if self._rewards:
            self._measured |= of_rewards(np.stack(self._rewards))
            self._rewards = []
        returns = [info["r"] for info in (self.model.ep_info_buffer or ())]
        if returns:
            self._measured["rollout/return_std"] = float(np.std(returns))
        self._measured |= self._learning()
        if self._limits[0]:
            self._measured["rollout/bootstrap_error"] = self._limits[1] / self._limits[0]
            self._limits = [0, 0]

    def _learning(self) -> dict[str, float]:
        """Return which parameters of the actor learn, and how far the update before moved them."""
        policy = self.model.policy
        actor = [p for name, p in policy.named_parameters() if "value_net" not in name]
        found = {"train/parameters_trained": share_trained(actor, policy.optimizer)}
        if self._moves is None:
            self._moves = Moves(actor)
            return found
        effect = self._moves()
        return found if effect is None else found | {"train/gradient_effect": effect}

    def _write_rows(self) -> None:
        assert self._rows is not None
        with self._rows.open("w") as file:
            for row in self.speaker.rows:
                finite = {k: v if np.isfinite(v) else None for k, v in row.values.items()}
                file.write(json.dumps({"step": row.step, **finite}) + "\n")


class _Listener(KVWriter or object):  # type: ignore[misc]
    """Output of the model's logger that passes every row on."""

    def __init__(self, hear: Callable[[dict[str, Any], int], None]) -> None:
        self._hear = hear

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        """Pass a row on."""
        self._hear(dict(key_values), step)

    def close(self) -> None:
        """Hold nothing."""


def settings_of(model: Any) -> dict[str, Any]:
    """Return what a model says of its settings, by Keel's dotted names.

    Args:
        model: An on-policy model of Stable-Baselines3 or sb3-contrib.
    """
    env = model.get_env()
    spec = getattr(env.envs[0], "spec", None) if hasattr(env, "envs") else None
    normalizer = env if hasattr(env, "norm_reward") else None
    found = {
        "algo": type(model).__name__.lower(),
        "env": getattr(spec, "id", None),
        "seed": model.seed,
        "total_steps": model._total_timesteps,
        "rollout_steps": model.n_steps,
        "envs.num": model.n_envs,
        "envs.normalize_reward": bool(normalizer is not None and normalizer.norm_reward),
        "envs.normalize_obs": bool(normalizer is not None and normalizer.norm_obs),
        "facts.actions": getattr(model.action_space, "n", None),
        "facts.horizon": getattr(spec, "max_episode_steps", None),
        "advantage.gamma": model.gamma,
        "advantage.lam": getattr(model, "gae_lambda", None),
        "region.minibatch": getattr(model, "batch_size", None),
        "region.epochs": getattr(model, "n_epochs", 1),
        "region.learning_rate": _now(model.learning_rate),
        "region.clip": _now(getattr(model, "clip_range", None)),
        "region.value_clip": _now(getattr(model, "clip_range_vf", None)),
        "region.target_kl": getattr(model, "target_kl", None),
        "region.max_grad_norm": getattr(model, "max_grad_norm", None),
        "region.value_coef": getattr(model, "vf_coef", None),
        "explore.entropy_coef": getattr(model, "ent_coef", None),
    }
    return plain_settings({k: _plain(v) for k, v in found.items()})


def of_buffer(buffer: Any) -> dict[str, float]:
    """Return the sizes of what is learned from, by Keel's names.

    Args:
        buffer: A full rollout buffer.
    """
    returns, values = _flat(buffer.returns), _flat(buffer.values)
    found = {
        "train/target_mean": float(returns.mean()),
        "train/target_std": float(returns.std()),
        "train/value_mean": float(values.mean()),
        "train/advantage_raw_std": float(_flat(buffer.advantages).std()),
    }
    obs = np.asarray(buffer.observations)
    if obs.ndim <= 3:  # vectors: pictures have dimensions that never change
        flat = obs.reshape(-1, *obs.shape[2:]).reshape(obs.shape[0] * obs.shape[1], -1)
        found["rollout/obs_abs_max"] = float(np.abs(flat).max())
        found["rollout/obs_dead_dims"] = float((flat.std(axis=0) < STILL).mean())
    return found


def of_rewards(rewards: Any) -> dict[str, float]:
    """Return what a rollout says of rewards, by Keel's names.

    Args:
        rewards: As the model learns from them, `[T, N]`.
    """
    return {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_abs_max": float(np.abs(rewards).max()),
        "rollout/reward_zero_share": float((rewards == 0.0).mean()),
    }


def of_policy(model: Any, buffer: Any) -> dict[str, float]:
    """Return how the policy sees the rollout before it learns from it, by Keel's names.

    It is evaluated as it is when it learns (with dropout, where there is some), and its random
    numbers are put back, so that the training is what it would be without.

    Args:
        model: An on-policy model.
        buffer: Its full rollout buffer, whose arrays are `[T, N, …]`.
    """
    policy = model.policy
    if any("BatchNorm" in type(m).__name__ for m in policy.modules()):
        return {}  # evaluating it would change it
    obs, actions = _rows_of(buffer.observations), _rows_of(buffer.actions)
    stored = _rows_of(buffer.log_probs).reshape(-1)
    discrete = hasattr(model.action_space, "n")
    device = model.device
    was_training = policy.training
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _dead_units(policy) as dead:
        policy.set_training_mode(True)
        try:
            action = torch.as_tensor(actions, device=device)
            action = action.long().flatten() if discrete else action
            _, log_prob, _ = policy.evaluate_actions(torch.as_tensor(obs, device=device), action)
        finally:
            policy.set_training_mode(was_training)
    gap = np.abs(log_prob.cpu().numpy() - stored)
    found = {"train/gate_log_ratio": float(gap.max())}
    if dead:
        found["train/dead_units"] = float(np.concatenate(dead).mean())
    if discrete:
        counts = np.bincount(actions.reshape(-1).astype(int), minlength=int(model.action_space.n))
        found["rollout/action_share_max"] = float(counts.max() / counts.sum())
    return found


@contextmanager
def _dead_units(policy: Any) -> Iterator[list[Any]]:
    """Collect, of each layer of ReLU that is evaluated in the block, which units are all 0."""
    dead: list[Any] = []

    def look(_: Any, __: Any, output: Any) -> None:
        dead.append((output.flatten(1) == 0.0).all(0).double().cpu().numpy())

    hooks = [m.register_forward_hook(look) for m in policy.modules() if type(m) is torch.nn.ReLU]
    try:
        yield dead
    finally:
        for hook in hooks:
            hook.remove()


def _rows_of(array: Any) -> Any:
    """Return `[T, N, …]` as at most `ROWS` rows, evenly chosen."""
    array = np.asarray(array)
    flat = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return flat[:: max(1, -(-len(flat) // ROWS))]


def _flat(array: Any) -> Any:
    return np.asarray(array, dtype=np.float64).reshape(-1)


def _now(schedule: Any) -> Any:
    """Return the value at the start of training of what may be a schedule."""
    return schedule(1.0) if callable(schedule) else schedule


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
