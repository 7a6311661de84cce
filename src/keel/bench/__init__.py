"""Measurements side by side with peers, interleaved, each in a process of its own."""

from keel.bench.compare import Result, bench
from keel.bench.settings import PEERS, SETTINGS, Language, Settings, settings_for
from keel.bench.workers import BenchError, Reading, Workers

__all__ = [
    "PEERS",
    "SETTINGS",
    "BenchError",
    "Language",
    "Reading",
    "Result",
    "Settings",
    "Workers",
    "bench",
    "settings_for",
]
