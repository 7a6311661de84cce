"""State of an environment with several agents, for a centralised critic.

The environment's own `state()`: a vector, or an image. Without one, the observations of all agents
side by side; images are left out of that, since nothing says how they belong together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from keel.envs.faults import BadStepError, EnvError, EnvWarning
from keel.envs.spaces import Field, is_image, observation_layout

IMAGES = "critics see what their own agents see, and the vectors of the others"


class CentralState:
    """Reads the state of one environment after another; made with one that was reset.

    Some environments (PettingZoo's `multiwalker`) have no state as soon as an agent is gone: the
    last one they gave stands for it then, which a warning says once where the episode goes on.
    """

    def __init__(self, env: Any, observation: Mapping[str, Space[Any]], agents: int) -> None:
        self._agents, self._warned = agents, False
        first = _first_state(env)
        self._field = None if first is None else _field(env, first)
        self._keys = [key for key, space in observation.items() if not is_image(space)]
        self.space: spaces.Box | None = None
        if self._field is not None:
            assert isinstance(self._field.space, spaces.Box)
            self.space = self._field.space
            return
        if len(self._keys) < len(observation):
            warnings.warn(
                f"the environment has no state(), and images are not joined: {IMAGES}",
                EnvWarning,
                stacklevel=3,
            )
        size = agents * sum(int(np.prod(observation[key].shape or (1,))) for key in self._keys)
        if size:
            self.space = spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def read(
        self, env: Any, observations: Mapping[str, np.ndarray], last: np.ndarray
    ) -> np.ndarray:
        """Return the state now.

        Args:
            env: the environment.
            observations: what its agents observe, `[A, …]` by key.
            last: the state that it gave before.
        """
        if self._field is None:
            return np.concatenate([observations[key].reshape(-1) for key in self._keys])
        try:
            state = np.asarray(env.state())
        except EnvError:
            raise
        except Exception as error:
            if len(env.agents) == self._agents:
                raise
            if env.agents and not self._warned:
                self._warned = True
                warnings.warn(
                    f"state() raised {type(error).__name__} after an agent was gone: the last "
                    "state is repeated until the episode ends (--agents.critic own needs none)",
                    EnvWarning,
                    stacklevel=4,
                )
            return last
        if state.shape != self._field.raw_shape:
            raise BadStepError(
                f"state(): expected shape {list(self._field.raw_shape)}, got {list(state.shape)}"
            )
        return self._field.read(state, ())


def _first_state(env: Any) -> np.ndarray | None:
    """Return the state of an environment that was just reset, or None where it has none."""
    try:
        return np.asarray(env.state())
    except NotImplementedError:  # what PettingZoo's own base class says where there is none
        return None
    except Exception as error:  # `state` is something else there, or broken from the start
        warnings.warn(
            f"state() raised {type(error).__name__}: {error}; critics see the observations of all "
            "agents side by side",
            EnvWarning,
            stacklevel=4,
        )
        return None


def _field(env: Any, state: np.ndarray) -> Field:
    """Return the layout of `state`: an image as such, everything else as one vector of float32."""
    space = getattr(env, "state_space", None)
    if not isinstance(space, spaces.Box) or space.shape != state.shape:
        low, high = (0, 255) if state.dtype == np.uint8 else (-np.inf, np.inf)
        kind = np.uint8 if state.dtype == np.uint8 else np.float32
        space = spaces.Box(low, high, state.shape, kind)
    (field,) = observation_layout(space).fields
    if field.space is not None and is_image(field.space):
        return field
    flat = (int(state.size),)
    vector = spaces.Box(-np.inf, np.inf, flat, np.float32)
    numbers = np.dtype(np.float64)  # of any kind: what is given is cast
    return Field("state", state.shape, numbers, flat, np.dtype(np.float32), vector)
