"""A trained policy at the table: played as the baselines are, on any maps."""

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import Array
from keel.apps.land.baselines import Baseline
from keel.apps.land.games import Games
from keel.apps.land.rules import Rules, make_rules
from keel.apps.land.vector import observe
from keel.config import options
from keel.errors import InputError
from keel.keys import MASK
from keel.models.acting import make_actor
from keel.models.sampling import draw_noise, mode, sample
from keel.training.policy import Policy


def rules_of(policy: Policy) -> Rules:
    """The variant of the game that a run was trained on."""
    if policy.config.env != "land":
        raise InputError(f"{policy.path}: was trained on {policy.config.env}, not on land")
    return make_rules(**{k: v for k, v in options(policy.config).items() if k != "maps"})


def learned(policy: Policy, *, deterministic: bool = True) -> Baseline:
    """The policy as a function from games to actions `[E, A]`: its likeliest, or drawn."""
    act, dist = make_actor(policy.agent, policy.params), policy.agent.dist

    def choose(games: Games, rng: np.random.Generator) -> Array:
        obs = observe(games)
        seen = obs if policy.normaliser is None else policy.normaliser.apply(obs)
        output = np.zeros((games.count, games.rules.agents, dist.outputs), np.float32)
        act(seen, output)
        if deterministic:
            return mode(dist, output, obs[MASK])
        noise = draw_noise(dist, output.shape[:2], rng)
        return sample(dist, output, obs[MASK], 1.0, noise)

    return choose
