"""Completions: prompts in, tokens out, with the log-probs and hidden states they were drawn from.

A prompt is read once and shared by its group; rows that are finished are dropped; tool text is fed
in token by token, like everything else, and has weight 0. All rows grow by one token a step, so
there is one position for all, and padding stands only at the left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keel.distributions.vocabulary import HIDDEN
from keel.errors import InputError, KeelError
from keel.experience.batch import Batch
from keel.networks.causal_lm import ATTENTION, RESPONSE_MASK, TOKENS, TokenAgent
from keel.networks.decoding import Decoder
from keel.types import Tree

COMPACT = 0.75
"""Finished rows are dropped when fewer than this share of the rows goes on: dropping copies the
cache, so it is done in few, large steps."""

Insert = Callable[[int, list[int]], Sequence[int] | None]
"""Callback with a row and its tokens so far, after every token that may end a call; the tokens it
returns are inserted, None inserts nothing."""


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing tokens."""

    max_new_tokens: int = 48
    temperature: float = 1.0
    """0 takes the likeliest"""
    top_k: int = 0
    """only the k likeliest; 0 for all"""
    top_p: float = 1.0
    """only the likeliest that make up this share"""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.temperature < 0.0 or self.top_k < 0 or not 0.0 < self.top_p <= 1.0:
            raise InputError(
                "sampling: expected temperature ≥ 0, top_k ≥ 0 and 0 < top_p ≤ 1, got "
                f"{self.temperature}, {self.top_k} and {self.top_p}"
            )

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0


class Completions(NamedTuple):
    """`R` = prompts × group rows, prompt by prompt; `[R, L]` unless it says otherwise."""

    tokens: Tensor
    """`[R, P + L]`, prompts padded at the left, completions at the right"""
    attention: Tensor
    """bool `[R, P + L]`"""
    response_mask: Tensor
    """1.0 for tokens that the policy wrote, its end of text too; 0.0 for tool text, padding"""
    log_prob: Tensor
    """under the policy at its temperature and the whole vocabulary, of tool text as well; 0 where
    nothing stands"""
    sampler_log_prob: Tensor
    """under what was really drawn from: after top-k and top-p"""
    hidden: Tensor
    """`[R, L, H]`, divided by the temperature"""
    ended: Tensor
    """bool `[R]`: by its own end of text, not by running out of room"""

    @property
    def completion_mask(self) -> Tensor:
        """Mask `[R, L]`: 1.0 for all tokens of a completion, tool text included."""
        return self.attention[:, -self.response_mask.shape[1] :].to(self.response_mask.dtype)

    @property
    def action(self) -> Tensor:
        """Tokens of the completions alone, `[R, L]`."""
        return self.tokens[:, -self.response_mask.shape[1] :]

    @property
    def obs(self) -> Tree:
        """Observations for evaluating the tokens again."""
        return {TOKENS: self.tokens, ATTENTION: self.attention, RESPONSE_MASK: self.response_mask}

    def batch(self, **more: Tensor) -> Batch:
        """Return the completions as rows; `more` goes beside what the model sees."""
        return Batch(
            obs={**self.obs, **more},
            behavior={HIDDEN: self.hidden},
            action=self.action,
            log_prob=self.log_prob,
            weight=self.response_mask,
        )


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return tokens `[B, P]`, padded at the left, and their attention, bool `[B, P]`.

    Args:
        prompts: Tokens of B prompts, none of them empty.
        pad: Token of the padding.
    """
    if not prompts or not all(prompts):
        raise InputError("prompts: expected at least one, and none of them empty")
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad)
    attention = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        attention[row, width - len(prompt) :] = True
    return tokens, attention


@torch.no_grad()
def complete(
    agent: TokenAgent,
    params: Tensor,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    rng: torch.Generator,
    *,
    group: int = 1,
    eos: int,
    pad: int = 0,
    call_end: int | None = None,
    insert: Insert | None = None,
) -> Completions:
    """Sample completions of every prompt, `R` = B × `group` rows.

    Args:
        agent: Model.
        params: Parameters, `[1, P]`.
        prompts: Tokens of B prompts.
        sampling: Settings for drawing tokens.
        rng: Random generator.
        group: Completions of each prompt.
        eos: Token that ends a completion.
        pad: Token of the padding.
        call_end: Token that ends a tool call, after which `insert` is called.
        insert: Returns the tokens of the tool's answer.
    """
    device = params.device
    tokens, attention = (x.to(device) for x in pad_left(prompts, pad))
    tree = agent.layout.unflatten(params[0])
    head, length = agent.head_of(tree), sampling.max_new_tokens
    decoder = Decoder(agent.backbone, agent.backbone_tree(tree))
    hidden = decoder.prefill(tokens, attention, tokens.shape[1] + length)
    if group > 1:
        decoder.expand(group)
        hidden = hidden.repeat_interleave(group, 0)
    buffer = _Buffer(len(prompts) * group, length, head, hidden, pad)
    alive = torch.arange(buffer.rows, device=device)
    on = torch.ones(buffer.rows, dtype=torch.bool, device=device)  # of the rows in the decoder
    for t in range(length):
        drawn = _draw(agent.widened(hidden), head, sampling, rng)
        drawn = buffer.store(t, alive, on, drawn)
        on = on & (drawn.token != eos)
        if insert is not None and call_end is not None:
            buffer.ask(t, alive, on & (drawn.token == call_end), insert)
        going = int(on.sum())
        if not going or t + 1 == length:
            break
        if going <= COMPACT * len(on):
            going_rows = on.nonzero()[:, 0]
            decoder.keep(going_rows)
            alive, on = alive[going_rows], on[going_rows]
            drawn = _Drawn(*(x[going_rows] for x in drawn))
        hidden = decoder.step(drawn.token)
    return buffer.finish(
        tokens.repeat_interleave(group, 0), attention.repeat_interleave(group, 0), eos
    )


class _Drawn(NamedTuple):
    """Token for every row in the decoder."""

    token: Tensor
    log_prob: Tensor
    sampler_log_prob: Tensor
    hidden: Tensor
    """Hidden states, divided by the temperature."""
    log_p: Tensor
    """Log-probabilities of every token, `[B, V]`."""


def _draw(hidden: Tensor, head: Tensor, sampling: Sampling, rng: torch.Generator) -> _Drawn:
    hidden = hidden if sampling.is_greedy else hidden / sampling.temperature
    log_p = (hidden @ head.T).log_softmax(-1)
    if bool(log_p.isnan().any()):
        raise KeelError(
            "completions: the model's log-probs are not finite, so nothing can be drawn from them; "
            "its parameters or its temperature are at fault"
        )
    if sampling.is_greedy:
        token = log_p.argmax(-1)
        log_prob = log_p.gather(1, token[:, None])[:, 0]
        return _Drawn(token, log_prob, torch.zeros_like(log_prob), hidden, log_p)
    allowed = truncated(log_p, sampling.top_k, sampling.top_p)
    token = torch.multinomial(allowed.exp(), 1, generator=rng)[:, 0]
    log_prob, drawn = (x.gather(1, token[:, None])[:, 0] for x in (log_p, allowed))
    return _Drawn(token, log_prob, drawn, hidden, log_p)


def truncated(log_p: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return log-probs `[B, V]` of the likeliest tokens, normalized again; −inf for the others.

    The token that carries the sum over `top_p` still belongs to them, so one always does.

    Args:
        log_p: Log-probs, `[B, V]`.
        top_k: Number of tokens to keep; 0: all.
        top_p: Share of the probability to keep.
    """
    if not (0 < top_k < log_p.shape[1]) and top_p >= 1.0:
        return log_p
    ordered, place = log_p.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    out = before >= top_p
    if top_k:
        out |= torch.arange(log_p.shape[1], device=log_p.device) >= top_k
    truncated_log_p = torch.where(out, -torch.inf, ordered).log_softmax(-1)
    return torch.full_like(log_p, -torch.inf).scatter(1, place, truncated_log_p)


