"""SB3 and sb3-contrib with the settings of the RL Zoo, as runs beside ours.

    python zoo_sb3.py {ppo,trpo} ENV SEED [STEPS]   → one line of JSON

The settings are the tuned ones that rl-baselines3-zoo publishes for version 4 of an environment,
observations and rewards normalized. Evaluated like ours: ten whole episodes, the likeliest action,
the statistics of the normalizer frozen, raw rewards.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

PPO_HALFCHEETAH = {
    "n_steps": 512,
    "batch_size": 64,
    "n_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.92,
    "learning_rate": 2.0633e-05,
    "ent_coef": 0.000401762,
    "clip_range": 0.1,
    "max_grad_norm": 0.8,
    "vf_coef": 0.58096,
    "policy_kwargs": {
        "log_std_init": -2,
        "ortho_init": False,
        "activation_fn": torch.nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    },
}
TRPO_MUJOCO = {
    "n_steps": 1024,
    "batch_size": 128,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "sub_sampling_factor": 1,
    "cg_max_steps": 25,
    "cg_damping": 0.1,
    "n_critic_updates": 20,
    "learning_rate": 1e-3,
}
SETTINGS: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("ppo", "HalfCheetah-v5"): (1, PPO_HALFCHEETAH),
    ("trpo", "Hopper-v5"): (2, TRPO_MUJOCO),
    ("trpo", "Walker2d-v5"): (2, TRPO_MUJOCO),
}
"""Number of environments and arguments, by algorithm and environment."""


def main(algo: str, env_id: str, seed: int, steps: int) -> dict[str, object]:
    torch.set_num_threads(1)
    num_envs, settings = SETTINGS[algo, env_id]
    envs = VecNormalize(make_vec_env(env_id, num_envs, seed=seed), gamma=settings["gamma"])
    model = {"ppo": PPO, "trpo": TRPO}[algo]("MlpPolicy", envs, seed=seed, **settings)
    begin = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - begin
    returns = []
    env = gymnasium.make(env_id)
    for episode in range(10):
        obs, _ = env.reset(seed=10_000 + episode)
        total, over = 0.0, False
        while not over:
            action, _ = model.predict(envs.normalize_obs(obs[None]), deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action[0])
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    return {
        "env": env_id,
        "algo": algo,
        "seed": seed,
        "steps": steps,
        "return_mean": float(np.mean(returns)),
        "seconds": seconds,
    }


if __name__ == "__main__":
    algo, env_id, seed, *steps = sys.argv[1:]
    print(json.dumps(main(algo, env_id, int(seed), int(steps[0]) if steps else 1_000_000)))
