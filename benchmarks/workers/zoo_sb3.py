"""SB3's PPO on HalfCheetah with the settings of the RL Zoo, as a run beside ours.

    python zoo_sb3.py SEED [STEPS]   → one line of JSON

The settings are the tuned ones that rl-baselines3-zoo publishes for HalfCheetah (v4): one
environment, observations and rewards normalised. Evaluated like ours: ten whole episodes, the
likeliest action, the statistics of the normaliser frozen, raw rewards.
"""

from __future__ import annotations

import json
import sys
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

ENV = "HalfCheetah-v5"


def main(seed: int, steps: int) -> dict[str, object]:
    torch.set_num_threads(1)
    envs = VecNormalize(make_vec_env(ENV, 1, seed=seed), gamma=0.98)
    model = PPO(
        "MlpPolicy",
        envs,
        seed=seed,
        n_steps=512,
        batch_size=64,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.92,
        learning_rate=2.0633e-05,
        ent_coef=0.000401762,
        clip_range=0.1,
        max_grad_norm=0.8,
        vf_coef=0.58096,
        policy_kwargs={
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
    )
    begin = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - begin
    returns = []
    env = gymnasium.make(ENV)
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
        "env": ENV,
        "seed": seed,
        "steps": steps,
        "return_mean": float(np.mean(returns)),
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)))
