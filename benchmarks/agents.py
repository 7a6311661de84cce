"""Independent agents as one batched network, beside a loop over agents, in turn in one process.

    python -m benchmarks.agents [--agents 3 8] [--repeats 9]

Both sides take the same steps (forward, backward, clipping, Adam) on the same rows of
`simple_spread`, with networks of 64 × 64 and a centralised critic each; a test holds them
to the same parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import Comparison, compare
from keel.algorithms.optimizer import Minibatch, Step, StepResult, make_step
from keel.config import from_dict
from keel.experience.batch import Batch
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.presets import preset_for
from keel.training.session import initial_state, open_session
from keel.types import OptimizerState

TABLE = Path(__file__).resolve().parents[1] / "docs" / "data" / "agents.md"


class Sides:
    """The same minibatch, ready for both ways."""

    def __init__(self, agents: int, minibatch: int = 256, *, compiled: bool = False) -> None:
        config = from_dict(
            {
                "rollout_steps": 16,
                "envs": {"num": 64, "options": f"N={agents}"},
                "agents": {"sharing": "none", "critic": "central"},
                "network": {"hidden": [64, 64], "activation": "tanh"},
                "compile": "off",
                "threads": 1,
            },
            preset_for("simple_spread")[1],
        )
        session = open_session(config)
        state = initial_state(session)
        self.agent, self.opt_state = session.agent, state.opt_state
        self.hparams = state.hparams.tensor()
        self.together = session.source.collect(state.opt_state.params, state.hparams).batch
        session.source.close()
        self.alone = [self.together.of_members((a,)) for a in range(len(self.agent.members))]
        generator = torch.Generator().manual_seed(0)
        self.index = torch.randperm(self.together.rows, generator=generator)[:minibatch]
        self.real = torch.ones(minibatch)
        objective, norm = session.algorithm.objective, config.region.max_grad_norm
        assert isinstance(objective, Objective)

        def step(agent: Agent) -> Step:
            return make_step(agent, objective, max_grad_norm=norm, compiled=compiled)

        self._batched, self._single = step(self.agent), step(self.agent.alone())

    def batched(self) -> StepResult:
        """All agents in one pass."""
        active = torch.ones(self.agent.groups, dtype=torch.bool)
        return self._batched(self.opt_state, self._minibatch(self.together, active))

    def loop(self) -> list[StepResult]:
        """One agent after the other."""
        active = torch.ones(1, dtype=torch.bool)
        return [
            self._single(
                OptimizerState(*(x[a : a + 1] for x in self.opt_state)),
                self._minibatch(batch, active),
            )
            for a, batch in enumerate(self.alone)
        ]

    def _minibatch(self, batch: Batch, active: Tensor) -> Minibatch:
        return Minibatch(batch, self.index, self.real, self.hparams, active)


def measure(agents: int, minibatch: int, repeats: int, compiled: bool) -> Comparison:
    """Median seconds of a step of all agents, both ways."""
    sides = Sides(agents, minibatch, compiled=compiled)
    return compare(
        f"{agents} agents, minibatch {minibatch}{', compiled' * compiled}",
        sides.batched,
        sides.loop,
        repeats=repeats,
        calls=20,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--minibatch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="both sides by torch.compile")
    parser.add_argument("--write", action="store_true", help="into the documentation, too")
    args = parser.parse_args()
    lines = ["| agents, rows | batched | a loop over agents | |", "|---|---:|---:|---:|"]
    for agents in args.agents:
        for minibatch in args.minibatch:
            told = measure(agents, minibatch, args.repeats, args.compiled)
            lines.append(
                f"| {told.name} | {1e3 * told.ours:.2f} ms | {1e3 * told.peer:.2f} ms "
                f"| {told.ratio:.2f}× |"
            )
            print(lines[-1], flush=True)
    if args.write:
        before = TABLE.read_text().splitlines() if args.compiled and TABLE.exists() else []
        TABLE.write_text("\n".join([*before, *(lines[2:] if before else lines)]) + "\n")


if __name__ == "__main__":
    main()
