"""Recording of demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from keel.config import Config
from keel.envs import Envs, make_envs
from keel.errors import InputError, KeelError
from keel.experience.acting import ActionSelector, initial_hidden_state
from keel.experience.demo_files import Demos
from keel.training.policy import Policy, make_for

Array = NDArray[Any]
Act = Callable[[dict[str, Array], bool], Array]
"""Function from observations `[1, …]`, as `keel.envs` gives them, and whether an episode begins
with them, to an action for `step`, `[1]` or `[1, D]`."""
Step = tuple[dict[str, Array], Array, float, bool, bool]
"""Observation, action, reward, terminated, truncated."""
MOST_STEPS = 1_000_000
"""Steps after which an episode that does not end is an error."""


def record_policy(
    policy: Policy,
    episodes: int,
    *,
    env: str | None = None,
    deterministic: bool = False,
    seed: int = 0,
) -> Demos:
    """Record episodes of a trained policy.

    Args:
        policy: The policy.
        episodes: Number of whole episodes.
        env: Another environment of the same spaces, such as one with other rewards.
        deterministic: Take the likeliest actions instead of sampling.
        seed: Seed of the environment and of the sampled actions.
    """
    agent = policy.agent
    select = ActionSelector(agent, policy.params, policy.normalizer)
    rng = None if deterministic else np.random.default_rng(seed)
    hidden_state: dict[str, Array] = {}

    def act(obs: dict[str, Array], first: bool) -> Array:
        nonlocal hidden_state
        before = initial_hidden_state(agent, 1) if first else hidden_state
        action, hidden_state = select(obs, (1,), before, np.array([first]), rng)
        return action

    env_name = env or policy.config.env
    envs = make_for(policy, 1, seed, env)
    demos = _record(envs, act, episodes, seed, env_name)
    return dataclasses.replace(demos, source=f"{policy.path.parent.name} at step {policy.step:,}")


def record_function(
    env: str, function: Callable[[Any], Any], episodes: int, *, seed: int = 0, source: str = ""
) -> Demos:
    """Record episodes of a function from an observation (array or dictionary) to an action.

    Args:
        env: Name of the environment.
        function: The policy.
        episodes: Number of whole episodes.
        seed: Seed of the environment.
        source: Description of the function, stored with the demonstrations.
    """
    config = Config(env=env)
    envs = make_envs(env, 1, backend=config.envs.backend, seed=seed)
    plain = "obs" in envs.reset(seed)

    def act(obs: dict[str, Array], first: bool) -> Array:
        inputs = obs["obs"][0] if plain else {key: x[0] for key, x in obs.items()}
        action = np.asarray(function(inputs))
        expected = tuple(envs.action_space.shape or ())
        if action.shape != expected:
            raise InputError(
                f"{source or 'the function'}: expected an action of shape {list(expected)}, "
                f"got {list(action.shape)}"
            )
        return action[None]

    return dataclasses.replace(_record(envs, act, episodes, seed, env), source=source)


def _record(envs: Envs, act: Act, episodes: int, seed: int, env: str) -> Demos:
    if episodes < 1:
        raise InputError(f"episodes: expected at least 1, got {episodes}")
    rows: list[Step] = []
    lengths: list[int] = []
    try:
        for steps in _episodes(envs, act, seed):
            rows += steps
            lengths.append(len(steps))
            if len(lengths) == episodes:
                break
    finally:
        envs.close()
    obs, action, reward, terminated, truncated = zip(*rows, strict=True)
    return Demos(
        env=env,
        obs={key: np.stack([x[key] for x in obs]) for key in obs[0]},
        action=np.stack(action),
        reward=np.array(reward, np.float32),
        terminated=np.array(terminated, bool),
        truncated=np.array(truncated, bool),
        lengths=tuple(lengths),
    )


def _episodes(envs: Envs, act: Act, seed: int) -> Iterator[list[Step]]:
    """Yield the steps of each episode."""
    obs, first = envs.reset(seed), True
    steps: list[Step] = []
    space = envs.action_space
    while len(steps) < MOST_STEPS:
        action = act(obs, first)
        if isinstance(space, spaces.Box):  # what a Gaussian draws beyond its bounds is never done
            action = np.clip(action, space.low, space.high)
        step = envs.step(action)
        first = bool(step.ignored[0])
        if not step.ignored[0]:
            row = {key: x[0].copy() for key, x in obs.items()}
            ended, cut = bool(step.terminated[0]), bool(step.truncated[0])
            steps.append((row, action[0], float(step.reward[0]), ended, cut and not ended))
            if ended or cut:
                first = envs.autoreset == "same_step"
                yield steps
                steps = []
        obs = step.obs
    raise KeelError(f"an episode did not end within {MOST_STEPS:,} steps")
