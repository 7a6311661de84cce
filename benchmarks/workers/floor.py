"""The floor: the environment alone, and the network's arithmetic at the speed of a large GEMM.

Nothing that collects in lockstep and then updates can be faster than
1 / (seconds of an environment step + seconds of its share of multiplications).
"""

import json
import time

import numpy as np
import torch
from common import job
from run_keel import configuration
from torch.utils.flop_counter import FlopCounterMode

from keel.envs import make_envs
from keel.networks.build import build_agent
from keel.resources import cores


def env_rate(envs, windows: int = 5, seconds: float = 0.4) -> float:
    """Steps per second with random actions, drawn beforehand; the best of some windows."""
    envs.reset(0)
    space = envs.action_space
    space.seed(0)
    actions = [np.stack([space.sample() for _ in range(envs.num_envs)]) for _ in range(64)]
    best = 0.0
    for _ in range(windows):
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for action in actions:
                envs.step(action)
            steps += len(actions) * envs.num_envs
        best = max(best, steps / (time.perf_counter() - begin))
    return best


def gemm_rate(size: int = 1024, repeats: int = 20) -> float:
    """FLOP per second of the best of some float32 products, on all cores."""
    torch.set_num_threads(cores())
    a, b = torch.randn(2, size, size).unbind()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best


def flops(agent, envs, rows: int) -> tuple[float, float]:
    """Per row: a forward pass, and a forward with a backward pass."""
    space = envs.observation_space
    obs = {"obs": torch.zeros(rows, *space.shape, dtype=torch.from_numpy(space.sample()).dtype)}
    params = agent.initial.clone().requires_grad_()
    counter = FlopCounterMode(display=False)
    with counter:
        policy, value, _ = agent.outputs(params, obs)
        forward = counter.get_total_flops()
        (policy.sum() + value.sum()).backward()
    return forward / rows, counter.get_total_flops() / rows


def critic_flops(agent, envs, rows: int) -> float:
    """Per row: forwards and backwards through the critic's own parameters."""
    space = envs.observation_space
    obs = {"obs": torch.zeros(rows, *space.shape, dtype=torch.from_numpy(space.sample()).dtype)}
    inputs = agent.critic_inputs(agent.initial, obs)
    own = agent.initial[:, agent.critic_from :].clone().requires_grad_()
    counter = FlopCounterMode(display=False)
    with counter:
        agent.critic_outputs(own, inputs).sum().backward()
    return counter.get_total_flops() / rows


if __name__ == "__main__":
    work = job()
    config = configuration(work)
    envs = make_envs(work.env, work.num_envs, backend=work.backend, seed=work.seed, guard=False)
    alone = env_rate(envs)
    agent = build_agent(envs.observation_space, envs.action_space, config.network, work.seed)
    acting, learning = flops(agent, envs, work.minibatch)
    per_step = acting + work.epochs * learning
    if work.algo == "trpo":
        # a gradient, and products that are each a pass up and a pass down; the critic by itself
        critic = critic_flops(agent, envs, work.minibatch)
        per_step = acting + (1 + work.cg_iters) * learning + work.epochs * critic
    speed = gemm_rate()
    line = {
        "steps_per_second": 1.0 / (1.0 / alone + per_step / speed),
        "env_steps_per_second": alone,
        "backend": envs.backend,
        "flops_per_step": per_step,
        "gemm_gflops": speed / 1e9,
    }
    envs.close()
    print(json.dumps(line), flush=True)
