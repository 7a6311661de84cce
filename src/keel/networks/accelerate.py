"""The one place that says what is fast: which optimizer step, actor and Fisher product a
configuration gets, and why they are not compiled kernels where they are not.

Kernels take small MLPs on the CPU, with the usual objectives; steps that they leave are compiled by
torch where that pays; everything else is plain torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keel.distributions.actions import Categorical, Gaussian
from keel.errors import InputError
from keel.networks.actor_critic import MAX_SMALL, SeparateActorCritic
from keel.networks.agent import Agent

COMPILE_PAYS = 12_000
"""Optimizer steps from which compiling (about 20 s, cold) has earned itself back."""

Kind = Literal["kernels", "torch.compile", "torch"]
PARTS = {
    "optimizer_step": "optimizer steps",
    "actor": "acting",
    "fisher_product": "Fisher products",
}
"""What is chosen, as `environment.json` names it, and in words."""
NARROW = f"a layer is wider than {MAX_SMALL}, or not tanh or relu"
NO_VECTOR = "observations are no single vector"
OWN_SPREAD = "log-stds depend on the observation"


@dataclass(frozen=True)
class Choice:
    """What computes one part of a run."""

    kind: Kind
    reason: str = ""
    """why kernels do not, where they do not"""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


@dataclass(frozen=True)
class Acceleration:
    """What computes the parts of a run that take its time."""

    step: Choice
    actor: Choice
    fisher: Choice | None = None
    """None: the algorithm needs no Fisher products"""

    def texts(self) -> dict[str, str]:
        """Return the choices in words, as a run's `environment.json` names them."""
        choices = zip(PARTS, (self.step, self.actor, self.fisher), strict=True)
        return {name: str(choice) for name, choice in choices if choice is not None}


def slow_lines(choices: Mapping[str, object]) -> list[str]:
    """Return a line for each of `Acceleration.texts` that kernels do not take."""
    slow = [name for name in PARTS if choices.get(name, "kernels") != "kernels"]
    return [f"{PARTS[name]}: {choices[name]}" for name in slow]


def step_obstacle(agent: Agent, objective: Any) -> str:
    """Return why kernels cannot take the optimizer steps; nothing where they can.

    Args:
        agent: whose parameters are learned.
        objective: `keel.losses.ppo.Objective`.
    """
    network = agent.network
    if not isinstance(network, SeparateActorCritic):
        return _other_network(agent)
    small = network.actor.is_small and network.critic.is_small
    one_vector = network.critic_encoder is network.encoder and network.encoder.is_vector
    reasons = {
        "several agents learn together": agent.members != (0,),
        f"the device is {agent.initial.device.type}": agent.initial.device.type != "cpu",
        _other_distribution(agent): type(agent.dist) not in (Categorical, Gaussian),
        NO_VECTOR: not one_vector,
        OWN_SPREAD: not _head_suits(agent, network),
        NARROW: not small,
        f"the surrogate is {objective.surrogate}": objective.surrogate != "clip",
        "the loss has a KL penalty": objective.penalize,
        "region.dual_clip is set": objective.dual_clip is not None,
        "region.value_clip is set": objective.value_clip is not None,
        "explore.entropy_floor is set": objective.entropy_floor is not None,
    }
    return _first(reasons)


def critic_step_obstacle(agent: Agent, value_clip: float | None) -> str:
    """Return why kernels cannot take the steps of a critic alone; nothing where they can."""
    network = agent.network
    if not isinstance(network, SeparateActorCritic):
        return _other_network(agent)
    reasons = {
        f"the device is {agent.initial.device.type}": agent.initial.device.type != "cpu",
        NARROW: not network.critic.is_small,
        "region.value_clip is set": value_clip is not None,
    }
    return _first(reasons)


def actor_obstacle(agent: Agent) -> str:
    """Return why kernels cannot act; nothing where they can."""
    network = agent.network
    if not isinstance(network, SeparateActorCritic):
        return _other_network(agent)
    reasons = {
        NO_VECTOR: not network.encoder.is_vector,
        NARROW: not network.actor.is_small,
        "several agents act with one network": agent.groups == 1 and agent.members != (0,),
    }
    return _first(reasons)


def fisher_obstacle(agent: Agent) -> str:
    """Return why kernels cannot multiply by the Fisher matrix; nothing where they can."""
    network = agent.network
    if not isinstance(network, SeparateActorCritic):
        return _other_network(agent)
    reasons = {
        f"the device is {agent.initial.device.type}": agent.initial.device.type != "cpu",
        # another one may have a Fisher matrix of its own
        _other_distribution(agent): type(agent.dist) not in (Categorical, Gaussian),
        NO_VECTOR: not network.encoder.is_vector,
        OWN_SPREAD: not _head_suits(agent, network),
        NARROW: not network.actor.is_small,
    }
    return _first(reasons)


def choose_step(
    agent: Agent,
    obstacle: str,
    *,
    compile_setting: str,
    planned_steps: int,
) -> Choice:
    """Choose what takes the optimizer steps.

    Args:
        agent: whose parameters are learned.
        obstacle: of `step_obstacle` or `critic_step_obstacle`.
        compile_setting: `auto`, `on` or `off`.
        planned_steps: number of steps that the run will take.
    """
    ragged = getattr(agent.network, "ragged", False)
    if ragged and compile_setting == "on":
        raise InputError(
            "compile: the shapes inside of this network are not fixed, or not known; leave it at "
            "auto"
        )
    pays = bool(obstacle) and not ragged and _pays(agent, planned_steps)
    if compile_setting == "on" or (compile_setting == "auto" and pays):
        return Choice("torch.compile", obstacle or "compile is on")
    return kernels_unless(obstacle)


def kernels_unless(obstacle: str) -> Choice:
    """Choose kernels, or torch where there is an obstacle."""
    return Choice("torch" if obstacle else "kernels", obstacle)


def _first(reasons: Mapping[str, bool]) -> str:
    return next((reason for reason, holds in reasons.items() if holds), "")


def _other_network(agent: Agent) -> str:
    return f"the network is a {type(agent.network).__name__}"


def _other_distribution(agent: Agent) -> str:
    return f"the distribution is {type(agent.dist).__name__}"


def _head_suits(agent: Agent, network: SeparateActorCritic) -> bool:
    """Return whether the log-stds are parameters exactly where the distribution has some."""
    return (network.head.log_std is not None) == isinstance(agent.dist, Gaussian)


def _pays(agent: Agent, planned_steps: int) -> bool:
    """Return whether compiling pays: not for sequences (unrolled, they compile for minutes), not
    for CNNs, which are bound by arithmetic."""
    if agent.recurrent or agent.sees_pixels:
        return False
    on_gpu = agent.initial.device.type == "cuda"
    able = on_gpu or shutil.which("c++") or shutil.which("g++")
    return bool(able) and planned_steps >= COMPILE_PAYS
