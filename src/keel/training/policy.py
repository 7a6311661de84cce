"""Policies of runs: open and evaluate them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from keel.config import Config, from_dict, to_dict
from keel.distributions.actions import Array
from keel.envs import Envs, ObsNormalizer, RewardNormalizer
from keel.envs.space_data import Interface, describe_space, describe_spaces
from keel.envs.translate import Translator
from keel.errors import InputError, KeelError
from keel.experience.acting import ActionSelector, initial_hidden_state
from keel.networks.agent import Agent
from keel.registry import is_object
from keel.tracking.directory import CHECKPOINTS, find_run
from keel.tracking.record import read_config
from keel.training.checkpoint import Checkpoint, check_same, check_shapes, load
from keel.training.environments import EVALUATION_ENVS, INTERFACE, make_run_envs
from keel.training.evaluation import Score, evaluate, longest_episode
from keel.training.kinds import ENVIRONMENTS, kind_of
from keel.training.loop import arrays
from keel.training.session import agent_for, use_threads
from keel.trust import ENVIRONMENT, NETWORK, require_trust
from keel.types import FIRST_ENCODING, MASK


@dataclass(frozen=True)
class Policy:
    """A network, its parameters at one checkpoint, and the normalization of observations."""

    agent: Agent
    params: Tensor
    """`[G, P]`, on the CPU"""
    normalizer: ObsNormalizer | None
    config: Config
    step: int
    """of the checkpoint"""
    path: Path
    """the run: the folder of its seed"""
    interface: Interface
    """spaces, agents and masks of the environment it was trained in"""
    reward_scale: float = 1.0
    """what rewards were divided by in training"""
    trust_code: bool = False
    """whether code that the run's file names may be imported"""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    """draws actions, unless `act` is given another one"""

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        """Space of one observation, as `keel.envs` lays it out."""
        return self.interface.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        """Space of one action, as `keel.envs` lays it out."""
        return self.interface.action_space

    @property
    def masked(self) -> bool:
        """Whether the environment says which actions are legal."""
        return self.interface.masked

    def act(
        self,
        obs: Any,
        state: Mapping[str, Array] | None = None,
        deterministic: bool = True,
        *,
        mask: Any = None,
        episode_starts: Any = None,
        rng: np.random.Generator | None = None,
    ) -> tuple[Any, dict[str, Array] | None]:
        """Return actions for one or many observations, and the state to act with next.

        Observations are normalized as in training, actions come in the environment's units: scaled,
        clipped to its bounds, in its shapes and dtypes. One observation gives one action, a batch
        of N with a leading axis gives N. Of several agents, observations by name (as PettingZoo
        gives them) give actions by name, arrays `[A, …]` or `[N, A, …]` give arrays.

        Only recurrent policies have a state; it is None for all others. Pass the one that came with
        the last action, and None when an episode begins; in a batch where only some episodes begin
        anew, say which by `episode_starts`.

        Args:
            obs: as the environment gives it.
            state: the second result of the last call; None begins all episodes.
            deterministic: take the likeliest action in place of a sample.
            mask: the legal actions, where the environment gives them beside the observation.
            episode_starts: `[N]` bool, which rows begin an episode; by default none, or all
                without a state.
            rng: draws samples; by default `rng` of the policy, which `keel.load(seed=…)` seeds.

        Examples:
            >>> import tempfile
            >>> import gymnasium, keel
            >>> env = gymnasium.make("CartPole-v1")
            >>> with tempfile.TemporaryDirectory() as runs:
            ...     run = keel.train("CartPole-v1", runs=runs, total_steps=512, rollout_steps=256)
            ...     policy = keel.load(run.path)
            >>> obs, _ = env.reset(seed=0)
            >>> action, state = policy.act(obs)
            >>> env.action_space.contains(action), state
            (True, None)
        """
        rows = self._translator.read(obs, mask)
        count = rows.lead[0]
        hidden_state = dict(state or initial_hidden_state(self.agent, count))
        held = {key: len(x) for key, x in hidden_state.items() if len(x) != count}
        if held or set(hidden_state) != set(self.agent.hidden_state_sizes):
            raise InputError(
                f"state: is not that of {count} observations of this policy; pass what the last "
                "act returned, or None where episodes begin"
            )
        starts = np.full(count, state is None)
        if episode_starts is not None:
            said = np.asarray(episode_starts, bool).reshape(-1)
            if len(said) != count:
                raise InputError(f"episode_starts: expected {count}, got {len(said)}")
            starts |= said
        drawn_by = None if deterministic else rng or self.rng
        action, hidden_state = self._select(rows.obs, rows.lead, hidden_state, starts, drawn_by)
        return self._translator.write(action, rows), hidden_state or None

    @cached_property
    def _translator(self) -> Translator:
        return Translator(self.interface)

    @cached_property
    def _select(self) -> ActionSelector:
        return ActionSelector(self.agent, self.params, self.normalizer)


