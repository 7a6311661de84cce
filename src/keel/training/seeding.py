"""Independent seeds from one: changing how one part draws never shifts another's numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Seeds(NamedTuple):
    """A seed for each consumer of randomness."""

    envs: int
    network: int
    actions: int
    shuffle: int
    evaluation: int


def derive_seeds(seed: int) -> Seeds:
    """Derive five independent seeds from one, by numpy's SeedSequence."""
    states = np.random.SeedSequence(seed).generate_state(len(Seeds._fields), np.uint32)
    return Seeds(*(int(state) for state in states))
