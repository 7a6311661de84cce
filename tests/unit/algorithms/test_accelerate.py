"""Which optimizer step a run gets: compiled kernels, torch.compile, or plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.algorithms import accelerate
from keel.algorithms.accelerate import COMPILE_PAYS, StepChoice, choose_step
from keel.algorithms.critic import CriticObjective
from keel.algorithms.dense_critic import DenseCriticStep
from keel.algorithms.optimizer import initial_opt_state
from keel.config import Network
from keel.experience.batch import Batch
from keel.losses.ppo import Objective
from keel.networks.build import build_agent
from keel.types import HyperParams

SMALL = Objective()
OTHER = Objective(penalize=True)
"""One that the kernels do not take."""


def agent_of(observation: spaces.Space[Any] | None = None, **network: Any) -> Any:
    box = spaces.Box(-1.0, 1.0, (3,)) if observation is None else observation
    return build_agent(box, spaces.Discrete(2), Network(**{"hidden": (8,), **network}), 0)


def choice(agent: Any, objective: Any, setting: str, steps: int = COMPILE_PAYS) -> StepChoice:
    return choose_step(
        agent, objective, max_grad_norm=0.5, compile_setting=setting, planned_steps=steps
    )


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compilers that are installed; a test may take them away."""
    there = ["g++"]
    monkeypatch.setattr(accelerate.shutil, "which", lambda name: name if name in there else None)
    return there


@pytest.mark.parametrize("objective", [SMALL, CriticObjective(None)], ids=["loss", "critic"])
def test_kernels_take_small_networks_unless_torch_shall_compile(objective: Any) -> None:
    for setting in ("auto", "off"):
        assert choice(agent_of(), objective, setting).kind == "kernels"
    asked = choice(agent_of(), objective, "on", 1)
    assert (asked.kind, asked.compiled) == ("torch.compile", True)


def test_compiling_pays_from_a_number_of_steps_on_and_with_a_compiler(compiler: list[str]) -> None:
    agent = agent_of()
    assert choice(agent, OTHER, "auto").kind == "torch.compile"
    assert choice(agent, OTHER, "auto", COMPILE_PAYS - 1).kind == "torch"
    assert choice(agent, OTHER, "off").kind == "torch"
    compiler[:] = ["c++"]
    assert choice(agent, OTHER, "auto").kind == "torch.compile"
    compiler.clear()
    assert choice(agent, OTHER, "auto").kind == "torch"


def test_sequences_and_images_are_compiled_only_if_asked_to() -> None:
    images = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    for agent in (agent_of(recurrent="actor", recurrent_size=4), agent_of(images, kind="cnn")):
        assert choice(agent, OTHER, "auto").kind == "torch"
        assert choice(agent, OTHER, "on").kind == "torch.compile"


def test_the_critics_kernel_is_made_for_its_own_objective() -> None:
    made = choice(agent_of(), CriticObjective(None), "auto").make()
    assert isinstance(made, DenseCriticStep)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_kernels_and_torch_take_the_same_step_bounded_alike(setting: str) -> None:
    """With a bound of 0.5 on the norm: Adam's first moment is 0.1 times the clipped gradient."""
    agent = agent_of()
    kernels = choice(agent, SMALL, setting)
    plain = StepChoice("torch", agent, SMALL, 0.5)
    rng = torch.Generator().manual_seed(0)
    obs = {"obs": torch.randn(6, 3, generator=rng)}
    policy = agent.policy(agent.initial, obs)
    action = torch.tensor([0, 1, 0, 1, 1, 0])
    batch = Batch(
        obs,
        policy,
        action,
        agent.dist.log_prob(policy, action),
        torch.ones(6),
        advantage=9.0 * torch.randn(6, generator=rng),
        target=9.0 * torch.randn(6, generator=rng),
        old_value=torch.zeros(6, 1),
    )
    moments = []
    for chosen in (kernels, plain):
        result = chosen.make()(
            initial_opt_state(agent.initial),
            batch,
            torch.arange(6),
            torch.ones(6),
            HyperParams().tensor(),
            torch.ones(1, dtype=torch.bool),
        )
        moments.append(result.opt_state.first)
        assert result.opt_state.first.norm().item() == pytest.approx(0.05, rel=1e-3)
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)
