"""Times of a replica's iterations: tables in milliseconds per layer.

They come from a file (`.npz`, as Vidur's predictor gives them) or from closed forms for a few
models and devices. A closed form is written into a table of the same shape, so that the simulator
knows one way to look up a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from keel.data import read_beside
from keel.errors import InputError, check_choice

GRAIN = 64
"""Tokens of KV cache between two entries."""
MOST_KV, MOST_BATCH, MOST_TOKENS, MOST_CHUNK = 4096, 128, 1024, 512
FIELDS = (
    "linear_ms_per_layer",
    "decode_attention_ms_per_layer",
    "prefill_attention_ms_per_layer",
    "layers",
    "grouped_query",
    "num_blocks",
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """Iteration times of one model on one device."""

    name: str
    linear: Floats
    """`[1025]`: time of everything but attention, by tokens of a batch"""
    decode: Floats
    """`[129, 65]`: decode attention, by sequences and their mean KV cache in steps of 64"""
    prefill: Floats
    """`[65, 513]`: prefill attention, by the KV cache in steps of 64, and the tokens read"""
    layers: int
    grouped: bool
    """queries share keys: several sequences at once cost a tenth more"""
    blocks: int
    """blocks of 16 tokens in the KV cache"""


def load_tables(path: Path) -> Tables:
    """Load tables from a file.

    Args:
        path: `.npz` file with the arrays `FIELDS`.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in FIELDS if name not in arrays.files]
            if missing:
                raise InputError(f"{path}: has no {', '.join(missing)}")
            linear, decode, prefill, layers, grouped, blocks = (arrays[name] for name in FIELDS)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError, BadZipFile):
        raise InputError(f"{path}: not a file of tables (.npz)") from None
    return make_tables(
        path.stem, (linear, decode, prefill), int(layers), bool(grouped), int(blocks)
    )


def make_tables(
    name: str, times: tuple[Floats, Floats, Floats], layers: int, grouped: bool, blocks: int
) -> Tables:
    """Make checked tables; raise an `InputError` for wrong shapes or times."""
    linear, decode, prefill = (np.ascontiguousarray(x, dtype=np.float64) for x in times)
    shapes = (MOST_TOKENS + 1,), (MOST_BATCH + 1, MOST_KV // GRAIN + 1)
    expected = (*shapes, (MOST_KV // GRAIN + 1, MOST_CHUNK + 1))
    for what, table, shape in zip(FIELDS, (linear, decode, prefill), expected, strict=False):
        if table.shape != shape:
            raise InputError(f"{name}: {what}: expected shape {shape}, got {table.shape}")
    used = linear[8:513:8], decode[1:], prefill[:, 1:]
    if not all(np.isfinite(x).all() and (x >= 0.0).all() for x in used):
        raise InputError(f"{name}: times must be finite, and not negative")
    if layers < 1 or blocks < 1:
        raise InputError(f"{name}: expected at least one layer and one block")
    return Tables(name, linear, decode, prefill, layers, grouped, blocks)


@dataclass(frozen=True)
class Form:
    """Closed form of iteration times, fitted to profiles: milliseconds per layer."""

    layers: int
    linear: tuple[float, float, float, float, float]
    """m0, m1, c0, c1, p: ((m0 + m1·T)^p + (c0 + c1·T)^p)^(1/p), by memory and by arithmetic"""
    decode: tuple[float, float, float]
    """constant, per sequence, per token of KV cache"""
    heads: float
    """prefill attention relative to 32 query heads on an A100"""
    pair: float
    """all-reduces of a layer: a constant, and per token (MB · ms/MB)"""
    per_token: float
    grouped: bool
    blocks: int


FORMS = read_beside(__file__, "forms.yaml", dict[str, Form])
"""Closed forms by name."""


@cache
def closed_form(name: str) -> Tables:
    """Return the tables of a model and device that have a closed form.

    They are always the same object: clusters group replicas by it.

    Args:
        name: A name of `FORMS`.
    """
    form = FORMS[check_choice("model", name, FORMS)]
    m0, m1, c0, c1, p = form.linear
    tokens = np.arange(MOST_TOKENS + 1, dtype=np.float64)
    linear = ((m0 + m1 * tokens) ** p + (c0 + c1 * tokens) ** p) ** (1.0 / p)
    linear += form.pair + form.per_token * tokens
    linear[0] = 0.0
    batch = np.arange(MOST_BATCH + 1, dtype=np.float64)[:, None]
    kv = np.arange(0, MOST_KV + 1, GRAIN, dtype=np.float64)
    constant, per_sequence, per_token = form.decode
    decode = constant + per_sequence * batch + per_token * batch * kv
    decode[0] = 0.0
    read = np.arange(MOST_CHUNK + 1, dtype=np.float64)
    prefill = 0.0169 + 8.17e-5 * read + 1.17e-7 * read**2 + 9.95e-8 * read * kv[:, None]
    return make_tables(
        name, (linear, decode, form.heads * prefill), form.layers, form.grouped, form.blocks
    )