class _Buffer:
    """Buffer of completions, by their own row numbers."""

    def __init__(self, rows: int, length: int, head: Tensor, hidden: Tensor, pad: int) -> None:
        self.rows, self.pad = rows, pad
        self.tokens = torch.full((rows, length), pad, device=hidden.device)
        self.completion_mask = torch.zeros(rows, length, dtype=torch.bool, device=hidden.device)
        self.response_mask = hidden.new_zeros(rows, length)
        self.log_prob, self.sampled = (
            torch.zeros_like(self.response_mask),
            torch.zeros_like(self.response_mask),
        )
        self.hidden = hidden.new_zeros(rows, length, head.shape[1])
        self.forced: dict[int, list[int]] = {}

    def store(self, t: int, alive: Tensor, on: Tensor, drawn: _Drawn) -> _Drawn:
        """Store the tokens of rows that go on, drawn or inserted; return what counts."""
        own, rows = on, alive[on]
        if self.forced:
            token, own = self._given(alive, on, drawn.token)
            log_prob = drawn.log_p.gather(1, token[:, None])[:, 0]
            drawn = drawn._replace(token=token, log_prob=log_prob)
        self.tokens[rows, t], self.completion_mask[rows, t] = drawn.token[on], True
        self.log_prob[rows, t], self.hidden[rows, t] = drawn.log_prob[on], drawn.hidden[on]
        rows = alive[own]
        self.response_mask[rows, t], self.sampled[rows, t] = 1.0, drawn.sampler_log_prob[own]
        return drawn

    def _given(self, alive: Tensor, on: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        token, own = token.clone(), on.clone()
        for place, row in enumerate(alive.tolist()):
            if row in self.forced:
                own[place] = False
                token[place] = self.forced[row].pop(0)
                if not self.forced[row]:
                    del self.forced[row]
        return token, own

    def ask(self, t: int, alive: Tensor, called: Tensor, insert: Insert) -> None:
        """Let tools answer the rows that have just ended a call."""
        for row in alive[called].tolist():
            if row in self.forced or not self.response_mask[row, t]:
                continue  # that end of a call was itself tool text
            answer = insert(row, self.tokens[row, : t + 1].tolist())
            if answer:
                self.forced[row] = list(answer)

    def finish(self, prompt: Tensor, attention: Tensor, eos: int) -> Completions:
        """Return the completions without the columns that no row reached."""
        length = max(1, int(self.completion_mask.any(0).sum()))
        cut = slice(0, length)
        last = self.completion_mask.sum(1) - 1
        ended = self.tokens.gather(1, last.clamp(min=0)[:, None])[:, 0] == eos
        return Completions(
            tokens=torch.cat([prompt, self.tokens[:, cut]], 1),
            attention=torch.cat([attention, self.completion_mask[:, cut]], 1),
            response_mask=self.response_mask[:, cut],
            log_prob=self.log_prob[:, cut],
            sampler_log_prob=self.sampled[:, cut],
            hidden=self.hidden[:, cut],
            ended=ended & (last >= 0),
        )
