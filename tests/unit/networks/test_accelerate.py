"""What computes a run: compiled kernels, torch.compile, or plain torch; and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.algorithms.critic import CriticObjective
from keel.algorithms.dense_critic import DenseCriticStep
from keel.algorithms.optimizer import Minibatch, initial_opt_state, make_chosen_step
from keel.config import Agents, Network
from keel.experience.batch import Batch
from keel.losses.ppo import Objective
from keel.networks import accelerate
from keel.networks.accelerate import (
    COMPILE_PAYS,
    Acceleration,
    Choice,
    actor_obstacle,
    choose_step,
    critic_step_obstacle,
    fisher_obstacle,
    kernels_unless,
    slow_lines,
    step_obstacle,
)
from keel.networks.build import build_agent
from keel.types import HyperParams

SMALL = Objective()
OTHER = Objective(penalize=True)
"""One that the kernels do not take."""


def agent_of(observation: spaces.Space[Any] | None = None, **network: Any) -> Any:
    box = spaces.Box(-1.0, 1.0, (3,)) if observation is None else observation
    return build_agent(box, spaces.Discrete(2), Network(**{"hidden": (8,), **network}), 0)


def choice(agent: Any, objective: Any, setting: str, steps: int = COMPILE_PAYS) -> Choice:
    obstacle = (
        step_obstacle(agent, objective)
        if isinstance(objective, Objective)
        else critic_step_obstacle(agent, objective.value_clip)
    )
    return choose_step(agent, obstacle, compile_setting=setting, planned_steps=steps)


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
    assert str(asked) == "torch.compile (compile is on)"


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
    made = make_chosen_step("kernels", agent_of(), CriticObjective(None), max_grad_norm=0.5)
    assert isinstance(made, DenseCriticStep)


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_kernels_and_torch_take_the_same_step_bounded_alike(setting: str) -> None:
    """With a bound of 0.5 on the norm: Adam's first moment is 0.1 times the clipped gradient."""
    agent = agent_of()
    chosen_kind = choice(agent, SMALL, setting).kind
    assert chosen_kind == "kernels"
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
    for kind in (chosen_kind, "torch"):
        result = make_chosen_step(kind, agent, SMALL, max_grad_norm=0.5)(
            initial_opt_state(agent.initial),
            Minibatch(
                batch,
                torch.arange(6),
                torch.ones(6),
                HyperParams().tensor(),
                torch.ones(1, dtype=torch.bool),
            ),
        )
        moments.append(result.opt_state.first)
        assert result.opt_state.first.norm().item() == pytest.approx(0.05, rel=1e-3)
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


BOX = spaces.Box(-1.0, 1.0, (2,))


def continuous(**network: Any) -> Any:
    return build_agent(spaces.Box(-1.0, 1.0, (3,)), BOX, Network(hidden=(8,), **network), 0)


@pytest.mark.parametrize(
    ("agent", "actor", "fisher"),
    [
        (agent_of(), "kernels", "kernels"),
        (continuous(), "kernels", "kernels"),
        (
            continuous(state_std=True),
            "kernels",
            "torch (log-stds depend on the observation)",
        ),
        (continuous(squash=True), "kernels", "torch (the distribution is SquashedGaussian)"),
        (
            agent_of(hidden=(300,)),
            "torch (a layer is wider than 256, or not tanh or relu)",
            "torch (a layer is wider than 256, or not tanh or relu)",
        ),
        (
            agent_of(spaces.Discrete(4)),
            "torch (observations are no single vector)",
            "torch (observations are no single vector)",
        ),
        (
            agent_of(recurrent="both", recurrent_size=4),
            "torch (the network is a RecurrentActorCritic)",
            "torch (the network is a RecurrentActorCritic)",
        ),
    ],
)
def test_who_acts_and_who_multiplies(agent: Any, actor: str, fisher: str) -> None:
    assert str(kernels_unless(actor_obstacle(agent))) == actor
    assert str(kernels_unless(fisher_obstacle(agent))) == fisher


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [("none", "kernels"), ("all", "torch (several agents act with one network)")],
)
def test_several_agents_act_by_kernels_with_a_network_each(sharing: Any, expected: str) -> None:
    observation = spaces.Dict({"obs": spaces.Box(-1.0, 1.0, (3,))})
    agent = build_agent(
        observation,
        spaces.Discrete(2),
        Network(hidden=(8,)),
        0,
        agents=("a", "b"),
        many=Agents(sharing=sharing, critic="own"),
    )
    assert str(kernels_unless(actor_obstacle(agent))) == expected


def test_what_kernels_do_not_take_is_said_in_a_line_each() -> None:
    fast = Acceleration(Choice("torch", "the loss has a KL penalty"), Choice("kernels"))
    assert fast.texts() == {
        "optimizer_step": "torch (the loss has a KL penalty)",
        "actor": "kernels",
    }
    assert slow_lines(fast.texts()) == ["optimizer steps: torch (the loss has a KL penalty)"]
    slow = Acceleration(Choice("kernels"), Choice("kernels"), Choice("torch", "why"))
    assert slow_lines(slow.texts()) == ["Fisher products: torch (why)"]
