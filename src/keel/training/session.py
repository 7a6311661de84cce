"""The machinery of a run: environments, agent, region, the optimizer step, random streams."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from threadpoolctl import threadpool_limits

from keel.algorithms import dense, dense_critic
from keel.algorithms.happo import HAPPO
from keel.algorithms.optimizer import Loss, Step, make_step, without_adam
from keel.algorithms.ppo import PPO
from keel.algorithms.trpo import TRPO
from keel.config import Config, options
from keel.controllers.controllers import (
    Controller,
)
from keel.envs import AtariOptions, Envs, ObsNormalizer, RewardNormalizer, lead, make_envs
from keel.envs.registered import source_of
from keel.envs.space_data import Interface
from keel.envs.spaces import reserved_key
from keel.errors import InputError
from keel.experience.acting import make_actor
from keel.experience.collector import Collector
from keel.experience.demos import DemoDataset, open_demo_dataset
from keel.experience.faults import learner
from keel.experience.targets import check_groups, group_function
from keel.keys import ENCODING, GROUP
from keel.networks.actor_critic import CNN
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.networks.devices import find_device
from keel.networks.multi_input import spaces_of
from keel.networks.pointer import PointerActorCritic
from keel.parallel import set_threads
from keel.resources import cores, expect_memory, keep_memory
from keel.training.builder import build_controllers, build_region, initial_hparams
from keel.training.seeding import Seeds, derive_seeds
from keel.training.state import TrainState
from keel.trust_region.certify import Certified, Region

COMPILE_PAYS = 12_000
"""Optimizer steps from which compiling (about 20 s, cold) has earned itself back."""

SMALLEST_IMAGE = 64
"""Numbers that the convolutions leave of the smallest image they take."""


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
    learner: Agent
    """as the update has it: the agent, unless a fault is asked for"""
    demo_dataset: DemoDataset | None = None
    """demonstrations, if there are any"""
    encoding: int = ENCODING
    """how observations become numbers"""


def open_session(config: Config, encoding: int = ENCODING) -> Session:
    """Make everything ready, and say what was chosen.

    Args:
        config: of the run.
        encoding: how observations become numbers, for a run that an older Keel began.
    """
    seeds, device = derive_seeds(config.seed), find_device(config.device)
    group_function(config.advantage)  # whether there is one, before anything is made
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
        _check_group_key(config, envs)
        _expect_memory(config, envs)
        _expect_network(config, envs)
        torch.set_num_threads(1)  # initial weights must not depend on how many threads there are
        agent = agent_for(config, envs, seeds.network, encoding)
        pixels = _sees_pixels(agent)
        threads = use_threads(config, agent)
        agent.to(device)
        if device.type == "cuda":  # a mantissa of 10 bits: replaying would differ from acting
            torch.backends.cudnn.allow_tf32 = False
        region = build_region(config)
        compiled = _compile(config, agent, region.region, device)
        learns = learner(agent, config.faults)
        step = _step(learns, region.region, bool(envs.agents), compiled)
        if config.faults.plain_descent:
            step = without_adam(step)
        collector = Collector(
            envs,
            agent,
            config.rollout_steps,
            envs.reset(seeds.envs),
            np.random.default_rng(seeds.actions),
            epsilon=config.faults.epsilon_greedy,
        )
        check_groups(config.advantage, collector.obs, bool(envs.agents))
        collector.begin(collector.obs)
        demo_dataset = None
        if config.demos.path:
            demo_dataset = open_demo_dataset(config.demos, envs, agent, collector.obs)
        make_actor(agent, agent.initial)  # loads the libraries it needs, whose threads are set now
        if pixels:
            keep_memory()
        threadpool_limits(1, user_api="blas")  # numpy's and numba's: their matrices are small
    except BaseException:
        envs.close()
        raise
    choices: dict[str, object] = {
        "backend": envs.backend,
        "source": source_of(config.env, envs.backend),
        "compile": compiled,
        "threads": threads,
        "device": str(device),
    }
    if pixels:
        choices["observation"] = spaces_of(envs.observation_space, encoding).describe()
    if demo_dataset is not None:
        choices["demos"] = demo_dataset.fingerprint
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
        learner=learns,
        demo_dataset=demo_dataset,
        encoding=encoding,
    )


def agent_for(config: Config, envs: Envs | Interface, seed: int, encoding: int = ENCODING) -> Agent:
    """The agent, or the agents, for these environments."""
    return build_agent(
        envs.observation_space,
        envs.action_space,
        config.network,
        seed,
        config.critic,
        envs.agents,
        config.agents,
        encoding,
    )


def atari_options(config: Config) -> AtariOptions:
    """How the environments show their games; their rewards stay raw, the loop clips them."""
    return AtariOptions(**dataclasses.asdict(config.atari))


def _check_group_key(config: Config, envs: Envs) -> None:
    """Refuse to take a part of the observation for the groups that an environment's info names."""
    space, advantage = envs.observation_space, config.advantage
    from_info = advantage.normalize == "group" and not advantage.group
    if from_info and isinstance(space, spaces.Dict) and GROUP in space.spaces:
        raise InputError(f"advantage.normalize group: {reserved_key(GROUP)}")


