"""The optimizer step that a configuration gets: compiled kernels, `torch.compile`, or plain torch.

Kernels take small MLPs with the usual objectives on the CPU; everything else goes through torch.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Literal

from keel.algorithms import dense, dense_critic
from keel.algorithms.critic import CriticObjective
from keel.algorithms.optimizer import Step, make_step
from keel.errors import InputError
from keel.losses.ppo import Objective
from keel.networks.agent import Agent
from keel.networks.own import OwnActorCritic
from keel.networks.pointer import PointerActorCritic

COMPILE_PAYS = 12_000
"""Optimizer steps from which compiling (about 20 s, cold) has earned itself back."""


Kind = Literal["kernels", "torch.compile", "torch"]


@dataclass(frozen=True)
class StepChoice:
    """What takes the optimizer steps of a run."""

    kind: Kind
    agent: Agent
    objective: Objective | CriticObjective
    max_grad_norm: float
    reason: str = ""
    """why kernels do not take them, where they do not"""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.kind} ({self.reason})" if self.reason else self.kind

    @property
    def compiled(self) -> bool:
        """Whether torch compiles the step."""
        return self.kind == "torch.compile"

    def make(self) -> Step:
        """Return the step."""
        agent, norm = self.agent, self.max_grad_norm
        if self.kind != "kernels":
            return make_step(agent, self.objective, max_grad_norm=norm, compiled=self.compiled)
        if isinstance(self.objective, CriticObjective):
            return dense_critic.DenseCriticStep(agent, max_grad_norm=norm)
        return dense.make_dense_step(agent, self.objective, max_grad_norm=norm)


def choose_step(
    agent: Agent,
    objective: Objective | CriticObjective,
    *,
    max_grad_norm: float,
    compile_setting: str,
    planned_steps: int,
) -> StepChoice:
    """Choose what takes the optimizer steps.

    Args:
        agent: whose parameters are learned.
        objective: the whole loss, or that of the critic alone.
        max_grad_norm: bound on the norm of a group's gradient.
        compile_setting: `auto`, `on` or `off`.
        planned_steps: number of steps that the run will take.
    """
    ragged = isinstance(agent.network, PointerActorCritic | OwnActorCritic)
    if ragged and compile_setting == "on":
        raise InputError(
            "compile: the shapes inside of this network are not fixed, or not known; leave it at "
            "auto"
        )
    reason = (
        dense_critic.obstacle(agent, objective)
        if isinstance(objective, CriticObjective)
        else dense.obstacle(agent, objective)
    )
    kind: Kind = "torch" if reason else "kernels"
    pays = bool(reason) and not ragged and _pays(agent, planned_steps)
    if compile_setting == "on" or (compile_setting == "auto" and pays):
        kind, reason = "torch.compile", reason or "compile is on"
    return StepChoice(kind, agent, objective, max_grad_norm, reason)


def _pays(agent: Agent, planned_steps: int) -> bool:
    """Return whether compiling pays: not for sequences (unrolled, they compile for minutes), not
    for CNNs, which are bound by arithmetic."""
    if agent.recurrent or agent.sees_pixels:
        return False
    on_gpu = agent.initial.device.type == "cuda"
    able = on_gpu or shutil.which("c++") or shutil.which("g++")
    return bool(able) and planned_steps >= COMPILE_PAYS
