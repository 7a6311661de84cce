"""From a configuration to its algorithm, its hyperparameters and what turns them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keel.algorithms.optimizer import Loss, Step, make_chosen_step
from keel.algorithms.ppo import PPO
from keel.config import Config
from keel.config.common import CONTROLLERS
from keel.errors import InputError
from keel.losses.ppo import Objective
from keel.networks.accelerate import (
    Acceleration,
    Kind,
    actor_obstacle,
    choose_step,
    critic_step_obstacle,
    fisher_obstacle,
    kernels_unless,
    step_obstacle,
)
from keel.networks.agent import Agent
from keel.registry import texts
from keel.trust_region.certify import Algorithm, Certified
from keel.types import HyperParams

if TYPE_CHECKING:
    from keel.controllers.controllers import Controller
    from keel.losses.demos import Limit


def initial_hparams(config: Config) -> HyperParams:
    """The hyperparameters before anything turned them."""
    region = config.region
    clip = 0.2 if region.clip is None else region.clip
    return HyperParams(
        learning_rate=region.learning_rate,
        clip_low=clip,
        clip_high=clip if region.clip_high is None else region.clip_high,
        entropy_coef=config.explore.entropy_coef,
        kl_coef=region.kl_coef,
        max_kl=region.max_kl,
        damping=config.natural.damping,
        bc_coef=config.demos.coef if config.demos.path else 0.0,
        critic_factor=(
            1.0
            if region.critic_learning_rate is None
            else region.critic_learning_rate / region.learning_rate
        ),
    )


def scheduled(
    hparams: HyperParams, steps: int, set_by_hand: Collection[str], config: Config
) -> HyperParams:
    """Return the values of an iteration: schedules follow environment steps, and leave alone what
    was set by hand."""
    left = max(0.0, 1.0 - steps / config.total_steps)
    end = config.natural.max_kl_end
    if config.algo == "trpo" and end is not None and "max_kl" not in set_by_hand:
        hparams = replace(
            hparams, max_kl=min(hparams.max_kl, _planned_bound(config, end, 1.0 - left))
        )
    if config.region.schedule == "constant" or config.region.adaptive_rate:
        return hparams
    if "learning_rate" in set_by_hand:
        return hparams
    return replace(hparams, learning_rate=config.region.learning_rate * left)


def _planned_bound(config: Config, end: float, done: float) -> float:
    """`max_kl` after the share `done` of the run: held, then on its way to `end`."""
    natural, start = config.natural, config.region.max_kl
    if done <= natural.max_kl_hold:
        return start
    way = (done - natural.max_kl_hold) / (1.0 - natural.max_kl_hold)
    if natural.max_kl_schedule == "geometric":
        return float(start * (end / start) ** way)
    return end + (start - end) * (1.0 - way)


def build_objective(config: Config) -> Objective:
    """Return the loss of a minibatch, for PPO; TRPO takes its surrogate and its entropy."""
    region, explore = config.region, config.explore
    return Objective(
        surrogate=_surrogate(config),
        dual_clip=region.dual_clip,
        value_coef=region.value_coef,
        value_clip=region.value_clip,
        max_log_ratio=region.max_log_ratio,
        penalize=region.kl_coef > 0.0 or region.adaptive_kl,
        track_kl=region.early_stop != "off",
        kl_measure=region.kl_measure,
        entropy_bonus=explore.entropy_coef > 0.0 or explore.entropy_floor is not None,
        entropy_floor=explore.entropy_floor,
    )


def acceleration(config: Config, agent: Agent, learner: Agent | None = None) -> Acceleration:
    """Return what computes a run: its optimizer steps, its actor, its Fisher products.

    Args:
        config: of the run.
        agent: that acts.
        learner: that learns, where it is another.
    """
    region, natural = config.region, config.algo == "trpo"
    own = _stepping(config, learner or agent)
    obstacle = (
        critic_step_obstacle(own, region.value_clip)
        if natural
        else step_obstacle(own, build_objective(config))
    )
    step = choose_step(
        own,
        obstacle,
        compile_setting=config.compile,
        planned_steps=config.iterations * region.epochs * -(-config.batch // region.minibatch),
    )
    fisher = kernels_unless(fisher_obstacle(own)) if natural else None
    return Acceleration(step, kernels_unless(actor_obstacle(agent)), fisher)


def build_step(config: Config, agent: Agent, kind: Kind) -> Step:
    """Return the optimizer step of the agent that learns, of the kind chosen by `acceleration`."""
    objective: Loss = build_objective(config)
    if config.algo == "trpo":
        from keel.algorithms.critic import CriticObjective

        objective = CriticObjective(config.region.value_clip)
    norm = config.region.max_grad_norm
    return make_chosen_step(kind, _stepping(config, agent), objective, max_grad_norm=norm)


def _stepping(config: Config, agent: Agent) -> Agent:
    """Return whom one optimizer step moves: all agents together, or one alone where each is fitted
    or learns for itself."""
    alone = config.algo == "trpo" or config.agents.order == "sequential"
    return agent.alone() if alone else agent


def build_algorithm(config: Config, agent: Agent, step: Step) -> Algorithm:
    """Return the certified algorithm that the configuration asks for.

    Args:
        config: of the run.
        agent: whose policy it improves.
        step: one step of the optimizer.
    """
    in_turn = config.agents.order == "sequential"
    own = agent.alone() if in_turn else agent
    build = _build_trpo if config.algo == "trpo" else _build_ppo
    algorithm: Algorithm = build(config, own, step)
    if in_turn:
        from keel.algorithms.happo import HAPPO

        algorithm = HAPPO(agent, algorithm)
    certified = Certified(algorithm, config.region.certify, config.region.gate)
    if not agent.critic.normalized:
        return certified
    from keel.algorithms.popart import PopArt

    return PopArt(certified)


def _build_ppo(config: Config, agent: Agent, step: Step) -> Algorithm:
    region = config.region
    return PPO(
        agent,
        step,
        epochs=region.epochs,
        minibatch=_minibatch(config),
        early_stop=region.early_stop,
        target_kl=region.target_kl,
        recompute_advantages=config.advantage.recompute,
        max_grad_norm=region.max_grad_norm,
        objective=build_objective(config),
        gate=region.gate,
        limit=_limit(config),
    )


def _build_trpo(config: Config, agent: Agent, step: Step) -> Algorithm:
    from keel.algorithms.critic import CriticFit, CriticObjective
    from keel.algorithms.trpo import TRPO

    region, natural = config.region, config.natural
    return TRPO(
        agent,
        step,
        cg_iters=natural.cg_iters,
        fisher_fraction=natural.fisher_fraction,
        backtrack_iters=natural.backtrack_iters,
        backtrack_coeff=natural.backtrack_coeff,
        accept_ratio=natural.accept_ratio,
        rescale_to_kl=natural.rescale_to_kl,
        objective=build_objective(config),
        critic=CriticFit(
            region.epochs,
            _minibatch(config),
            region.max_grad_norm,
            CriticObjective(region.value_clip),
        ),
        limit=_limit(config),
    )


def _minibatch(config: Config) -> int:
    """Return the rows of a minibatch; of a recurrent network a row is a whole sequence."""
    size, recurrent = config.region.minibatch, config.network.recurrent != "none"
    return max(1, size // config.rollout_steps) if recurrent else size


def _limit(config: Config) -> Limit | None:
    demos = config.demos
    if not (demos.path and demos.control == "adaptive" and demos.steer == "gradient"):
        return None
    from keel.losses.demos import Limit

    return Limit(demos.coef, demos.max_ratio, demos.coef_min)


def build_controllers(config: Config) -> tuple[Controller, ...]:
    """The adaptive rules that are switched on, and those of the user's own."""
    region, explore = config.region, config.explore
    aims = region.target_kl is not None
    switched_on = {
        "adaptive_kl": region.adaptive_kl and aims,
        "adaptive_rate": region.adaptive_rate and aims,
        "adaptive_clip": region.adaptive_clip and aims,
        "stabilizer": config.algo == "trpo" and config.stabilizer.ls_fail_threshold > 0,
        "demos": bool(config.demos.path) and config.demos.control != "fixed",
        "entropy_decay": explore.entropy_decay < 1.0,
        "pulses": explore.pulses,
        "hierarchical": explore.hierarchical,
    }
    own = [CONTROLLERS.get(name)(config) for name, on in switched_on.items() if on]
    return (*own, *(make_controller(name) for name in texts(config.controllers)))


def make_controller(name: str) -> Controller:
    """Return a controller of the user's own, or what the class or function of that name makes.

    Args:
        name: a registered name, or `module:attribute`.
    """
    entry: Any = CONTROLLERS.get(name)
    if isinstance(entry, type) or not callable(getattr(entry, "init", None)):
        try:
            inspect.signature(entry).bind()
        except TypeError as error:
            raise InputError(
                f"controllers: {name}: expected a controller, or what makes one without arguments "
                f"({error})"
            ) from error
        entry = entry()
    if not (callable(entry) and callable(getattr(entry, "init", None))):
        raise InputError(
            f"controllers: {name}: expected init() and __call__(state, outcome, hparams), got "
            f"{type(entry).__name__}"
        )
    state = entry.init()
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise InputError(
            f"controllers: {name}: init() must give numbers by name, got {type(state).__name__}"
        )
    return entry  # type: ignore[no-any-return]


def _surrogate(config: Config) -> str:
    region = config.region
    if region.loss != "clip":
        return region.loss
    if region.clip is None:
        return "unclipped"
    return "symmetric" if region.symmetric else "clip"
