"""Workloads: arrival times, lengths and shared prefixes of requests."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import NONE, Floats, Ints, Requests
from keel.errors import InputError

MOONCAKE_BLOCK = 512
"""Tokens of a prefix block in Mooncake's traces."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, `[N]` each."""

    arrival: Floats
    """seconds"""
    prompt: Ints
    """tokens"""
    output: Ints
    first: Ints
    """`[N + 1]`: where the prefix blocks of each begin in `hashes`"""
    hashes: Ints
    """ids of prefix blocks, from 0 without gaps"""
    prefix_block: int = 16
    """tokens of a prefix block"""

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def universe(self) -> int:
        """Number of different prefix blocks."""
        return int(self.hashes.max(initial=-1)) + 1

    @property
    def rate(self) -> float:
        """Requests per second."""
        span = float(self.arrival[-1] - self.arrival[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span else float("nan")

    def slower(self, factor: float) -> Workload:
        """Return the same requests, `factor` times as far apart."""
        if not 0.0 < factor < np.inf:
            raise InputError(f"factor: expected a number above 0, got {factor}")
        return replace(self, arrival=self.arrival * factor)

    def part(self, begin: int, end: int) -> Workload:
        """Return requests `begin` to `end`, from time 0 on."""
        first = self.first[begin : end + 1]
        names = self.hashes[first[0] : first[-1]]
        return make_workload(
            self.arrival[begin:end] - self.arrival[begin], self.prompt[begin:end],
            self.output[begin:end], first - first[0], names, self.prefix_block,
        )  # fmt: skip

    def requests(self) -> Requests:
        """Return arrays for the simulator, with no request sent yet."""
        count = len(self)
        ints = np.zeros((f.Q_INTS, count), dtype=np.int64)
        ints[[f.Q_PROMPT, f.Q_PREFILL]], ints[f.Q_OUTPUT] = self.prompt, self.output
        ints[[f.Q_NEXT, f.Q_REPLICA]] = NONE
        times = np.full((f.Q_TIMES, count), np.nan)
        times[f.Q_ARRIVAL] = self.arrival
        return Requests(ints, times, self.first, self.hashes, self.prefix_block)


def make_workload(
    arrival: ArrayLike,
    prompt: ArrayLike,
    output: ArrayLike,
    first: ArrayLike | None = None,
    hashes: ArrayLike = (),
    prefix_block: int = 16,
) -> Workload:
    """Make a workload from checked arrays.

    Args:
        arrival: Seconds, not decreasing, `[N]`.
        prompt: Tokens of the prompts, `[N]`.
        output: Tokens of the answers, `[N]`.
        first: Where the prefix blocks of each request begin in `hashes`, `[N + 1]`.
        hashes: Ids of prefix blocks, request after request.
        prefix_block: Tokens of a prefix block.

    Examples:
        >>> len(make_workload([0.0, 0.5], [100, 200], [10, 20]))
        2
    """
    when = np.asarray(arrival, dtype=np.float64)
    sizes = [np.asarray(x, dtype=np.int64) for x in (prompt, output)]
    if not len(when) or any(len(x) != len(when) for x in sizes):
        raise InputError("requests: expected at least one, each with arrival, prompt and output")
    if not np.isfinite(when).all() or (np.diff(when) < 0).any():
        raise InputError("requests: expected finite times of arrival, in their order")
    if any((x < 1).any() for x in sizes):
        raise InputError("requests: expected prompts and outputs of at least one token")
    begins = np.asarray(np.zeros(len(when) + 1) if first is None else first, dtype=np.int64)
    names = np.asarray(hashes, dtype=np.int64)
    if len(names) and (names.min() != 0 or names.max() >= len(names)):  # foreign ids
        names = np.unique(names, return_inverse=True)[1].astype(np.int64).reshape(-1)
    return Workload(when, sizes[0], sizes[1], begins, names, prefix_block)


def load_workload(path: Path | str) -> Workload:
    """Load a trace of Azure or Vidur (CSV) or Mooncake (JSONL), recognized by its columns.

    Args:
        path: The file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path}: cannot be read as text") from None
    lines = text.splitlines()
    if not lines:
        raise InputError(f"{path}: is empty")
    if lines[0].lstrip().startswith("{"):
        return _mooncake(path, lines)
    rows = list(csv.DictReader(lines))
    columns = set(rows[0]) if rows else set()
    for (when, prompt, output), time in FORMATS.items():
        if {when, prompt, output} <= columns:
            return _from_rows(path, rows, (when, prompt, output), time)
    known = "; ".join(", ".join(names) for names in FORMATS)
    raise InputError(f"{path}: expected the columns of a trace ({known}) or Mooncake's JSONL")


def _clock_time(text: str) -> float:
    """Parse Azure's timestamps, which have seven decimals, one more than Python reads."""
    return datetime.fromisoformat(text.strip()[:26]).timestamp()


FORMATS: dict[tuple[str, str, str], Callable[[str], float]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _clock_time,
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"): float,
    ("arrival_s", "prompt_tokens", "output_tokens"): float,
}
"""Columns of Azure's traces, of Vidur's, and of the results for `keel serving replay`."""


def _from_rows(
    path: Path,
    rows: Sequence[dict[str, str]],
    names: tuple[str, str, str],
    time: Callable[[str], float],
) -> Workload:
    requests: list[tuple[float, int, int]] = []
    for number, row in enumerate(rows, 2):
        try:
            when, prompt, output = (row[name] for name in names)
            requests.append((time(when), max(1, int(float(prompt))), max(1, int(float(output)))))
        except (TypeError, ValueError):
            raise InputError(f"{path}, line {number}: not a request: {dict(row)}") from None
    return _sorted(path, requests)


def _mooncake(path: Path, lines: Sequence[str]) -> Workload:
    requests: list[tuple[float, int, int]] = []
    names: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        try:
            row: dict[str, Any] = json.loads(line)
            when, prompt = float(row["timestamp"]) / 1000.0, int(row["input_length"])
            requests.append((when, max(1, prompt), max(1, int(row["output_length"]))))
            names.append([int(x) for x in row.get("hash_ids", [])])
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{path}, line {number}: not a request of Mooncake's") from None
    return _sorted(path, requests, names, MOONCAKE_BLOCK)


def _sorted(
    path: Path,
    requests: list[tuple[float, int, int]],
    names: list[list[int]] | None = None,
    block: int = 16,
) -> Workload:
    if not requests:
        raise InputError(f"{path}: holds no requests")
    order = sorted(range(len(requests)), key=lambda i: requests[i][0])
    begin = requests[order[0]][0]
    blocks = [names[i] for i in order] if names is not None else [[] for _ in order]
    return make_workload(
        [requests[i][0] - begin for i in order],
        [requests[i][1] for i in order],
        [requests[i][2] for i in order],
        np.cumsum([0, *map(len, blocks)]),
        [x for part in blocks for x in part],
        block,
    )
