"""Exact KL against its estimates over a whole run of a Gaussian policy: bias, spread, negatives.

python -m benchmarks.estimators [--env HalfCheetah-v5] [--steps 200000]

After every update the exact KL(old‖new) of each state is at hand, and so are the log-ratios of the
actions that were taken there and learned from. Fresh actions, drawn from the old policy at the same
states, show what an estimator does where it has not been learned from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keel.experience.batch import Batch, Experience
from keel.functional import k1, k2, k3
from keel.losses.ppo import Objective
from keel.losses.token import TokenObjective
from keel.networks.agent import Agent
from keel.presets import preset_for
from keel.training.loop import iterate
from keel.training.session import initial_state, open_session
from keel.trust_region.certify import Algorithm
from keel.trust_region.measure import measure
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport

SIZES = (64, 256, 0)
"""Rows that are averaged; 0: the whole rollout."""
ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
LEARNED, FRESH = "learned from", "fresh"


@dataclass(frozen=True)
class Watched:
    """An algorithm that looks at every update when it is done."""

    algorithm: Algorithm
    seen: Callable[[Agent, Tensor, Batch], None]

    @property
    def agent(self) -> Agent:
        """As the algorithm's."""
        return self.algorithm.agent

    @property
    def objective(self) -> Objective | TokenObjective:
        """As the algorithm's."""
        return self.algorithm.objective

    def init(self) -> OptimizerState:
        """As the algorithm."""
        return self.algorithm.init()

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """As the algorithm, then look."""
        after, report = self.algorithm.update(state, experience, hparams)
        self.seen(self.agent, after.opt_state.params, experience.batch)
        return after, report


def relative(agent: Agent, params: Tensor, rows: Batch, rng: torch.Generator) -> dict[Any, Tensor]:
    """Estimate / exact − 1 of every chunk of rows, by (estimator, actions, size)."""
    exact = measure(agent, params, rows, 1.0).kl.double()
    mean, log_std = rows.behavior["mean"], rows.behavior["log_std"]
    noise = torch.randn(mean.shape, generator=rng)
    drawn = mean + log_std.exp() * noise
    fresh = rows._replace(action=drawn, log_prob=agent.dist.log_prob(rows.behavior, drawn))
    found: dict[Any, Tensor] = {}
    order = torch.randperm(len(exact), generator=rng)
    for kind, data in ((LEARNED, rows), (FRESH, fresh)):
        new = measure(agent, params, data, 1.0).ratio.raw_log_ratio.double()
        for name, estimator in ESTIMATORS.items():
            each = estimator(-new, torch.zeros_like(new))  # of log p − log q, p the old policy
            for size in SIZES:
                parts = (
                    order[: len(order) // size * size].reshape(-1, size) if size else order[None]
                )
                true = exact[parts].mean(1)
                found[name, kind, size] = each[parts].mean(1) / true - 1.0
    found["exact"] = exact
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base = preset_for(options.env)[1]
    config = replace(base, env=options.env, total_steps=options.steps, seed=options.seed, threads=1)
    session = open_session(config)
    rng = torch.Generator().manual_seed(options.seed)
    tables: list[dict[Any, Tensor]] = []
    session.algorithm = Watched(
        session.algorithm,
        lambda agent, params, batch: tables.append(relative(agent, params, batch, rng)),
    )
    state = initial_state(session)
    try:
        while state.steps < config.total_steps:
            state, _, _ = iterate(session, state)
    finally:
        session.source.close()
    exact = torch.cat([table.pop("exact") for table in tables])
    below = int((exact < 0.0).sum())
    print(
        f"{options.env}, {len(tables)} updates of {config.batch:,} rows; exact KL of a state: mean"
    )
    print(f"{exact.mean().item():.4f} nats, least {exact.min().item():.1e}, {below} below 0")
    print("\n| estimate | actions | rows | bias | spread | negative |")
    print("|---|---|---:|---:|---:|---:|")
    for name, kind, size in tables[0]:
        values = torch.cat([table[name, kind, size] for table in tables])
        bias, spread = values.mean().item(), values.std().item()
        error = spread / len(values) ** 0.5
        negative = (values < -1.0).double().mean().item()
        rows = f"{size or config.batch:,}"
        print(
            f"| {name} | {kind} | {rows} | {bias:+.1%} ± {error:.1%} | {spread:.0%} "
            f"| {negative:.1%} |"
        )


if __name__ == "__main__":
    main()
