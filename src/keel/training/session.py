"""The machinery of a run: environments, agent, region, the optimizer step, random streams."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from threadpoolctl import threadpool_limits

from keel.config import Backend, Config, Faults, check
from keel.envs import Envs, lead
from keel.envs.names import source_of
from keel.envs.space_data import Interface
from keel.envs.spaces import reserved_key
from keel.errors import InputError
from keel.experience.acting import make_actor
from keel.experience.rollout import Collector
from keel.experience.targets import check_groups, group_function
from keel.networks.accelerate import Acceleration
from keel.networks.actor_critic import spaces_of
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.resources import cores, expect_memory, find_device, keep_memory, set_threads
from keel.training.builder import (
    acceleration,
    build_algorithm,
    build_controllers,
    build_step,
    initial_hparams,
    scheduled,
)
from keel.training.environments import EnvironmentSource, make_run_envs
from keel.training.loop import Iteration, Seeds, TrainState, derive_seeds, run
from keel.trust_region.certify import Algorithm
from keel.types import ENCODING, GROUP, HyperParams

if TYPE_CHECKING:
    from keel.controllers.controllers import Controller
    from keel.envs import ObsNormalizer, RewardNormalizer
    from keel.training.source import ExperienceSource

SMALLEST_IMAGE = 64
"""Numbers that the convolutions leave of the smallest image they take."""


@dataclass
class Session:
    """The machinery of a run: where experience comes from, and what learns from it."""

    config: Any
    """settings of this kind of run"""
    source: ExperienceSource
    algorithm: Algorithm
    controllers: tuple[Controller, ...]
    schedule: Callable[[HyperParams, int, Collection[str]], HyperParams]
    """values of an iteration, from those that controllers left, the steps so far, and the names of
    values that were set by hand"""
    initial_hparams: HyperParams
    shuffle: torch.Generator
    """of minibatches"""
    choices: dict[str, object]
    """what was decided automatically: backend, compile, threads, device"""
    changes: dict[str, float] = field(default_factory=dict)
    """hyperparameters to be set before the next iteration"""

    @property
    def agent(self) -> Agent:
        """The agent that acts."""
        return self.source.agent


def open_session(config: Config, encoding: int = ENCODING) -> Session:
    """Make everything ready, and say what was chosen.

    Args:
        config: of the run.
        encoding: how observations become numbers, for a run that an older Keel began.
    """
    seeds = derive_seeds(config.seed)
    find_device(config.device)
    group_function(config.advantage)  # whether there is one, before anything is made
    envs = make_run_envs(config, config.envs.num, seeds.envs)
    try:
        if envs.num_envs != config.envs.num:
            raise InputError(f"envs.num: is {config.envs.num}, {config.env} has {envs.num_envs}")
        return _open(config, envs, seeds, encoding)
    except BaseException:
        envs.close()
        raise


def planned_acceleration(config: Config) -> dict[str, str]:
    """Return what would compute a run, in words: one environment is made, and closed."""
    backend: Backend = "sync" if config.envs.backend == "async" else config.envs.backend
    envs = make_run_envs(replace(config, envs=replace(config.envs, backend=backend)), 1)
    try:
        agent, _ = _agent(config, envs, derive_seeds(config.seed), ENCODING)
    finally:
        envs.close()
    return acceleration(config, agent).texts()


def _open(config: Config, envs: Envs, seeds: Seeds, encoding: int) -> Session:
    agent, threads = _agent(config, envs, seeds, encoding)
    make_algorithm: Callable[[Agent], tuple[Algorithm, Acceleration]] = partial(
        _algorithm, config, agent
    )
    make_source: Callable[[], EnvironmentSource] = partial(
        _source, config, envs, agent, seeds, encoding
    )
    if config.faults != Faults():
        from keel.experiments.fault_injection import inject

        make_algorithm, make_source = inject(config.faults, make_algorithm, make_source)
    algorithm, fast = make_algorithm(agent)
    source = make_source()
    choices: dict[str, object] = {
        "backend": envs.backend,
        "source": source_of(config.env, envs.backend),
        "compile": fast.step.kind == "torch.compile",
        **fast.texts(),
        "threads": threads,
        "device": str(source.device),
    }
    if agent.sees_pixels:
        choices["observation"] = spaces_of(envs.observation_space, encoding).describe()
    if source.demo_dataset is not None:
        choices["demos"] = source.demo_dataset.fingerprint
    return Session(
        config=config,
        source=source,
        algorithm=algorithm,
        controllers=build_controllers(config),
        schedule=partial(scheduled, config=config),
        initial_hparams=initial_hparams(config),
        shuffle=source.shuffle,
        choices=choices,
    )


def _agent(config: Config, envs: Envs, seeds: Seeds, encoding: int) -> tuple[Agent, int]:
    """Return the agent on its device, and the number of torch's threads."""
    _check_group_key(config, envs)
    _expect_memory(config, envs)
    _expect_network(config, envs)
    device = find_device(config.device)
    torch.set_num_threads(1)  # initial weights must not depend on how many threads there are
    agent = agent_for(config, envs, seeds.network, encoding)
    threads = use_threads(config, agent)
    agent.to(device)
    if device.type == "cuda":  # a mantissa of 10 bits: replaying would differ from acting
        torch.backends.cudnn.allow_tf32 = False
    return agent, threads


