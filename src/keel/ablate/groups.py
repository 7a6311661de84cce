"""Groups of rows for `--advantage.group keel.ablate.groups:FUNCTION`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def by_environment(obs: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Make every parallel environment a group, `[T, N]`."""
    steps, envs = next(iter(obs.values())).shape[:2]
    return np.broadcast_to(np.arange(envs, dtype=np.int64), (steps, envs))
