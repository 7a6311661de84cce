"""Recurrent policies and critics: a GRU over sequences that is reset where an episode begins.

A recurrent network takes sequences: observations `[B, L, …]`, `memory/starts` `[B, L]` (rows that
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

from keel.networks.actor_critic import MLP, Head, Outputs, Part
from keel.types import RESERVED, Tree

EPISODE_STARTS, ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE = RESERVED
_BY_TORCH = ContextVar("by_torch", default=False)


@contextmanager
def torch_operations() -> Iterator[None]:
    """Build recurrent cells of operations that torch can differentiate forwards, too."""
    before = _BY_TORCH.set(True)
    try:
        yield
    finally:
        _BY_TORCH.reset(before)


class GRU(nn.Module):
    """One GRU cell (Cho et al. 2014), applied from row to row.

    On the CPU by compiled loops, which are several times faster; elsewhere, and where torch wants
    to see every operation (to compile, to export, or in `torch_operations`), by the cell.

    Args:
        inputs: numbers per row.
        size: numbers H of the hidden state.
        generator: source of the orthogonal initial weights.
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
        """Return the hidden state after every row, `[B, L, H]`.

        Args:
            x: `[B, L, inputs]`.
            state: `[B, H]`, before the first row.
            starts: `[B, L]`, true for rows that begin an episode, where the state is reset to 0.
        """
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
        for row, factor in zip(x.unbind(1), keep.unbind(1), strict=True):
            state = self._next(row, state * factor.unsqueeze(-1))
            states.append(state)
        return torch.stack(states, 1)

    def _next(self, x: Tensor, state: Tensor) -> Tensor:
        """Apply the cell; some devices fuse `nn.GRUCell` and give it no forward derivative."""
        if torch.compiler.is_compiling() or not _BY_TORCH.get():
            after: Tensor = self.cell(x, state)
            return after
        cell = self.cell
        input_gates = nn.functional.linear(x, cell.weight_ih, cell.bias_ih).chunk(3, -1)
        hidden_gates = nn.functional.linear(state, cell.weight_hh, cell.bias_hh).chunk(3, -1)
        reset, update = ((input_gates[i] + hidden_gates[i]).sigmoid() for i in range(2))
        candidate = (input_gates[2] + reset * hidden_gates[2]).tanh()
        return candidate + update * (state - candidate)

    def _run(self, x: Tensor, state: Tensor, keep: Tensor) -> Tensor:
        from keel.kernels import gru  # numba is a second and 100 MB, which others need not pay

        cell = self.cell
        input_gates = nn.functional.linear(x.transpose(0, 1), cell.weight_ih, cell.bias_ih)
        return gru.run(input_gates, state, keep.T, cell.weight_hh, cell.bias_hh).transpose(0, 1)


class Tower(nn.Module):
    """A body, a GRU or none, and a last linear layer.

    Args:
        body: network from rows `[*lead, …]` to `width` numbers.
        width: numbers per row that the body gives.
        outputs: numbers K per row of the last layer.
        hidden_size: numbers H of the hidden state; None for no GRU.
        generator: source of the initial weights.
        last_gain: gain of the last layer's initial weights.
    """

    def __init__(
        self,
        body: nn.Module,
        width: int,
        outputs: int,
        hidden_size: int | None,
        generator: torch.Generator,
        last_gain: float,
    ) -> None:
        super().__init__()
        self.body = body
        # the attribute is part of the parameters' names, which stand in checkpoints
        self.memory = None if hidden_size is None else GRU(width, hidden_size, generator)
        self.last = MLP((hidden_size or width, outputs), "relu", generator, last_gain)

    def forward(
        self, x: Tensor, state: Tensor | None, starts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs `[B, L, K]` and, of a recurrent tower, its states `[B, L, H]`."""
        x = self.body(x)
        if self.memory is None:
            return self.last(x), None
        assert state is not None
        x = self.memory(x, state, starts)
        return self.last(x), x


class RecurrentActorCritic(nn.Module):
    """Any trunk, and a tower each for actor and critic, one or both of which are recurrent.

    Args:
        encoder: from observation trees to one tensor.
        trunk: shared by both towers; `nn.Identity` for none.
        actor: tower of the policy.
        critic: tower of the value.
        head: from the actor's outputs to those of the policy.
    """

    def __init__(
        self, encoder: nn.Module, trunk: nn.Module, actor: Tower, critic: Tower, head: Head
    ) -> None:
        super().__init__()
        self.encoder, self.trunk = encoder, trunk
        self.head, self.actor, self.critic = head, actor, critic

    @property
    def hidden_state_sizes(self) -> dict[str, int]:
        """Size H of each recurrent state, by its key in the observations."""
        towers = {ACTOR_HIDDEN_STATE: self.actor, CRITIC_HIDDEN_STATE: self.critic}
        return {key: tower.memory.size for key, tower in towers.items() if tower.memory is not None}

    def forward(self, obs: Tree, part: Part = "both") -> Outputs:
        """Run both towers, or the part asked for."""
        x = self.trunk(self.encoder(obs))
        policy = value = None
        states: Tree = {}
        if part != "critic":
            output, state = self.actor(x, obs.get(ACTOR_HIDDEN_STATE), obs[EPISODE_STARTS])
            policy = self.head(output)
            if state is not None:
                states[ACTOR_HIDDEN_STATE] = state
        if part != "actor":
            value, state = self.critic(x, obs.get(CRITIC_HIDDEN_STATE), obs[EPISODE_STARTS])
            if state is not None:
                states[CRITIC_HIDDEN_STATE] = state
        return Outputs(policy, value, states)
