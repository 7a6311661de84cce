"""Train Stable-Baselines3's PPO with its own defaults, as a log that `keel compare` reads.

    python defaults_sb3.py ENV STEPS EPISODES FOLDER SEED...

Writes SB3's `progress.csv` to FOLDER/seed-SEED. Its last line is the evaluation of the final
policy: EPISODES whole episodes with the likeliest action, in an environment that training has not
seen.
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
EVALUATION_ENVS = 10
"""Environments stepped together in the evaluation, which ask the policy once; each gives as many
episodes as the others."""


def train(env: str, steps: int, episodes: int, folder: Path, seed: int) -> None:
    """Train and evaluate one seed."""
    model = PPO("MlpPolicy", env, seed=seed, device="cpu")
    model.set_logger(configure(str(folder), ["csv"]))
    model.learn(steps)
    envs = make_vec_env(env, min(EVALUATION_ENVS, episodes), seed=EVALUATION_SEED + 100 * seed)
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
    (folder / "evaluation.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, total, games, target, *seeds = sys.argv[1:]
    for number in map(int, seeds):
        train(name, int(total), int(games), Path(target) / f"seed-{number}", number)
