"""Stable-Baselines3's PPO."""

from common import answer, job
from sb3_envs import arguments, learn, make_envs, set_threads
from stable_baselines3 import PPO
from torch import nn

if __name__ == "__main__":
    work = job()
    set_threads(work.threads)
    network = {"pi": work.hidden, "vf": work.hidden}
    kwargs = {} if work.pixels else {"net_arch": network, "activation_fn": nn.Tanh}
    model = PPO(**arguments(work, make_envs(work)), policy_kwargs=kwargs)
    answer(learn(model, work), ["stable-baselines3", "torch", "gymnasium"])
