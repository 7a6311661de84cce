"""Trained policies as players, beside the baselines."""

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import Array
from keel.apps.land.baselines import Player
from keel.apps.land.games import Games
from keel.apps.land.rules import Rules, make_rules
from keel.apps.land.vector import observation_dict
from keel.config import options
from keel.distributions.sampling import draw_noise, mode, sample
from keel.errors import InputError
from keel.experience.acting import make_actor
from keel.keys import MASK
from keel.training.policy import Policy


def rules_of(policy: Policy) -> Rules:
    """Return the variant of the game that a policy was trained on."""
    if policy.config.env != "land":
        raise InputError(f"{policy.path}: was trained on {policy.config.env}, not on land")
    return make_rules(**{k: v for k, v in options(policy.config).items() if k != "maps"})


def trained_player(policy: Policy, *, deterministic: bool = True) -> Player:
    """Return the policy as a function from games to actions `[E, A]`.

    Args:
        policy: Of a run on `land`.
        deterministic: Take the likeliest actions instead of sampling.
    """
    act, dist = make_actor(policy.agent, policy.params), policy.agent.dist

    def choose(games: Games, rng: np.random.Generator) -> Array:
        obs = observation_dict(games)
        normalized = obs if policy.normalizer is None else policy.normalizer.apply(obs)
        output = np.zeros((games.count, games.rules.agents, dist.outputs), np.float32)
        act(normalized, output)
        if deterministic:
            return mode(dist, output, obs[MASK])
        noise = draw_noise(dist, output.shape[:2], rng)
        return sample(dist, output, obs[MASK], 1.0, noise)

    return choose