def open_policy(
    path: Path, checkpoint: str | int | None = None, *, trust_code: bool = False, seed: int = 0
) -> Policy:
    """Open the policy of a run at a checkpoint: "best", "last" or a step.

    By default the best one, or the last where no evaluation has marked a best. The environment is
    neither made nor imported: the checkpoint says what is observed and what can be done. Only one
    from before checkpoints did so needs it.

    Args:
        path: the folder of the run, or that of one of its checkpoints.
        checkpoint: "best", "last", a step, or None.
        trust_code: let environments be made by code that the run's file names.
        seed: of the actions that are sampled.
    """
    path, checkpoint = locate(path, checkpoint)
    data = read_config(path)
    if kind_of(data.get("env")) is not ENVIRONMENTS:
        raise InputError(
            f"{path}: holds a language model, not a policy of an environment; "
            "AutoModelForCausalLM.from_pretrained reads the folder of a checkpoint, and `keel "
            "evaluate` judges it"
        )
    config = from_dict(data)
    loaded = load_checkpoint(path, checkpoint)
    interface = _interface(config, loaded, path, trust_code)
    require_trust(to_dict(config), path, trust_code, fields=NETWORK)
    agent = agent_for(config, interface, 0, interface.encoding)
    expected = agent.named(agent.initial)
    check_shapes(f"{loaded.path}: its weights and {config.env}", loaded.weights, expected)
    normalizer = None
    if config.envs.normalize_obs:
        space, encoding = interface.observation_space, interface.encoding
        empty = ObsNormalizer.for_space(space, encoding=encoding)
        normalizer = empty.restore(arrays(loaded.tensors, "obs_normalizer/"))
    return Policy(
        agent=agent,
        params=loaded.tensors["opt_state/params"],
        normalizer=normalizer,
        config=config,
        step=loaded.step,
        path=path,
        interface=interface,
        reward_scale=_reward_scale(config, loaded, len(interface.agents)),
        trust_code=trust_code,
        rng=np.random.default_rng(seed),
    )


def _interface(config: Config, checkpoint: Checkpoint, path: Path, trust_code: bool) -> Interface:
    """Return the interface that the checkpoint holds; for an older one, ask the environment."""
    if INTERFACE in checkpoint.data:
        return Interface.from_data(checkpoint.data[INTERFACE])
    require_trust(to_dict(config), path, trust_code, fields=ENVIRONMENT)
    envs = make_run_envs(config, 1)
    try:
        interface = Interface.of(envs, masked=MASK in envs.reset(0), encoding=FIRST_ENCODING)
    finally:
        envs.close()
    check_same("the spaces", checkpoint.data["spaces"], describe_spaces(interface))
    return interface


def _reward_scale(config: Config, checkpoint: Checkpoint, agents: int) -> float:
    if not config.envs.normalize_reward:
        return 1.0
    rows = (config.envs.num, agents) if agents else (config.envs.num,)
    empty = RewardNormalizer.for_envs(rows, config.advantage.gamma)
    restored = empty.restore(arrays(checkpoint.tensors, "reward_normalizer/"))
    return float(np.sqrt(restored.moments.variance + restored.epsilon))


