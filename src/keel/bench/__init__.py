"""Measurements side by side with peers, interleaved, each in a process of its own."""

from keel.bench.compare import Result, bench
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
    "bench",
    "settings_for",
]
