"""What came of a run on tokens: the control beside it, and `language.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.apps.language.config import decoding
from keel.tracking.files import replace_file

if TYPE_CHECKING:
    from keel.apps.language.source import PromptSource
    from keel.training.source import Metrics, ProgressCallback

SUMMARY = "language.json"


def conclude(
    source: PromptSource, scores: Metrics, path: Path, on_progress: ProgressCallback | None
) -> Metrics:
    """Train the control, write the summary into the run's folder, and return metrics of both."""
    from keel.apps.language.supervised import control

    metrics: dict[str, float] = {}
    summary: dict[str, Any] = {
        "task": source.config.task,
        "algo": source.config.algo,
        "decoding": decoding(source.config),
        "warm_up": source.warm_up,
        "rl": {
            **{k.removeprefix("eval/"): v for k, v in scores.items()},
            "passes": source.passes,
        },
    }
    if source.start is not None:
        result = control(source, source.start, source.passes, on_progress)
        summary["control"] = result
        metrics["eval/control_success"] = result["success"]
    if "judged_success" in source.warm_up:
        metrics["eval/warmup_success"] = source.warm_up["judged_success"]
    replace_file(path / SUMMARY, (json.dumps(_finite(summary), indent=1) + "\n").encode())
    return metrics


def _finite(x: Any) -> Any:
    """Return plain data with None in place of numbers that JSON does not know."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x
