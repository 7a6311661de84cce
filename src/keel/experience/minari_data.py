"""Data sets of Minari (Farama's standard for offline data), as Keel lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np

from keel.envs.spaces import action_layout, observation_layout
from keel.errors import InputError, import_extra
from keel.experience.demo_files import Demos, check_whole


def from_minari(dataset: str, episodes: int | None = None) -> Demos:
    """Read the first `episodes`, or all, of a data set that is on this machine.

    Args:
        dataset: Id of the data set.
        episodes: Number of episodes to read, from the first on; None: all.
    """
    minari = import_extra("minari", "minari")
    try:
        data = minari.load_dataset(dataset)
    except (FileNotFoundError, ValueError, KeyError) as error:
        local = ", ".join(minari.list_local_datasets()) or "none"
        raise InputError(
            f"minari:{dataset}: not on this machine (there are: {local}); "
            f"`minari download {dataset}` fetches it"
        ) from error
    layout = observation_layout(data.observation_space)
    actions = action_layout(data.action_space)
    parts: list[dict[str, Any]] = []
    lengths: list[int] = []
    for episode in data.iterate_episodes():
        if episodes is not None and len(lengths) == episodes:
            break
        steps = len(episode.rewards)
        raw = _first(episode.observations, steps)
        action = np.asarray(_first(episode.actions, steps)).reshape(
            steps, *(actions.space.shape or ())
        )
        if actions.start is not None:
            action = action - actions.start
        ended = np.asarray(episode.terminations, bool)
        cut = np.asarray(episode.truncations, bool) & ~ended
        cut[-1] |= not ended[-1]  # a record that stops in the middle was cut off there
        parts.append(
            {
                **{f"obs/{key}": x for key, x in layout.read(raw, (steps,)).items()},
                "action": action,
                "reward": np.asarray(episode.rewards, np.float32),
                "terminated": ended,
                "truncated": cut,
            }
        )
        lengths.append(steps)
    if not parts:
        raise InputError(f"minari:{dataset}: empty, no episode in it")
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    spec = data.env_spec
    env = "" if spec is None else str(spec.id)
    demos = Demos.of(arrays, lengths, env=env, source=f"minari:{dataset}")
    check_whole(demos, demos.source)
    return demos


def _first(data: Any, steps: int) -> Any:
    """Return the first rows; observations have one more, after the last step."""
    if isinstance(data, dict):
        return {key: _first(x, steps) for key, x in data.items()}
    return np.asarray(data)[:steps]
