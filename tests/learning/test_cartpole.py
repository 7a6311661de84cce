"""Learning, shown: several seeds of a preset against the published bar."""

from __future__ import annotations

from pathlib import Path

import pytest

import keel


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_is_solved_within_100k_steps(seed: int, tmp_path: Path) -> None:
    """475 is the environment's own bar; the exact KL stays inside the bound all the way."""
    *_, last = keel.iterate("CartPole-v1", runs=tmp_path, seed=seed, total_steps=100_000)
    state = last.iteration.state
    assert last.metrics["eval/return_mean"] >= 475.0
    assert state.kl_exact_max <= 0.05
    assert state.rollbacks < 0.1 * state.iteration
