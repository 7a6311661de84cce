"""Learning with the preset `default`, where an environment has none of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import keel
from keel.presets import preset_for


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 101])
def test_the_defaults_learn_to_balance_two_poles(seed: int, tmp_path: Path) -> None:
    """Return above 1,000 after 51,200 steps; a random policy has 50, version 0.1's defaults 110."""
    env = "InvertedDoublePendulum-v5"
    assert preset_for(env)[0] == "default"
    *_, last = keel.iterate(env, runs=tmp_path, seed=seed, total_steps=51_200)
    assert last.metrics["eval/return_mean"] >= 1_000.0
