"""The variants of the plans on land are what their names say."""

from __future__ import annotations

import pytest

from keel.ablate import Cell, Plan, plan_named
from keel.config import Config, Faults
from keel.config.values import OPTIONS, named_values

NO_CLIPPING = 1e9
FAULTS = {
    "wrong-actor": {"wrong_actor": True},
    "five": {"first_actions": 5},
    "mask-drift": {"mask_drift": True},
    "epsilon": {"epsilon_greedy": 0.1},
    "interleaved": {"interleaved_gae": True},
    "descent": {"plain_descent": True},
}
PLAN = plan_named("land-causes-large-returns")
assert PLAN is not None


def config_of(cell: Cell, plan: Plan = PLAN) -> Config:
    return cell.config(plan.base, plan.seeds[0])


def land_options(config: Config) -> dict[str, object]:
    return dict(named_values(config.envs.options, OPTIONS))


def test_the_original_scales_are_shared_by_all() -> None:
    base = PLAN.base
    assert PLAN.seeds == (100, 101, 102, 103, 104)
    assert (base.rollout_steps, base.advantage.normalize) == (20, "none")
    assert (base.region.max_grad_norm, base.region.learning_rate) == (NO_CLIPPING, 1e-4)
    assert (base.region.clip, base.explore.entropy_coef) == (0.2, 0.15)
    assert not base.region.gate
    assert not base.region.certify
    assert base.faults == Faults(reward_gain=30.0)
    options = land_options(base)
    assert (options["scale"], options["reward"], options["late_build_npv"]) == (500, "legacy", True)


@pytest.mark.parametrize("cell", PLAN.cells, ids=lambda cell: cell.name)
def test_a_variant_is_what_its_name_says(cell: Cell) -> None:
    config, words = config_of(cell), cell.name
    assert config.advantage.normalize == ("batch" if "batch" in words else "none")
    assert config.region.max_grad_norm == (0.5 if words.endswith("-clipped") else NO_CLIPPING)
    expected = {k: v for name, set_ in FAULTS.items() if name in words for k, v in set_.items()}
    assert config.faults == Faults(**expected, reward_gain=30.0)
    rate = 1e-2 if "rate-1e-2" in words else 0.1 if "descent" in words else 1e-4
    assert config.region.learning_rate == rate
    assert config.region.value_coef == (0.0 if "descent" in words else 0.5)


def test_games_have_the_scale_and_size_of_their_names() -> None:
    cells = {cell.name: land_options(config_of(cell)) for cell in PLAN.cells}
    base = land_options(PLAN.base)
    others = {name: options for name, options in cells.items() if options != base}
    legacy = {"reward": "legacy", "scale": 500, "late_build_npv": True}
    assert others == {
        "five-scale-2000": base | {"scale": 2000},
        "rate-1e-2-batch-full-city": legacy,
        "rate-1e-2-none-full-city": legacy,
        "wrong-actor-full-city": legacy,
        "wrong-actor-203-slots": legacy | {"rows": 7, "columns": 29},
    }
    assert 7 * 29 == 203


def test_every_pair_differs_by_the_normalization_alone() -> None:
    cells = {cell.name: dict(cell.settings) for cell in PLAN.cells}
    pairs = [name for name in cells if "batch" in name]
    assert len(pairs) == 10
    for name in pairs:
        without = dict(cells[name])
        assert without.pop("advantage.normalize") == "batch"
        assert without == cells[name.replace("batch", "none")]
