"""Logs of any framework, in the registry's names: recognized, read in bounded memory, never run."""

from keel.tracking.logs.log import Log, Points
from keel.tracking.logs.names import FRAMEWORKS
from keel.tracking.logs.reading import FORMATS, PROGRESS, find_logs, read_log

__all__ = [
    "FORMATS",
    "FRAMEWORKS",
    "PROGRESS",
    "Log",
    "Points",
    "find_logs",
    "read_log",
]
