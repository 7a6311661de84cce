"""The simulator against Vidur's own results, request by request, from the sample in tests/data."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from keel.apps.serving.fidelity import compare
from keel.apps.serving.tables import load_tables
from keel.cli import main

SAMPLE = Path(__file__).resolve().parents[3] / "data" / "vidur"
RUNS = {
    "codellama_34b_conv_bursty_rr": ("codellama_34b_a100_tp2_tables.npz", 1_500, 0),
    "llama2_7b_fixed_preempt_lor": ("llama2_7b_a100_tp1_tables.npz", 800, 10),
}
"""The tables, requests and restarts of each recorded run."""


def recorded(name: str, folder: Path) -> Path:
    """Unpack the results of a recorded run into `folder`."""
    results = folder / f"{name}.csv"
    with gzip.open(SAMPLE / f"{name}.csv.gz") as packed, results.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return results


@pytest.mark.parametrize("name", RUNS)
def test_every_request_is_vidurs(name: str, tmp_path: Path) -> None:
    """The results have 12 digits, and sums of hundreds of iterations lose a few of them."""
    tables, requests, restarts = RUNS[name]
    found = compare(recorded(name, tmp_path), load_tables(SAMPLE / tables))
    assert (found.requests, found.restarts, found.restarts_differ) == (requests, restarts, 0)
    assert found.max_relative_error < 1e-8


def test_a_millionth_more_time_an_iteration_is_noticed(tmp_path: Path) -> None:
    name = "llama2_7b_fixed_preempt_lor"
    tables = load_tables(SAMPLE / RUNS[name][0])
    slower = replace(tables, linear=tables.linear * 1.000_001)
    assert compare(recorded(name, tmp_path), slower).max_relative_error > 1e-7


def test_the_command_says_how_far_apart_every_request_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "llama2_7b_fixed_preempt_lor"
    results, tables = recorded(name, tmp_path), SAMPLE / RUNS[name][0]
    assert main(["serving", "replay", str(results), "--tables", str(tables)]) == 0
    printed = capsys.readouterr().out
    assert "800 requests on 3 replicas" in printed
    assert "restarts: 10, 0 requests differ" in printed


def test_the_sample_is_small() -> None:
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 200_000