def _expect_memory(config: Config, envs: Envs) -> None:
    """A rollout is kept as it was seen; a normalized one as it came and as it will be, too."""
    numbers = sum(
        math.prod(part.shape or ()) * (part.dtype or np.dtype("f4")).itemsize
        for part in _parts(envs)
    )
    row = (numbers * (3 if config.envs.normalize_obs else 1) + 128) * max(1, len(envs.agents))
    expect_memory(
        f"a rollout of {config.rollout_steps} steps × {config.envs.num} environments",
        row * config.batch,
        "use a smaller rollout_steps or envs.num",
    )


def _parts(envs: Envs) -> list[spaces.Space[Any]]:
    """Return the spaces that an observation consists of."""
    space = envs.observation_space
    return list(space.values()) if isinstance(space, spaces.Dict) else [space]


def _expect_network(config: Config, envs: Envs) -> None:
    """Refuse widths whose parameters this machine cannot hold, before any is made.

    What is counted is the least that every kind of network has: the hidden layers of actor and
    critic, with a gradient and Adam's two moments of each parameter.
    """
    network, critic = config.network, config.critic
    hidden = network.hidden
    layers = sum(math.prod(pair) for pair in itertools.pairwise(hidden)) + sum(hidden)
    outputs = {"quantile": critic.quantiles, "scalar": 1}.get(critic.kind, critic.atoms)
    numbers = 2 * layers + hidden[-1] * outputs
    if network.recurrent != "none":
        numbers += 3 * network.recurrent_size * (network.recurrent_size + 1)
    if network.kind == "decoupled":
        numbers += network.features * hidden[-1]
    elif any(len(part.shape or ()) == 3 for part in _parts(envs)):
        numbers += network.features * SMALLEST_IMAGE
    expect_memory(
        f"network: layers of {' × '.join(f'{width:,}' for width in hidden)}",
        4 * 4 * numbers,
        "use smaller widths (network.hidden, features, memory_size, critic.quantiles, atoms)",
    )


def initial_state(session: Session) -> TrainState:
    """Before the first iteration."""
    config, envs = session.config, session.envs
    return TrainState(
        steps=0,
        iteration=0,
        opt_state=session.region.init(session.agent),
        hparams=initial_hparams(config),
        controllers=tuple(controller.init() for controller in session.controllers),
        obs_normalizer=(
            ObsNormalizer.for_space(envs.observation_space, encoding=session.encoding)
            if config.envs.normalize_obs
            else None
        ),
        reward_normalizer=(
            RewardNormalizer.for_envs(lead(envs), config.advantage.gamma)
            if config.envs.normalize_reward
            else None
        ),
    )


def _step(agent: Agent, region: Region, many: bool, compiled: bool) -> Step:
    """One step of Adam: on the whole objective, or on the critic alone; of all agents together, or
    of one alone where they learn one after the other."""
    loss: Loss
    axis = 1 if many and isinstance(region, PPO) else None
    if isinstance(region, HAPPO):
        agent, region = agent.alone(), region.region
    if isinstance(region, TRPO):
        loss, norm = region.critic.objective, region.critic.max_grad_norm
        agent = agent.alone()  # a stack of critics is fitted one by one
        if dense_critic.fits(agent, region.critic.objective) and not compiled:
            return dense_critic.DenseCriticStep(agent, max_grad_norm=norm)
    else:
        assert isinstance(region, PPO)
        loss, norm = region.objective, region.max_grad_norm
        if dense.fits(agent, region.objective) and not compiled:
            return dense.make_dense_step(agent, region.objective, max_grad_norm=norm)
    return make_step(agent, loss, group_axis=axis, max_grad_norm=norm, compiled=compiled)


def _compile(config: Config, agent: Agent, region: Region, device: torch.device) -> bool:
    """Whether torch should compile the step: not where our own loops take it, not for sequences
    (unrolled, they compile for minutes), not for CNNs, which are bound by arithmetic, and not where
    every minibatch has another shape."""
    ragged = isinstance(agent.network, PointerActorCritic)
    if ragged and config.compile == "on":
        raise InputError("compile: a network of items has no fixed shapes; leave it at auto")
    if config.compile != "auto":
        return config.compile == "on"
    if isinstance(region, HAPPO):
        agent, region = agent.alone(), region.region
    own = (
        dense_critic.fits(agent, region.critic.objective)
        if isinstance(region, TRPO)
        else dense.fits(agent, region.objective)
    )
    if own or ragged or agent.recurrent or _sees_pixels(agent):
        return False
    minibatches = -(-config.batch // config.region.minibatch)
    steps = config.iterations * config.region.epochs * minibatches
    able = device.type == "cuda" or shutil.which("c++") or shutil.which("g++")
    return bool(able) and steps >= COMPILE_PAYS


def use_threads(config: Config, agent: Agent) -> int:
    """Give torch as many threads as the config asks for, and return how many.

    Small matrices are slower on more than one, so `threads: 0` means all cores for CNNs alone.
    """
    threads = config.threads or (cores() if _sees_pixels(agent) else 1)
    set_threads(threads)
    return threads


def _sees_pixels(agent: Agent) -> bool:
    return any(isinstance(part, CNN) for part in agent.network.modules())
