"""Seeds of environments, derived from one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def env_seeds(seed: int | Sequence[int], num_envs: int) -> list[int]:
    """Derive N seeds in [0, 2³¹) by `np.random.SeedSequence(seed)`.

    Neighbouring seeds give unrelated streams, and environment i keeps its seed when N grows.

    Args:
        seed: one seed, or several as one.
        num_envs: N.

    Examples:
        >>> env_seeds(0, 2) == env_seeds(0, 3)[:2]
        True
    """
    states = np.random.SeedSequence(seed).generate_state(num_envs, np.uint32)
    return [int(state) >> 1 for state in states]
