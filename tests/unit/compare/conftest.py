"""Runs on disk, as `keel train` leaves them, with curves of our choice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    def write(
        name: str,
        seed: int,
        returns: Sequence[float],
        *,
        env: str = "Hopper-v5",
        tag: str | None = None,
        config: dict[str, Any] | None = None,
        step: int = 100,
        **metrics: float,
    ) -> Path:
        path = tmp_path / "runs" / name / f"seed-{seed}"
        path.mkdir(parents=True)
        settings = {"env": env, "seed": seed, **(config or {})}
        (path / "config.yaml").write_text(yaml.safe_dump(settings))
        record = {"name": name, "seed": seed, "tag": tag, "status": "finished"}
        (path / "run.json").write_text(json.dumps(record))
        lines = [
            {
                "step": (i + 1) * step,
                "rollout/return_mean": value,
                "train/loss": 0.5,
                "train/kl_exact": 0.01,
                "train/max_kl": 0.02,
                "train/rollbacks": 0.0,
                "time/seconds": 0.1 * (i + 1),
                **{key.replace("__", "/"): x for key, x in metrics.items()},
            }
            for i, value in enumerate(returns)
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return path

    return write
