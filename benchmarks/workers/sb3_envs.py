"""The environments of Stable-Baselines3 and sbx: Gymnasium's in one process, or EnvPool's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from common import Clock, total_steps
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize


def make_envs(work: SimpleNamespace) -> VecEnv:
    if work.pixels:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        # SB3's own preprocessing: frame skip 4, 84×84, as in Keel; it also ends episodes at a life
        return VecFrameStack(make_atari_env(work.peer_env, work.num_envs, seed=work.seed), 4)
    if work.backend == "envpool":
        from sb3_envpool import EnvPoolVecEnv

        envs: VecEnv = EnvPoolVecEnv(work.peer_env, work.num_envs, work.seed)
    else:
        envs = make_vec_env(work.peer_env, work.num_envs, seed=work.seed, vec_env_cls=DummyVecEnv)
    return VecNormalize(envs, gamma=work.gamma) if work.normalize else envs


def arguments(work: SimpleNamespace, envs: VecEnv) -> dict[str, Any]:
    """PPO's arguments, which sbx and SB3 spell alike."""
    return {
        "policy": "CnnPolicy" if work.pixels else "MlpPolicy",
        "env": envs,
        "n_steps": work.rollout_steps,
        "batch_size": work.minibatch,
        "n_epochs": work.epochs,
        "learning_rate": work.learning_rate,
        "gamma": work.gamma,
        "gae_lambda": work.lam,
        "clip_range": work.clip,
        "ent_coef": work.entropy_coef,
        "vf_coef": work.value_coef,
        "max_grad_norm": work.max_grad_norm,
        "seed": work.seed,
        "device": "cpu",
    }


class Ticks(BaseCallback):
    """A tick at the begin of every rollout."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def _on_rollout_start(self) -> None:
        self.clock.tick()

    def _on_step(self) -> bool:
        return True


def learn(model: Any, work: SimpleNamespace) -> Clock:
    clock = Clock(work)
    model.learn(total_steps(work), callback=Ticks(clock), log_interval=None)
    clock.tick()
    return clock


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
