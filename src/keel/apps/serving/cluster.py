"""Configuration of a cluster of replicas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keel.apps.serving.arrays import Clock, Plan, make_clock
from keel.apps.serving.tables import Tables
from keel.errors import InputError

ORDERS = ("sarathi", "vllm")


@dataclass(frozen=True)
class Replica:
    """Configuration of one replica."""

    tables: Tables
    speed: float = 1.0
    """speed relative to its tables"""
    blocks: int | None = None
    """blocks of KV cache, in place of the tables' own"""
    cache: int = 0
    """capacity of the prefix cache in blocks; 0: no prefix cache"""

    def __post_init__(self) -> None:
        if not 0.0 < self.speed < np.inf:
            raise InputError(f"speed: expected a number above 0, got {self.speed}")
        if self.cache < 0 or (self.blocks is not None and self.blocks < 1):
            raise InputError("replica: expected at least one block, and no less than no cache")


@dataclass(frozen=True)
class Cluster:
    """Cluster of replicas, and their batching rules."""

    replicas: tuple[Replica, ...]
    order: Literal["sarathi", "vllm"] = "sarathi"
    """Sarathi's chunked prefill, or whole prompts first as in vLLM"""
    chunk: int = 512
    """tokens of an iteration"""
    cap: int = 128
    """sequences of an iteration"""
    watermark: float = 0.01
    """share of the KV cache that stays free when a request is admitted"""
    queue: int = 1 << 40
    """requests that may wait at one replica; more are turned away"""
    patience: float = np.inf
    """seconds after which a waiting request gives up"""

    def __post_init__(self) -> None:
        if not self.replicas:
            raise InputError("cluster: expected at least one replica")
        if self.order not in ORDERS:
            raise InputError(f"order: expected {' or '.join(ORDERS)}, got {self.order!r}")
        if not 1 <= self.cap <= 128 or not self.cap <= self.chunk <= 512:
            raise InputError(
                "cluster: expected cap from 1 to 128 and chunk from cap to 512, as far as the "
                f"tables go; got {self.cap} and {self.chunk}"
            )
        if not 0.0 <= self.watermark < 1.0 or self.queue < 1 or not self.patience > 0.0:
            raise InputError("cluster: expected watermark in [0, 1), queue ≥ 1 and patience > 0")

    def __len__(self) -> int:
        return len(self.replicas)

    def arrays(self) -> tuple[Clock, Plan]:
        """Return the cluster as arrays for the simulator's kernels."""
        kinds = list({id(r.tables): r.tables for r in self.replicas}.values())
        blocks = np.array([r.blocks or r.tables.blocks for r in self.replicas])
        plan = Plan(
            kind=np.array([next(k for k, t in enumerate(kinds) if t is r.tables)
                           for r in self.replicas]),
            speed=np.array([r.speed for r in self.replicas], dtype=np.float64),
            blocks=blocks,
            watermark=(self.watermark * blocks).astype(np.int64),
            cache=np.array([r.cache for r in self.replicas]),
            chunk=self.chunk,
            cap=self.cap,
            order=ORDERS.index(self.order),
            queue=self.queue,
            patience=float(self.patience),
        )  # fmt: skip
        return make_clock(kinds), plan


def equal_cluster(tables: Tables, count: int, **settings: object) -> Cluster:
    """Make a cluster of equal replicas.

    Args:
        tables: Iteration times of the replicas.
        count: Number of replicas.
        **settings: Other fields of `Cluster`.
    """
    return dataclasses.replace(Cluster((Replica(tables),) * count), **settings)  # type: ignore[arg-type]
