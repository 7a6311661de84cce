"""Policies and critics that remember: a GRU over sequences that forgets where an episode begins.

A network with memory takes sequences: observations `[B, L, …]`, `memory/starts` `[B, L]` (rows that
begin an episode) and, under `memory/actor` and `memory/critic`, the state `[B, H]` before the first
row.
Acting is the case L = 1, so that sampling and training run the same code on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from keel import keys
from keel.models.networks import MLP, Head, Outputs, Part
from keel.types import Tree

STARTS, ACTOR, CRITIC = keys.RESERVED
_BY_TORCH = ContextVar("by_torch", default=False)


@contextmanager
def torch_operations() -> Iterator[None]:
    """Inside, memories are built of operations that torch can differentiate forwards, too."""
    before = _BY_TORCH.set(True)
    try:
        yield
    finally:
        _BY_TORCH.reset(before)


class Memory(nn.Module):
    """One GRU cell (Cho et al. 2014), applied from row to row.

    On the CPU by compiled loops, which are several times faster; elsewhere, and where torch wants
    to see every operation (to compile, to export, or in `torch_operations`), by the cell.
    """

    def __init__(self, inputs: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.size = size
        self.cell = nn.GRUCell(inputs, size)
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            gates = torch.split(weight.detach(), size)  # three, each orthogonal in itself
            for gate in gates:
                nn.init.orthogonal_(gate, generator=generator)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)

    def forward(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """The state after every row, `[B, L, H]`."""
        keep = (~starts.bool()).to(x.dtype)
        if (
            x.device.type == "cpu"
            and x.dtype == torch.float32
            and not torch.compiler.is_compiling()
            and not _BY_TORCH.get()
        ):
            return self._run(x, state, keep)
        states = []
        # unbind, not indexing: its backward is one stack, that of x[:, t] a zero tensor a row
        for row, kept in zip(x.unbind(1), keep.unbind(1), strict=True):
            state = self._next(row, state * kept.unsqueeze(-1))
            states.append(state)
        return torch.stack(states, 1)

    def _next(self, x: Tensor, state: Tensor) -> Tensor:
        """`nn.GRUCell`, which some devices fuse into one operation without a forward derivative."""
        if torch.compiler.is_compiling() or not _BY_TORCH.get():
            after: Tensor = self.cell(x, state)
            return after
        cell = self.cell
        seen = nn.functional.linear(x, cell.weight_ih, cell.bias_ih).chunk(3, -1)
        held = nn.functional.linear(state, cell.weight_hh, cell.bias_hh).chunk(3, -1)
        reset, update = ((seen[i] + held[i]).sigmoid() for i in range(2))
        candidate = (seen[2] + reset * held[2]).tanh()
        return candidate + update * (state - candidate)

    def _run(self, x: Tensor, state: Tensor, keep: Tensor) -> Tensor:
        from keel.models import gru  # numba is a second and 100 MB, which others need not pay

        cell = self.cell
        seen = nn.functional.linear(x.transpose(0, 1), cell.weight_ih, cell.bias_ih)
        return gru.run(seen, state, keep.T, cell.weight_hh, cell.bias_hh).transpose(0, 1)


class Tower(nn.Module):
    """A body, perhaps a memory, and a last linear layer."""

    def __init__(
        self,
        body: nn.Module,
        width: int,
        outputs: int,
        memory: int | None,
        generator: torch.Generator,
        last_gain: float,
    ) -> None:
        super().__init__()
        self.body = body
        self.memory = None if memory is None else Memory(width, memory, generator)
        self.last = MLP((memory or width, outputs), "relu", generator, last_gain)

    def forward(
        self, x: Tensor, state: Tensor | None, starts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs `[B, L, K]` and, with memory, its states `[B, L, H]`."""
        x = self.body(x)
        if self.memory is None:
            return self.last(x), None
        assert state is not None
        x = self.memory(x, state, starts)
        return self.last(x), x


class Recurrent(nn.Module):
    """Any trunk, and a tower each for actor and critic, one or both of which remember."""

    def __init__(
        self, encoder: nn.Module, trunk: nn.Module, actor: Tower, critic: Tower, head: Head
    ) -> None:
        super().__init__()
        self.encoder, self.trunk = encoder, trunk
        self.head, self.actor, self.critic = head, actor, critic

    @property
    def memory(self) -> dict[str, int]:
        """The size of each state there is."""
        towers = {ACTOR: self.actor, CRITIC: self.critic}
        return {key: tower.memory.size for key, tower in towers.items() if tower.memory is not None}

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Both, or the part asked for."""
        x = self.trunk(self.encoder(obs))
        policy = value = None
        states: Tree = {}
        if part != "critic":
            output, state = self.actor(x, obs.get(ACTOR), obs[STARTS])
            policy = self.head(output)
            if state is not None:
                states[ACTOR] = state
        if part != "actor":
            value, state = self.critic(x, obs.get(CRITIC), obs[STARTS])
            if state is not None:
                states[CRITIC] = state
        return Outputs(policy, value, states)
