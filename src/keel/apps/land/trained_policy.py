"""Trained policies as players, beside the baselines."""

from __future__ import annotations

import numpy as np

from keel.apps.land.arrays import Array
from keel.apps.land.baselines import Player
from keel.apps.land.games import Games
from keel.apps.land.rules import Rules, make_rules
from keel.apps.land.vector import observation_dict
from keel.config import options
from keel.errors import InputError
from keel.experience.acting import ActionSelector
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
    select = ActionSelector(policy.agent, policy.params, policy.normalizer)

    def choose(games: Games, rng: np.random.Generator) -> Array:
        lead, starts = (games.count, games.rules.agents), np.zeros(games.count, bool)
        return select(observation_dict(games), lead, {}, starts, None if deterministic else rng)[0]

    return choose
