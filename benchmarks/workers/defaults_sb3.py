"""Train Stable-Baselines3's PPO with its own defaults, as a log that `keel compare` reads.

    python defaults_sb3.py ENV SEED STEPS EPISODES FOLDER

Writes SB3's `progress.csv` to FOLDER. Its last line is the evaluation of the final policy: EPISODES
whole episodes with the likeliest action, in an environment that training has not seen.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure

EVALUATION_SEED = 1_000_000
"""Far from the seeds of training; both sides evaluate on environments of their own."""


def main(env: str, seed: int, steps: int, episodes: int, folder: str) -> None:
    """Train and evaluate one seed."""
    torch.set_num_threads(1)
    model = PPO("MlpPolicy", env, seed=seed, device="cpu")
    model.set_logger(configure(folder, ["csv"]))
    model.learn(steps)
    envs = make_vec_env(env, 1, seed=EVALUATION_SEED + seed)
    returns, lengths = evaluate_policy(
        model, envs, n_eval_episodes=episodes, deterministic=True, return_episode_rewards=True
    )
    model.logger.record("time/total_timesteps", model.num_timesteps)
    model.logger.record("eval/mean_reward", float(np.mean(returns)))
    model.logger.record("eval/mean_ep_length", float(np.mean(lengths)))
    model.logger.dump(model.num_timesteps)
    packages = ("stable-baselines3", "torch", "gymnasium", "mujoco")
    record = {
        "env": env,
        "seed": seed,
        "steps": model.num_timesteps,
        "episodes": episodes,
        "returns": [float(x) for x in returns],
        "versions": {name: version(name) for name in packages},
    }
    Path(folder, "evaluation.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    name, *numbers, target = sys.argv[1:]
    main(name, *map(int, numbers), target)
