"""A run on disk: its directory and lock, the registry of metrics, their file, and its readers.

Torch is not imported here, so that listing and reading runs is quick; names are loaded when they
are first used.
"""

from typing import TYPE_CHECKING

from keel.errors import RunError, RunWarning
from keel.registry import lazy_names

if TYPE_CHECKING:
    from keel.tracking.directory import RunDirectory, run_name
    from keel.tracking.listing import RunInfo, list_runs, run_info
    from keel.tracking.metrics import REGISTRY, Canonical, Metric, canonical, documentation, metric
    from keel.tracking.reader import MetricsTable, export_csv, last_values, read_metrics
    from keel.tracking.record import read_config
    from keel.tracking.resume import check_config, config_changes
    from keel.tracking.sinks import Sink, open_sinks
    from keel.tracking.writer import MetricsWriter

__all__ = [
    "REGISTRY",
    "Canonical",
    "Metric",
    "MetricsTable",
    "MetricsWriter",
    "RunDirectory",
    "RunError",
    "RunInfo",
    "RunWarning",
    "Sink",
    "canonical",
    "check_config",
    "config_changes",
    "documentation",
    "export_csv",
    "last_values",
    "list_runs",
    "metric",
    "open_sinks",
    "read_config",
    "read_metrics",
    "run_info",
    "run_name",
]

_NAMES = {
    "record": "read_config",
    "directory": "RunDirectory run_name",
    "listing": "RunInfo list_runs run_info",
    "metrics": "REGISTRY Canonical Metric canonical documentation metric",
    "reader": "MetricsTable export_csv last_values read_metrics",
    "resume": "check_config config_changes",
    "sinks": "Sink open_sinks",
    "writer": "MetricsWriter",
}
__getattr__ = lazy_names(__name__, _NAMES)
