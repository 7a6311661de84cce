"""Sampled completions as one page, every token coloured by what an update did to it.

The page needs nothing else: no script, no font, no picture from outside. Totals and the tokens that
carry the most KL are over all completions, whatever the page has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from keel.errors import InputError
from keel.functional import aggregate
from keel.tracking import RunError
from keel.tracking.files import replace_file

Array = NDArray[Any]

MEASURES = ("kl_old_new", "kl_reference", "log_ratio", "advantage", "entropy", "clipped")
"""Fields of a `TokenTable` that colour tokens; whether a token is masked is in `weight`."""
DIVERGENCES = ("kl_old_new", "kl_reference")
ROUNDING = 1e-4
"""Distance below 0 at which a KL may come out of float32."""
MAX_TOKENS = 50_000
"""On one page: about 12 MB."""
TOP = 20


@dataclass(frozen=True)
class TokenTable:
    """`B` completions of at most `L` tokens, and what an update did to each token."""

    run: str
    step: int
    prompts: Sequence[str]
    """`B`"""
    tokens: Sequence[Sequence[str]]
    """`B` rows of at most `L` texts; what a row lacks is padding"""
    weight: Array
    """`[B, L]`: 0 where the policy is not trained: tool text, padding"""
    reward: Array
    """`[B]`"""
    kl_old_new: Array
    """`[B, L]`: KL(old‖new) in nats, of the whole vocabulary"""
    kl_reference: Array | None = None
    """`[B, L]`: KL(new‖reference) in nats"""
    log_ratio: Array | None = None
    """`[B, L]`: log new − log old of the token that was sampled"""
    advantage: Array | None = None
    """`[B, L]`"""
    entropy: Array | None = None
    """`[B, L]`: of the new policy, in nats"""
    clipped: Array | None = None
    """`[B, L]` bool: the clip took away the token's gradient"""


class Total(NamedTuple):
    """Means of a measure over the tokens that count and are finite."""

    per_token: float
    per_sequence: float
    not_finite: int
    """tokens that count and were left out"""


class Peak(NamedTuple):
    """A token that carries much of the KL."""

    row: int
    position: int
    share: float
    """of the KL of all tokens that count; NaN where the KL is not finite"""


def write_heatmap(table: TokenTable, path: Path, *, max_tokens: int = MAX_TOKENS) -> None:
    """Write the page to `path`: completely, or not at all.

    Completions beyond `max_tokens` tokens are left out, those with the least KL first; the page
    says how many.
    """
    from keel.apps.language.heatmap_page import page

    text = page(checked(table), max_tokens=max_tokens)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def checked(table: TokenTable) -> TokenTable:
    """Return the table with arrays of the right types; an `InputError` names what does not fit."""
    weight = _array("weight", table.weight)
    if weight.ndim != 2:
        raise InputError(f"weight: expected [B, L], got shape {list(weight.shape)}")
    rows, length = weight.shape
    if not (np.isfinite(weight).all() and (weight >= 0).all()):
        raise InputError("weight: expected numbers of 0 or more")
    _check_texts(table, weight)
    reward = _array("reward", table.reward)
    _expect("reward", reward, (rows,))
    measures: dict[str, Any] = {}
    for name in MEASURES:
        values = getattr(table, name)
        if values is not None:
            measures[name] = _array(name, values)
            _expect(name, measures[name], (rows, length))
    for name in DIVERGENCES:
        if name in measures:
            _check_divergence(name, measures[name], weight)
    return replace(table, weight=weight, reward=reward, **measures)


def total(x: Array, weight: Array) -> Total:
    """Return means of `x` `[B, L]` per token and per sequence."""
    counts = weight > 0
    usable = torch.from_numpy(np.where(np.isfinite(x), weight, 0.0))
    values = torch.from_numpy(np.where(np.isfinite(x), x, 0.0))
    return Total(
        per_token=float(aggregate(values, usable, "token-mean")),
        per_sequence=float(aggregate(values, usable, "seq-mean-token-sum")),
        not_finite=int((counts & ~np.isfinite(x)).sum()),
    )


def peaks(table: TokenTable, count: int = TOP) -> list[Peak]:
    """Return the tokens with the largest KL(old‖new), first those whose KL is not finite at all."""
    kl = _counted_kl(table)
    finite_sum = kl[np.isfinite(kl)].sum()
    order = np.argsort(-kl.reshape(-1), kind="stable")[:count]
    places = [divmod(int(place), kl.shape[1]) for place in order]
    return [
        Peak(
            row,
            position,
            kl[row, position] / finite_sum if np.isfinite(kl[row, position]) else np.nan,
        )
        for row, position in places
        if kl[row, position] > 0
    ]


def page_rows(table: TokenTable, max_tokens: int) -> list[int]:
    """Return rows that fit on a page of `max_tokens`, those with the most KL, in order."""
    if max_tokens < 1:
        raise InputError(f"max_tokens: expected at least 1, got {max_tokens}")
    rows: list[int] = []
    remaining = max_tokens
    for row in np.argsort(-_counted_kl(table).sum(1), kind="stable"):
        remaining -= len(table.tokens[row])
        if remaining < 0 and rows:
            break
        rows.append(int(row))
    return sorted(rows)


def _counted_kl(table: TokenTable) -> Array:
    """Return weight × KL `[B, L]`: 0 where a token does not count, infinite where not finite."""
    kl = np.where(np.isnan(table.kl_old_new), np.inf, table.kl_old_new)
    return np.multiply(kl, table.weight, out=np.zeros_like(kl), where=table.weight > 0)


def _array(name: str, values: Any) -> Array:
    try:
        return np.asarray(values).astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: expected numbers, got {type(values).__name__}: {error}"
        ) from None


def _expect(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise InputError(
            f"{name}: expected shape {list(shape)} (that of weight), got {list(x.shape)}"
        )


def _check_texts(table: TokenTable, weight: Array) -> None:
    rows, length = weight.shape
    for name, texts_by_row in (("prompts", table.prompts), ("tokens", table.tokens)):
        if len(texts_by_row) != rows:
            raise InputError(
                f"{name}: expected {rows} (the rows of weight), got {len(texts_by_row)}"
            )
    for row, texts in enumerate(table.tokens):
        if len(texts) > length:
            raise InputError(f"tokens: row {row} has {len(texts)} tokens, weight {length} columns")
        if (weight[row, len(texts) :] > 0).any():
            raise InputError(
                f"weight: row {row} has {len(texts)} tokens; expected 0 after them, on the padding"
            )


def _check_divergence(name: str, x: Array, weight: Array) -> None:
    below = (weight > 0) & (x < -ROUNDING)
    if below.any():
        row, position = (int(i) for i in np.argwhere(below)[0])
        raise InputError(
            f"{name}: {x[row, position]:g} at row {row}, token {position}; a KL is never below 0: "
            "give the exact one, or k3, not k1"
        )
