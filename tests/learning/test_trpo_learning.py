"""TRPO learns: a robot that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import keel


@pytest.mark.slow
def test_halfcheetah_runs_within_200k_steps(tmp_path: Path) -> None:
    """A fifth of the preset's run; the largest exact KL is at the bound and never over it."""
    pytest.importorskip("mujoco")
    *_, last = keel.iterate("HalfCheetah-v5", runs=tmp_path, algo="trpo", total_steps=200_000)
    state = last.iteration.state
    assert last.metrics["eval/return_mean"] >= 2_000.0
    assert 0.9 * 0.03 <= state.kl_exact_max <= 0.03
    assert state.rollbacks < 0.1 * state.iteration