def _algorithm(config: Config, agent: Agent, learner: Agent) -> tuple[Algorithm, Acceleration]:
    """Return the algorithm that improves `learner`, and what computes the run; `agent` acts."""
    fast = acceleration(config, agent, learner)
    return build_algorithm(config, learner, build_step(config, learner, fast.step.kind)), fast


def _source(
    config: Config, envs: Envs, agent: Agent, seeds: Seeds, encoding: int
) -> EnvironmentSource:
    """Return environments that stand at their first observations."""
    collector = Collector(
        envs,
        agent,
        config.rollout_steps,
        envs.reset(seeds.envs),
        np.random.default_rng(seeds.actions),
    )
    check_groups(config.advantage, collector.obs, bool(envs.agents))
    collector.begin(collector.obs)
    demo_dataset = None
    if config.demos.path:
        from keel.experience.demos import open_demo_dataset

        demo_dataset = open_demo_dataset(config.demos, envs, agent, collector.obs)
    make_actor(agent, agent.initial)  # loads the libraries it needs, whose threads are set now
    if agent.sees_pixels:
        keep_memory()
    threadpool_limits(1, user_api="blas")  # numpy's and numba's: their matrices are small
    return EnvironmentSource(
        config=config,
        seeds=seeds,
        envs=envs,
        agent=agent,
        collector=collector,
        shuffle=torch.Generator().manual_seed(seeds.shuffle),
        device=agent.initial.device,
        encoding=encoding,
        obs_normalizer=_obs_normalizer(config, envs, encoding),
        reward_normalizer=_reward_normalizer(config, envs),
        demo_dataset=demo_dataset,
    )


def _obs_normalizer(config: Config, envs: Envs, encoding: int) -> ObsNormalizer | None:
    if not config.envs.normalize_obs:
        return None
    from keel.envs import ObsNormalizer

    return ObsNormalizer.for_space(envs.observation_space, encoding=encoding)


def _reward_normalizer(config: Config, envs: Envs) -> RewardNormalizer | None:
    if not config.envs.normalize_reward:
        return None
    from keel.envs import RewardNormalizer

    return RewardNormalizer.for_envs(lead(envs), config.advantage.gamma)


def initial_state(session: Session) -> TrainState:
    """Return the state before the first iteration."""
    return TrainState(
        steps=0,
        iteration=0,
        opt_state=session.algorithm.init(),
        hparams=session.initial_hparams,
        controllers=tuple(controller.init() for controller in session.controllers),
    )


def train(config: Config) -> Generator[Iteration, None, TrainState]:
    """Train from scratch; environments are closed when the generator ends or is closed."""
    check(config)
    session = open_session(config)
    try:
        return (yield from run(session, initial_state(session)))
    finally:
        session.source.close()


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


def use_threads(config: Config, agent: Agent) -> int:
    """Give torch as many threads as the config asks for, and return how many.

    Small matrices are slower on more than one, so `threads: 0` means all cores for CNNs alone.
    """
    threads = config.threads or (cores() if agent.sees_pixels else 1)
    set_threads(threads)
    return threads
