"""Distributions from outside: `network.distribution`, a callable `(action_space)` that returns one.

What it returns is a `keel.distributions.actions.Dist`. It is tried on zeros before anything learns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from keel.distributions.actions import Dist
from keel.errors import InputError

ROWS = 3
NEEDED = (
    *("outputs", "log_stds", "exact", "exact_entropy", "params", "log_prob", "entropy", "kl"),
    *("compare", "fisher", "noise", "sample", "mode", "to_env", "from_env", "constants"),
)
ZERO = 1e-5
"""Largest KL of a distribution from itself: rounding."""


def build_own_distribution(make: Callable[[Any], Any], action: Space[Any]) -> Dist:
    """Make a distribution from outside, and try it.

    Args:
        make: what `network.distribution` names.
        action: action space.

    Raises:
        InputError: in one line, where it is none that Keel can learn with.
    """
    name = f"network.distribution {getattr(make, '__qualname__', type(make).__qualname__)}"
    if not callable(make):
        raise InputError(f"{name}: expected a callable (action_space)")
    dist: Dist = make(action)
    missing = [part for part in NEEDED if not hasattr(dist, part)]
    if missing:
        raise InputError(f"{name}: {type(dist).__name__} has no {', '.join(missing)}")
    try:
        output = torch.zeros(ROWS, dist.outputs)
        params = dist.params(output, None, 1.0)
        noise = dist.noise((ROWS,), np.random.default_rng(0))
        drawn = dist.sample(output.numpy(), None, 1.0, noise)
        numbers = {
            "log_prob": dist.log_prob(params, torch.from_numpy(np.asarray(drawn))),
            "entropy": dist.entropy(params),
            "kl": dist.kl(params, params),
        }
        likeliest = np.shape(dist.mode(output.numpy(), None))
        dist.from_env(dist.to_env(drawn))
    except Exception as error:  # whatever the code of a distribution raises
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name}: failed on zeros: {type(error).__name__}: {reason}") from error
    for part, x in numbers.items():
        if not isinstance(x, Tensor) or list(x.shape) != [ROWS]:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name}: {part}: expected {[ROWS]} for {ROWS} rows, got {got}")
        if not bool(x.isfinite().all()):
            raise InputError(f"{name}: {part}: is not finite where the network gives zeros")
    if likeliest != np.shape(drawn):
        expected = f"expected {list(np.shape(drawn))}, as sample gives"
        raise InputError(f"{name}: mode: {expected}, got {list(likeliest)}")
    if bool((numbers["kl"].abs() > ZERO).any()):
        raise InputError(f"{name}: kl: of a distribution from itself is not 0")
    return dist