def evaluate_policy(
    policy: Policy,
    *,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int = 0,
    max_episode_steps: int = 0,
    env: str | None = None,
) -> Score:
    """Play `episodes` whole episodes in new environments; depends on policy and seed alone.

    Args:
        policy: as `open_policy` returns it.
        episodes: number of episodes.
        deterministic: take the mode in place of a sample.
        seed: of environments and actions.
        max_episode_steps: where an episode that does not end is cut; 0: as the run evaluated.
        env: another environment than the run's own, named by the user.
    """
    if episodes < 1:
        raise InputError(f"episodes: expected at least 1, got {episodes}")
    if max_episode_steps < 0:
        raise InputError(f"max_episode_steps: expected 0 or more, got {max_episode_steps}")
    check_seed(seed)
    envs = make_for(policy, min(episodes, EVALUATION_ENVS), seed, env)
    if env is not None:  # its own time limit holds
        policy = replace(policy, config=replace(policy.config, env=env))
    try:
        return run_episodes(policy, envs, episodes, deterministic, seed, max_episode_steps)
    finally:
        envs.close()


def run_episodes(
    policy: Policy,
    envs: Envs,
    episodes: int,
    deterministic: bool,
    seed: int,
    max_episode_steps: int = 0,
) -> Score:
    """Play `episodes` whole episodes in the given environments."""
    score = evaluate(
        policy.agent,
        policy.params,
        envs,
        policy.normalizer,
        episodes=episodes,
        deterministic=deterministic,
        seed=seed,
        max_episode_steps=max_episode_steps or longest_episode(policy.config),
    )
    if not score.returns or not all(map(math.isfinite, score.returns)):
        raise KeelError(f"{policy.config.env}: no episode ended with a finite return")
    return score


def locate(path: Path, checkpoint: str | int | None = None) -> tuple[Path, str | int | None]:
    """Return the folder of a run's seed, and which checkpoint is meant.

    Args:
        path: a run, the folder above it if that has one seed, or the folder of a checkpoint.
        checkpoint: "best", "last", a step or None.
    """
    folder = path.resolve()
    if checkpoint is None and folder.parent.name == CHECKPOINTS:
        return find_run(folder.parent.parent), folder.name
    return find_run(path), checkpoint


def load_checkpoint(path: Path, checkpoint: str | int | None) -> Checkpoint:
    """Load "best", "last" or a step; by default the best, or the last where none is marked."""
    if checkpoint is None:
        best = (path / CHECKPOINTS / "best.json").is_file()
        return load(path, "best") if best else load(path)
    if checkpoint == "best":
        return load(path, "best")
    if checkpoint == "last":
        return load(path, "last")
    if not re.fullmatch(r"\d+", str(checkpoint)):
        raise InputError(f"checkpoint: expected best, last or a step, got {checkpoint!r}")
    return load(path, int(checkpoint))


def check_seed(seed: int) -> None:
    """Raise unless environments can be seeded with it."""
    if seed < 0:
        raise InputError(f"seed: expected 0 or more, got {seed}")


def make_for(policy: Policy, num: int, seed: int = 0, env: str | None = None) -> Envs:
    """Make environments for a policy, if their code is trusted and their spaces are the policy's.

    torch gets as many threads as in training.

    Args:
        policy: what will act in them.
        num: how many.
        seed: of those that are seeded when they are made.
        env: another environment than the run's own, named by the user.
    """
    config = policy.config
    if env is not None:
        own = replace(config.envs, backend="auto" if is_object(env) else config.envs.backend)
        config = replace(config, env=env, envs=own)
    check_trusted(policy, typed=() if env is None else (env,))
    use_threads(policy.config, policy.agent)
    envs = make_run_envs(config, num, seed)
    check_spaces(policy, envs, config.env)
    return envs


def check_spaces(policy: Policy, envs: Envs, env: str) -> None:
    """Close environments and raise unless their spaces are those that a policy was trained with.

    Args:
        policy: what is to act.
        envs: where.
        env: their name, for the error.
    """
    for name in ("observation_space", "action_space"):
        expected, actual = (describe_space(getattr(x, name)) for x in (policy, envs))
        if expected != actual:
            envs.close()
            raise InputError(
                f"{policy.path.parent}: was trained on {policy.config.env}, whose {name} is "
                f"{expected}; that of {env} is {actual}"
            )


def check_trusted(policy: Policy, typed: Collection[str] = ()) -> None:
    """Raise unless the environment of a run may be imported."""
    settings = to_dict(policy.config)
    require_trust(settings, policy.path, policy.trust_code, typed=typed, fields=ENVIRONMENT)
