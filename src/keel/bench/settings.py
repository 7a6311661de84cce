"""Settings of measurements: the same work for both sides, handed to every worker."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml
from msgspec import convert

from keel.errors import InputError, check_choice

Mode = Literal["steady", "whole"]
Algo = Literal["ppo", "trpo", "tokens"]
Backend = Literal["auto", "sync", "envpool"]
ENVPOOL_PEERS = ("sb3", "sb3-contrib", "sbx")
"""Peers that take EnvPool's environments, by an adapter in `benchmarks/workers`."""
PEERS: dict[Algo, tuple[str, ...]] = {
    "ppo": ("sb3", "sbx", "cleanrl"),
    "trpo": ("sb3-contrib",),
    "tokens": ("trl",),
}


@dataclass(frozen=True)
class Language:
    """A Qwen3 made from its configuration, and its prompts; embeddings are tied."""

    vocabulary: int = 64
    """token 0 is padding and 1 the end; neither is ever sampled"""
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 344
    prompts: int = 8
    group: int = 8
    """answers to a prompt; together they are the `num_envs` sequences of a batch"""
    prompt_tokens: int = 16
    """Tokens of every prompt; every answer has `rollout_steps`."""
    beta: float = 0.01
    """Coefficient of the KL to the reference, which is the model as it was at first."""


@dataclass(frozen=True)
class Settings:
    """A job for a worker; both sides read all of it from one line of JSON."""

    env: str
    peer_env: str
    """the peer's name for the same environment"""
    iterations: int
    """measured, after `warmup` others"""
    warmup: int
    num_envs: int = 8
    rollout_steps: int = 128
    minibatch: int = 256
    epochs: int = 4
    normalize: bool = False
    """observations and rewards, by running statistics"""
    pixels: bool = False
    """the Nature CNN with a shared trunk, else two MLPs of `hidden` with tanh"""
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 3e-4
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float = 0.5
    seed: int = 0
    threads: int = 0
    """Threads of the network's arithmetic; 0: the choice of the library (ours)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """ours only"""
    backend: Backend = "auto"
    """environments: `auto`, what Keel chooses, beside Gymnasium's, one after the other in one
    process; `sync`, those on both sides; `envpool`, EnvPool's on both"""
    algo: Algo = "ppo"
    max_kl: float = 0.01
    """TRPO's; and the same number of Fisher-vector products, on the whole rollout"""
    cg_iters: int = 15
    damping: float = 0.1
    language: Language | None = None
    """Settings of `tokens`, with the algorithm GRPO."""
    mode: Mode = "steady"
    turn: int = 0
    """iterations until it is the other side's turn; 0: it runs alone"""

    @property
    def batch(self) -> int:
        """Number of steps of an iteration."""
        return self.num_envs * self.rollout_steps

    @property
    def unit(self) -> str:
        """Unit of the rate."""
        return "tokens" if self.algo == "tokens" else "steps"

    def replace(self, **changes: object) -> Settings:
        """Return a copy with some values changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def whole(self, steps: int) -> Settings:
        """Return the settings of a run from process start to end.

        Args:
            steps: length of the run, rounded up to whole rollouts.
        """
        return self.replace(mode="whole", warmup=0, turn=0, iterations=-(-steps // self.batch))


def _read_settings() -> dict[Algo, dict[str, Settings]]:
    text = (Path(__file__).parent / "settings.yaml").read_text(encoding="utf-8")
    return {
        algo: {
            env: convert({"env": env, "peer_env": env, "algo": algo, **job}, Settings)
            for env, job in jobs.items()
        }
        for algo, jobs in yaml.safe_load(text).items()
    }


SETTINGS = _read_settings()
"""Jobs by algorithm and environment, or model for `tokens`."""


def settings_for(
    env: str, iterations: int | None = None, algo: Algo = "ppo", backend: Backend = "auto"
) -> Settings:
    """Return the settings of one environment.

    Args:
        env: name of the environment, or of a model for `tokens`.
        iterations: number to measure; None keeps the default.
        algo: ppo, trpo or tokens.
        backend: of the environments.
    """
    settings = SETTINGS[algo][check_choice("env", env, SETTINGS[algo])]
    check_choice("backend", backend, get_args(Backend))
    settings = settings.replace(backend=backend)
    if iterations is None:
        return settings
    if iterations < 1:
        raise InputError(f"iterations: expected at least 1, got {iterations}")
    return settings.replace(iterations=iterations)
