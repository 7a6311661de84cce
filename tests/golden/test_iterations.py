"""Behavior is frozen: three iterations of every kind of run end as they were recorded.

A commit that changes a record says why. On the processors and libraries of the record everything is
equal to the last bit; elsewhere metrics are equal within 1e-5, or as `iterations.CHAOTIC` says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import iterations
import pytest

RECORD: dict[str, Any] = json.loads(iterations.RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", iterations.KINDS)
@pytest.mark.filterwarnings("ignore")
def test_three_iterations_end_as_recorded(kind: str, tmp_path: Path) -> None:
    got = iterations.measure(iterations.train(kind, tmp_path))
    assert iterations.differences(kind, RECORD[kind], got) == []


def test_a_difference_is_told_with_both_numbers() -> None:
    recorded = {
        "sha256": {iterations.machine_name(): {"params": "a", "metrics": "b"}},
        "params": {"norm": 1.0},
        "metrics": {"train/loss": 0.5, "train/verdict": "accepted"},
    }
    got: dict[str, Any] = {**recorded, "sha256": {"params": "a", "metrics": "c"}}
    got["metrics"] = {"train/loss": 0.5 + 1e-9, "train/alpha": 1.0}
    words = iterations.differences("cartpole", recorded, got)
    assert words == [
        "cartpole: metrics differ",
        "cartpole: train/loss was 0.5, is 0.500000001",
        "cartpole: train/verdict was accepted, is missing",
        "cartpole: train/alpha is new",
    ]
    close = iterations.metric_differences("cartpole", recorded, got, 1e-5)
    assert close == words[2:]
    same = {**recorded, "sha256": {"params": "a", "metrics": "b"}}
    assert iterations.differences("cartpole", recorded, same) == []
    elsewhere = {**recorded, "sha256": {"another machine": {"params": "d"}}}
    assert iterations.differences("cartpole", elsewhere, got) == words[2:]
