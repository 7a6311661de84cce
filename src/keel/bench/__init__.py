"""Measurements side by side with peers, interleaved, each in a process of its own."""

from keel.bench.ppo import Result, bench_ppo
from keel.bench.settings import PEERS, SETTINGS, Settings, settings_for
from keel.bench.workers import BenchError, Reading, Workers

__all__ = [
    "PEERS",
    "SETTINGS",
    "BenchError",
    "Reading",
    "Result",
    "Settings",
    "Workers",
    "bench_ppo",
    "settings_for",
]
