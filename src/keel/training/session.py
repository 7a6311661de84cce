"""The machinery of a run: environments, agent, region, the optimizer step, random streams."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from dataclasses import dataclass, replace

import numpy as np
import torch
from gymnasium import spaces
from threadpoolctl import threadpool_limits

from keel.config import Config, options
from keel.envs import AtariOptions, Envs, ObsNormaliser, RewardNormaliser, lead, make_envs
from keel.errors import InputError
from keel.models.acting import make_actor
from keel.models.agent import Agent
from keel.models.build import build_agent
from keel.models.items import Choosing
from keel.models.networks import CNN
from keel.regions import dense, dense_critic
from keel.regions.balance import CloningTrust, LossBalance
from keel.regions.certify import Certified, Region
from keel.regions.constraint import Constraint
from keel.regions.controllers import (
    AdaptiveClip,
    AdaptivePenalty,
    AdaptiveRate,
    Controller,
    Decay,
    Stabiliser,
    TemperaturePulses,
)
from keel.regions.critic import CriticFit, CriticObjective
from keel.regions.imitation import Limit
from keel.regions.objective import Objective, SurrogateName
from keel.regions.proximal import Proximal
from keel.regions.sequential import Sequential
from keel.regions.stepper import Loss, Step, make_step
from keel.resources import expect_memory, keep_memory
from keel.rollout.collect import Collector
from keel.rollout.imitation import Lessons, open_lessons
from keel.training.seeding import Seeds, spread
from keel.training.state import TrainState
from keel.types import Knobs

COMPILE_PAYS = 12_000
"""Optimizer steps from which compiling (about 20 s, cold) has earned itself back."""


@dataclass
class Session:
    """What a run uses and does not change, except for its random streams."""

    config: Config
    seeds: Seeds
    envs: Envs
    agent: Agent
    region: Certified
    controllers: tuple[Controller, ...]
    collector: Collector
    shuffle: torch.Generator
    step: Step
    device: torch.device
    choices: dict[str, object]
    """what was decided automatically: backend, compile, threads, device"""
    lessons: Lessons | None = None
    """demonstrations, if there are any"""


def open_session(config: Config) -> Session:
    """Make everything ready, and say what was chosen."""
    seeds, device = spread(config.seed), _device(config.device)
    envs = make_envs(
        config.env,
        config.envs.num,
        backend=config.envs.backend,
        seed=seeds.envs,
        guard=config.envs.guard,
        timeout=config.envs.timeout,
        atari=atari_options(config),
        env_kwargs=options(config),
    )
    try:
        _expect_memory(config, envs)
        torch.set_num_threads(1)  # initial weights must not depend on how many threads there are
        agent = agent_for(config, envs, seeds.network)
        pixels = _sees_pixels(agent)
        threads = config.threads or (_cores() if pixels else 1)
        torch.set_num_threads(threads)
        agent.to(device)
        if device.type == "cuda":  # a mantissa of 10 bits: replaying would differ from acting
            torch.backends.cudnn.allow_tf32 = False
        region = build_region(config)
        compiled = _compile(config, agent, region.region, device)
        step = _step(agent, region.region, bool(envs.agents), compiled)
        collector = Collector(
            envs,
            agent,
            config.rollout_steps,
            envs.reset(seeds.envs),
            np.random.default_rng(seeds.actions),
            epsilon=config.faults.epsilon_greedy,
        )
        collector.begin(collector.obs)
        lessons = None
        if config.bc.demos:
            lessons = open_lessons(config.bc, envs, agent, collector.obs)
        make_actor(agent, agent.initial)  # loads the libraries it needs, whose threads are set now
        if pixels:
            keep_memory()
        threadpool_limits(1, user_api="blas")  # numpy's and numba's: their matrices are small
    except BaseException:
        envs.close()
        raise
    choices: dict[str, object] = {
        "backend": envs.backend,
        "compile": compiled,
        "threads": threads,
        "device": str(device),
    }
    if lessons is not None:
        choices["demos"] = lessons.fingerprint
    return Session(
        config=config,
        seeds=seeds,
        envs=envs,
        agent=agent,
        region=region,
        controllers=build_controllers(config),
        collector=collector,
        shuffle=torch.Generator().manual_seed(seeds.shuffle),
        step=step,
        device=device,
        choices=choices,
        lessons=lessons,
    )


def agent_for(config: Config, envs: Envs, seed: int) -> Agent:
    """The agent, or the agents, for these environments."""
    return build_agent(
        envs.observation_space,
        envs.action_space,
        config.network,
        seed,
        config.critic,
        envs.agents,
        config.agents,
    )


def atari_options(config: Config) -> AtariOptions:
    """How the environments show their games; their rewards stay raw, the loop clips them."""
    return AtariOptions(**dataclasses.asdict(config.atari))


def _expect_memory(config: Config, envs: Envs) -> None:
    """A rollout is kept once as it was seen, once as it came if that differs."""
    space = envs.observation_space
    parts = space.values() if isinstance(space, spaces.Dict) else [space]
    numbers = sum(
        math.prod(part.shape or ()) * (part.dtype or np.dtype("f4")).itemsize for part in parts
    )
    row = (numbers * (2 if config.envs.normalise_obs else 1) + 128) * max(1, len(envs.agents))
    expect_memory(
        f"a rollout of {config.rollout_steps} steps × {config.envs.num} environments",
        row * config.batch,
        "use a smaller rollout_steps or envs.num",
    )


def initial_state(session: Session) -> TrainState:
    """Before the first iteration."""
    config, envs = session.config, session.envs
    return TrainState(
        steps=0,
        iteration=0,
        optimum=session.region.init(session.agent),
        knobs=initial_knobs(config),
        controllers=tuple(controller.init() for controller in session.controllers),
        obs_normaliser=(
            ObsNormaliser.for_space(envs.observation_space) if config.envs.normalise_obs else None
        ),
        reward_normaliser=(
            RewardNormaliser.for_envs(lead(envs), config.advantage.gamma)
            if config.envs.normalise_reward
            else None
        ),
    )


def initial_knobs(config: Config) -> Knobs:
    """The knobs before anything turned them."""
    region = config.region
    clip = 0.2 if region.clip is None else region.clip
    return Knobs(
        learning_rate=region.learning_rate,
        clip_low=clip,
        clip_high=clip if region.clip_high is None else region.clip_high,
        entropy_coef=config.explore.entropy_coef,
        kl_coef=region.kl_coef,
        max_kl=region.max_kl,
        damping=config.natural.damping,
        bc_coef=config.bc.coef if config.bc.demos else 0.0,
    )


def scheduled(knobs: Knobs, config: Config, steps: int) -> Knobs:
    """The knobs of this iteration: schedules follow environment steps."""
    left = max(0.0, 1.0 - steps / config.total_steps)
    end = config.natural.max_kl_end
    if config.algo == "trpo" and end is not None:
        knobs = replace(knobs, max_kl=min(knobs.max_kl, _planned_bound(config, end, 1.0 - left)))
    if config.region.schedule == "constant" or config.region.adaptive_rate:
        return knobs
    return replace(knobs, learning_rate=config.region.learning_rate * left)


def _planned_bound(config: Config, end: float, done: float) -> float:
    """`max_kl` after the share `done` of the run: held, then on its way to `end`."""
    natural, start = config.natural, config.region.max_kl
    if done <= natural.max_kl_hold:
        return start
    way = (done - natural.max_kl_hold) / (1.0 - natural.max_kl_hold)
    if natural.max_kl_schedule == "geometric":
        return float(start * (end / start) ** way)
    return end + (start - end) * (1.0 - way)


def build_region(config: Config) -> Certified:
    """The trust region that the configuration asks for."""
    region = config.region
    objective = Objective(
        surrogate=_surrogate(config),
        dual_clip=region.dual_clip,
        value_coef=region.value_coef,
        value_clip=region.value_clip,
        max_log_ratio=region.max_log_ratio,
        penalise=region.kl_coef > 0.0 or region.adaptive_kl,
        track_kl=region.early_stop != "off",
        kl_measure=region.kl_measure,
        entropy_bonus=config.explore.entropy_coef > 0.0 or config.explore.entropy_floor is not None,
        entropy_floor=config.explore.entropy_floor,
    )
    remembers = config.network.memory != "none"  # then a row is a sequence of `rollout_steps`
    minibatch = max(1, region.minibatch // config.rollout_steps) if remembers else region.minibatch
    adaptive = config.bc.control == "adaptive" and config.bc.steer == "gradient"
    limit = Limit(config.bc.coef, config.bc.max_ratio, config.bc.coef_min) if adaptive else None
    if config.algo == "trpo":
        natural = config.natural
        constraint = Constraint(
            cg_iters=natural.cg_iters,
            fisher_fraction=natural.fisher_fraction,
            backtrack_iters=natural.backtrack_iters,
            backtrack_coeff=natural.backtrack_coeff,
            accept_ratio=natural.accept_ratio,
            land=natural.land,
            objective=objective,
            critic=CriticFit(
                region.epochs,
                minibatch,
                region.max_grad_norm,
                CriticObjective(region.value_clip),
            ),
            gate=region.gate,
            limit=limit,
        )
        return Certified(_in_order(config, constraint), enforce=region.certify)
    proximal = Proximal(
        epochs=region.epochs,
        minibatch=minibatch,
        early_stop=region.early_stop,
        target_kl=region.target_kl,
        recompute_advantages=config.advantage.recompute,
        max_grad_norm=region.max_grad_norm,
        objective=objective,
        gate=region.gate,
        limit=limit,
    )
    return Certified(_in_order(config, proximal), enforce=region.certify)


def _in_order(config: Config, region: Region) -> Region:
    return Sequential(region) if config.agents.order == "sequential" else region


def build_controllers(config: Config) -> tuple[Controller, ...]:
    """The adaptive rules that are switched on."""
    region, explore = config.region, config.explore
    chosen: list[Controller] = []
    if region.adaptive_kl and region.target_kl is not None:
        chosen.append(AdaptivePenalty(region.target_kl))
    if region.adaptive_rate and region.target_kl is not None:
        chosen.append(AdaptiveRate(region.target_kl))
    if region.adaptive_clip and region.target_kl is not None:
        chosen.append(AdaptiveClip(region.target_kl, initial_knobs(config).clip_high))
    stabiliser = config.stabiliser
    if config.algo == "trpo" and stabiliser.ls_fail_threshold:
        chosen.append(
            Stabiliser(
                max_kl=region.max_kl,
                damping=config.natural.damping,
                threshold=stabiliser.ls_fail_threshold,
                max_kl_decay=stabiliser.max_kl_decay,
                min_max_kl=stabiliser.min_max_kl,
                damping_growth=stabiliser.damping_growth,
                max_damping=stabiliser.max_damping,
                min_gain=stabiliser.min_gain,
                recovery=stabiliser.recovery,
            )
        )
    chosen += _cloning_controllers(config)
    if explore.entropy_decay < 1.0:
        chosen.append(Decay("entropy_coef", explore.entropy_decay, explore.entropy_coef_min))
    if explore.pulses:
        chosen.append(
            TemperaturePulses(
                explore.pulse_interval,
                explore.pulse_magnitude,
                explore.stagnation_threshold,
                explore.stagnation_memory,
            )
        )
    return tuple(chosen)


def _cloning_controllers(config: Config) -> list[Controller]:
    cloning = config.bc
    if not cloning.demos or cloning.control == "fixed":
        return []
    if cloning.control == "decay":
        return [Decay("bc_coef", cloning.decay, cloning.coef_min)]
    if cloning.steer == "gradient":
        return [CloningTrust(cloning.coef, cloning.coef_min)]
    return [LossBalance(cloning.coef, cloning.max_ratio, cloning.coef_min)]


def _surrogate(config: Config) -> SurrogateName:
    if config.region.clip is None:
        return "unclipped"
    return "symmetric" if config.region.symmetric else "clip"


def _device(name: str) -> torch.device:
    """The device asked for, if there is one; the first GPU for `auto`, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except Exception as error:  # each backend has an error of its own for "not here"
        reason = str(error).splitlines()[0]
        raise InputError(f"device: {name!r} cannot be used ({reason}); cpu always can") from error
    return device


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _step(agent: Agent, region: Region, many: bool, compiled: bool) -> Step:
    """One step of Adam: on the whole objective, or on the critic alone; of all agents together, or
    of one alone where they learn one after the other."""
    loss: Loss
    axis = 1 if many and isinstance(region, Proximal) else None
    if isinstance(region, Sequential):
        agent, region = agent.alone(), region.region
    if isinstance(region, Constraint):
        loss, norm = region.critic.objective, region.critic.max_grad_norm
        agent = agent.alone()  # a stack of critics is fitted one by one
        if dense_critic.fits(agent, region.critic.objective) and not compiled:
            return dense_critic.DenseCriticStep(agent, max_grad_norm=norm)
    else:
        assert isinstance(region, Proximal)
        loss, norm = region.objective, region.max_grad_norm
        if dense.fits(agent, region.objective) and not compiled:
            return dense.make_dense_step(agent, region.objective, max_grad_norm=norm)
    return make_step(agent, loss, group_axis=axis, max_grad_norm=norm, compiled=compiled)


def _compile(config: Config, agent: Agent, region: Region, device: torch.device) -> bool:
    """Whether torch should compile the step: not where our own loops take it, not for sequences
    (unrolled, they compile for minutes), not for CNNs, which are bound by arithmetic, and not where
    every minibatch has another shape."""
    ragged = isinstance(agent.network, Choosing)
    if ragged and config.compile == "on":
        raise InputError("compile: a network of items has no fixed shapes; leave it at auto")
    if config.compile != "auto":
        return config.compile == "on"
    if isinstance(region, Sequential):
        agent, region = agent.alone(), region.region
    own = (
        dense_critic.fits(agent, region.critic.objective)
        if isinstance(region, Constraint)
        else dense.fits(agent, region.objective)
    )
    if own or ragged or agent.memory or _sees_pixels(agent):
        return False
    minibatches = -(-config.batch // config.region.minibatch)
    steps = config.iterations * config.region.epochs * minibatches
    able = device.type == "cuda" or shutil.which("c++") or shutil.which("g++")
    return bool(able) and steps >= COMPILE_PAYS


def _sees_pixels(agent: Agent) -> bool:
    return any(isinstance(part, CNN) for part in agent.network.modules())
