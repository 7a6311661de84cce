"""The functional core beside what peers do: GAE, Fisher-vector products, vocabulary KL."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.timing import Comparison, compare
from keel.config import Network
from keel.functional import (
    categorical_fisher,
    categorical_kl,
    fisher_vector_product,
    gae,
    vocabulary_kl,
)
from keel.functional.natural import flatten
from keel.networks.build import build_agent
from keel.networks.linearized import linear_policy


def gae_against_sb3(steps: int, envs: int) -> Comparison:
    """`gae` against Stable-Baselines3's rollout buffer, on the same rollout."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import RolloutBuffer

    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(2, steps, envs)).astype(np.float32)
    done = rng.random((steps, envs)) < 0.02
    last_value, last_done = torch.zeros(envs), np.zeros(envs, dtype=bool)
    buffer = RolloutBuffer(
        steps, Box(-1, 1, (1,)), Discrete(2), gamma=0.99, gae_lambda=0.95, n_envs=envs
    )
    buffer.rewards, buffer.values = reward, value
    # SB3 stores the *start* of an episode where we store its end.
    buffer.episode_starts = np.roll(done, 1, axis=0).astype(np.float32)
    buffer.episode_starts[0] = 0.0
    tensors = tuple(map(torch.from_numpy, (reward, value)))
    ended = torch.from_numpy(done)
    ended[-1] = False

    def ours() -> torch.Tensor:
        return gae(*tensors, last_value, ended, gamma=0.99, lam=0.95).advantage

    def peer() -> np.ndarray:
        buffer.compute_returns_and_advantage(last_value, last_done)
        return buffer.advantages

    torch.testing.assert_close(ours(), torch.from_numpy(peer()), rtol=1e-4, atol=1e-4)
    return compare(f"GAE {steps} × {envs}, against SB3", ours, peer, calls=5)


def fisher_against_double_backward(batch: int = 2048) -> Comparison:
    """Fisher-vector products by JVP+VJP against differentiating the KL twice (sb3-contrib)."""
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(17, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
        torch.nn.Linear(64, 6),
    )  # fmt: skip
    params = {name: p.detach() for name, p in network.named_parameters()}
    inputs = torch.randn(batch, 17, generator=generator)
    vector = torch.randn(flatten(params).shape, generator=generator)

    def function(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": torch.func.functional_call(network, tree, (inputs,))}

    product = fisher_vector_product(
        function,
        params,
        lambda out, tangent: {"logits": categorical_fisher(out["logits"], tangent["logits"])},
    )
    weights = list(network.parameters())
    logits = network(inputs)
    kl = categorical_kl(logits.detach(), logits).mean()
    gradient = torch.autograd.grad(kl, weights, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradient])

    def peer() -> torch.Tensor:
        parts = torch.autograd.grad(flat @ vector, weights, retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts])

    torch.testing.assert_close(product(vector), peer(), rtol=1e-3, atol=1e-5)
    return compare(
        "Fisher-vector product, 64×64 MLP, against double backward",
        lambda: product(vector),
        peer,
        calls=5,
    )


def fisher_on_cnn(cnn: Literal["nature", "small"], rows: int = 512) -> tuple[Comparison, float]:
    """The same on a CNN with its images channels last on both sides; and how far they differ."""
    features = {"nature": 512, "small": 256}[cnn]
    network = Network(cnn=cnn, features=features, share=False)
    pixels = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    agent = build_agent(pixels, spaces.Discrete(4), network, 0)
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (rows, 84, 84, 4), generator=generator).byte()
    obs = {"obs": frames.permute(0, 3, 1, 2)}
    policy = agent.initial[0, : agent.critic_from]
    vector = torch.randn(policy.shape, generator=generator)
    product = fisher_vector_product(linear_policy(agent, policy, obs, 1.0), {}, agent.dist.fisher)
    leaf = policy.clone().requires_grad_()
    logits = agent.outputs_of(agent.policy_layout.unflatten(leaf), obs, "actor").policy
    (slope,) = torch.autograd.grad(
        categorical_kl(logits.detach(), logits).mean(), leaf, create_graph=True
    )

    def peer() -> torch.Tensor:
        return torch.autograd.grad(slope @ vector, leaf, retain_graph=True)[0]

    error = ((product(vector) - peer()).norm() / peer().norm()).item()
    name = f"Fisher-vector product, {cnn} CNN, {rows} rows, against double backward"
    return compare(name, lambda: product(vector), peer, calls=2), error


def vocabulary_memory(tokens: int = 512, vocabulary: int = 150_000, hidden: int = 64) -> str:
    """Peak memory of value and gradient, chunked and with full logits, each in its own process."""
    grown = {}
    for way in ("chunked", "full"):
        sizes = map(str, (tokens, vocabulary, hidden))
        command = [sys.executable, "-m", "benchmarks.functional", way, *sizes]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        grown[way] = tuple(map(float, output.split()))
    (ours, our_kl), (full, full_kl) = grown["chunked"], grown["full"]
    return (
        f"vocabulary KL, {tokens} tokens × {vocabulary:,} entries, forward and backward: "
        f"{ours:.0f} MB chunked, {full:.0f} MB with full logits "
        f"(mean KL {our_kl:.6f} and {full_kl:.6f})"
    )


def _peak(way: str, tokens: int, vocabulary: int, hidden: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, hidden), (vocabulary, hidden), (tokens, hidden), (vocabulary, hidden))
    p, p_head, q, q_head = (torch.randn(shape, generator=generator) / 4 for shape in shapes)
    q.requires_grad_()
    q_head.requires_grad_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "chunked":
        kl = vocabulary_kl(p, p_head, q, q_head).mean()
    else:
        kl = categorical_kl(p @ p_head.T, q @ q_head.T).mean()
    kl.backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024, kl.item()


def run() -> Iterator[str]:
    """One line per measurement."""
    torch.set_num_threads(1)
    for steps, envs in ((128, 8), (2048, 8), (256, 64)):
        yield _line(gae_against_sb3(steps, envs))
    yield _line(fisher_against_double_backward())
    result, error = fisher_on_cnn("nature")
    yield f"{_line(result)}; relative difference {error:.1e}"
    yield vocabulary_memory()


def _line(result: Comparison) -> str:
    return (
        f"{result.name}: {1e6 * result.ours:,.0f} µs, peer {1e6 * result.peer:,.0f} µs, "
        f"{result.ratio:.1f}× ({result.repeats} interleaved repeats, medians)"
    )


if __name__ == "__main__":
    print(*_peak(sys.argv[1], *map(int, sys.argv[2:])))
