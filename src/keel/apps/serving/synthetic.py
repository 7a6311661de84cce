"""Synthetic requests: lengths, bursts, and shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keel.apps.serving.arrays import Floats, Ints
from keel.apps.serving.workload import Workload, make_workload
from keel.errors import InputError, check_choice


@dataclass(frozen=True)
class Lengths:
    """Truncated log-normal distributions of lengths, fitted to a trace."""

    prompt: tuple[float, float]
    """mean and deviation of the logarithm"""
    output: tuple[float, float]
    most_prompt: int
    most_output: int


LENGTHS = {
    "conversation": Lengths((6.63, 0.99), (5.02, 0.86), 4_096, 1_000),
    "code": Lengths((7.00, 1.36), (2.79, 0.85), 7_500, 700),
    "arxiv": Lengths((7.72, 0.75), (5.19, 0.80), 4_000, 3_300),
    "chat": Lengths((3.98, 1.67), (5.37, 1.10), 3_000, 1_500),
}
"""Fitted to Azure's traces of 2023 (conversation, code), arXiv summaries, and ShareGPT."""


@dataclass(frozen=True)
class Synthetic:
    """Parameters of synthetic requests."""

    count: int = 3_000
    rate: float = 6.0
    """requests per second, on average"""
    lengths: str = "conversation"
    fixed: tuple[int, int] | None = None
    """prompt and output of every request, in place of `lengths`"""
    burst: float = 0.0
    """deviation of the logarithm of the arrival rate, which varies; 0: Poisson"""
    wander: float = 60.0
    """correlation time of the rate in seconds"""
    sessions: float = 0.0
    """share of requests that go on with an earlier conversation, whose prompt they begin with"""
    shared: int = 0
    """kinds of system prompts, one of which begins every new conversation; 0: none"""
    shared_tokens: int = 512
    prefix_block: int = 64

    def __post_init__(self) -> None:
        check_choice("lengths", self.lengths, LENGTHS)
        if self.count < 1 or not 0.0 < self.rate < np.inf or not 0.0 <= self.sessions < 1.0:
            raise InputError("synthetic: expected count ≥ 1, rate > 0 and 0 ≤ sessions < 1")
        if self.burst < 0.0 or not self.wander > 0.0 or self.shared < 0 or self.prefix_block < 1:
            raise InputError("synthetic: expected burst ≥ 0, wander > 0, shared ≥ 0")


def synthesize(settings: Synthetic, seed: int) -> Workload:
    """Draw requests; the same seed always gives the same.

    Args:
        settings: Parameters of the requests.
        seed: Source of randomness.
    """
    rng = np.random.default_rng([seed, 1])
    arrival = _arrivals(settings, rng)
    if settings.fixed is not None:
        prompt = np.full(settings.count, settings.fixed[0], dtype=np.int64)
        output = np.full(settings.count, settings.fixed[1], dtype=np.int64)
    else:
        shape = LENGTHS[settings.lengths]
        prompt = _lengths(shape.prompt, shape.most_prompt, settings.count, rng)
        output = _lengths(shape.output, shape.most_output, settings.count, rng)
    if not settings.sessions and not settings.shared:
        return make_workload(arrival, prompt, output)
    return _with_prefixes(settings, arrival, prompt, output, rng)


def _arrivals(settings: Synthetic, rng: np.random.Generator) -> Floats:
    """Draw Poisson arrivals at a rate whose logarithm is an Ornstein–Uhlenbeck process, `[N]`."""
    gaps = rng.exponential(1.0 / settings.rate, settings.count)
    if not settings.burst:
        return np.cumsum(gaps)
    from keel.apps.serving.kernels_draw import arrival_times

    noise = rng.normal(size=settings.count + 1)
    times: Floats = arrival_times(gaps, noise, settings.burst, settings.wander)
    scaled: Floats = times * (settings.count / settings.rate) / times[-1]
    return scaled


def _lengths(shape: tuple[float, float], most: int, count: int, rng: np.random.Generator) -> Ints:
    drawn = np.exp(rng.normal(*shape, size=count))
    return np.clip(drawn, 1, most).astype(np.int64)


def _with_prefixes(
    settings: Synthetic, arrival: Floats, prompt: Ints, output: Ints, rng: np.random.Generator
) -> Workload:
    """Draw conversations: each turn repeats all turns before, and adds a short question."""
    from keel.apps.serving.kernels_draw import conversations

    kinds = np.minimum(rng.zipf(1.5, settings.count), max(1, settings.shared)) - 1
    sizes, first, names = conversations(
        prompt,
        output,
        rng.random((settings.count, 2)),
        kinds,
        settings.sessions,
        settings.shared,
        settings.shared_tokens,
        settings.prefix_block,
    )
    return make_workload(arrival, sizes, output, first, names, settings.prefix_block)
