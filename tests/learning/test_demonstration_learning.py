"""Demonstrations help where the reward is silent, and do not rule where it speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import keel
from keel.apps.demonstrations import experts, record_function, save_demos

SPARSE = "keel.apps.demonstrations.sparse:MountainCarSparse-v0"


def score(tmp_path: Path, env: str, name: str, **settings: Any) -> float:
    *_, last = keel.iterate(env, runs=tmp_path, name=name, **settings)
    state = last.iteration.state
    assert state.kl_exact_max <= 0.05
    return float(last.metrics["eval/return_mean"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_episodes_of_a_script_solve_what_pays_only_at_the_end(
    tmp_path: Path, seed: int
) -> None:
    demos = tmp_path / "demos"
    save_demos(record_function(SPARSE, experts.swing, 10, seed=0), demos)
    found = score(
        tmp_path,
        SPARSE,
        "shown",
        preset_name="MountainCar",
        total_steps=60_000,
        seed=seed,
        bc={"demos": str(demos)},
    )
    assert found >= 0.95


@pytest.mark.slow
def test_a_wrong_expert_ruins_a_fixed_coefficient_and_not_an_adaptive_one(tmp_path: Path) -> None:
    demos = tmp_path / "demos"
    save_demos(record_function("CartPole-v1", experts.lean_away, 10, seed=0), demos)
    loud = {"demos": str(demos), "coef": 10.0}
    fixed = score(tmp_path, "CartPole-v1", "fixed", bc={**loud, "control": "fixed"})
    adaptive = score(tmp_path, "CartPole-v1", "adaptive", bc=loud)
    assert fixed <= 50.0
    assert adaptive >= 475.0
