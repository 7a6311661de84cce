"""Regions, objectives and controllers as values: what they are without arguments, and for good."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import keel.algorithms
from keel.algorithms.critic import CriticFit
from keel.algorithms.ppo import PPO
from keel.algorithms.supervised import Likelihood
from keel.algorithms.trpo import TRPO, Problem
from keel.config import from_dict
from keel.controllers.bandit import TemperatureLadder
from keel.controllers.controllers import Stabilizer, TemperaturePulses
from keel.controllers.demos import CloningTrust, LossBalance
from keel.losses.demos import Limit
from keel.losses.ppo import Objective
from keel.losses.token import TokenObjective
from keel.networks.agent import Agent
from keel.training.builder import build_algorithm, build_controllers
from keel.trust_region.certify import Certified

from .conftest import build

AGENT: Agent = build((1,)).agent
STEP: Any = None
MUTABLE = {Problem}
"""Which remembers where its line search began."""


def classes() -> list[type[Any]]:
    folder = Path(keel.algorithms.__file__).parent
    modules = [import_module(f"keel.algorithms.{x.stem}") for x in sorted(folder.glob("*.py"))]
    return [
        kind
        for module in modules
        for name, kind in inspect.getmembers(module, is_dataclass)
        if kind.__module__ == module.__name__ and not name.startswith("_") and kind not in MUTABLE
    ]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_a_part_of_an_update_is_a_value(kind: type[Any]) -> None:
    """Two runs may share it: nothing in it can be set."""
    part = object.__new__(kind)
    for name in ("anything", *(field.name for field in fields(kind))):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


def test_equal_parts_are_equal() -> None:
    assert Likelihood() == Likelihood()
    assert TokenObjective() == TokenObjective()
    assert Objective() == Objective()
    assert CriticFit() == CriticFit()


def configured(settings: dict[str, Any]) -> Certified:
    algorithm = build_algorithm(from_dict(settings), AGENT, STEP)
    assert isinstance(algorithm, Certified)
    return algorithm


def same(part: Any, configured: Any, *names: str) -> None:
    assert type(part) is type(configured)
    for name in names:
        assert getattr(part, name) == getattr(configured, name), name


def test_a_region_without_arguments_is_that_of_a_configuration_without_any() -> None:
    ppo = configured({})
    same(Certified(PPO(AGENT, STEP)), ppo, "enforce", "gate")
    names = "epochs minibatch early_stop target_kl recompute_advantages max_grad_norm gate"
    assert isinstance(ppo.algorithm, PPO)
    same(PPO(AGENT, STEP), ppo.algorithm, *names.split())
    objective = "surrogate dual_clip value_coef value_clip max_log_ratio penalize kl_measure"
    same(Objective(), ppo.algorithm.objective, *objective.split())
    trpo = configured({"algo": "trpo"}).algorithm
    assert isinstance(trpo, TRPO)
    names = "cg_iters fisher_fraction backtrack_iters backtrack_coeff accept_ratio"
    same(TRPO(AGENT, STEP), trpo, *names.split(), "rescale_to_kl")
    same(CriticFit(), trpo.critic, "minibatch", "max_grad_norm", "objective")


def test_the_critic_of_trpo_is_fitted_by_ten_passes() -> None:
    """As SB3-contrib's (`n_critic_updates=10`); a configuration says it by `region.epochs`."""
    assert CriticFit().epochs == 10


def test_the_coefficient_of_the_entropy_floor_is_a_tenth() -> None:
    assert Objective().entropy_floor_coef == 0.1


def test_controllers_without_arguments_are_those_of_a_configuration_without_any() -> None:
    settings = {"pulses": True, "hierarchical": False}
    (pulses,) = build_controllers(from_dict({"explore": settings}))
    assert TemperaturePulses() == pulses
    (ladder,) = build_controllers(from_dict({"explore": {"hierarchical": True}}))
    assert TemperatureLadder() == ladder
    config = from_dict({"algo": "trpo"})
    (stabiliser,) = build_controllers(config)
    assert Stabilizer(config.region.max_kl, config.natural.damping) == stabiliser


@pytest.mark.parametrize(
    ("settings", "part"),
    [({"steer": "gradient"}, CloningTrust(2.0)), ({"steer": "loss"}, LossBalance(2.0))],
)
def test_what_holds_cloning_back_is_as_configured(settings: dict[str, Any], part: Any) -> None:
    cloning = {"demos": "some", "coef": 2.0, "control": "adaptive", **settings}
    assert build_controllers(from_dict({"bc": cloning})) == (part,)
    algorithm = configured({"bc": cloning}).algorithm
    assert isinstance(algorithm, PPO)
    assert algorithm.limit == (Limit(2.0) if settings["steer"] == "gradient" else None)
