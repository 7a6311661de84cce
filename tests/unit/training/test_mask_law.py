"""The mask law of whole iterations: a row of weight 0 may hold anything, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.config import Config, from_dict
from keel.experience.rollout import Rollout
from keel.networks.recurrent import EPISODE_STARTS
from keel.training.environments import EnvironmentSource
from keel.training.loop import TrainState, iterate
from keel.training.session import initial_state, open_session
from keel.types import MASK

AUTORESET: dict[str, Any] = {"env": "CartPole-v1"}
"""Poles fall about every twenty steps; the row after a fall only resets."""
DEAD_AGENTS: dict[str, Any] = {
    "env": "parallel_toys:Countdown",
    "advantage": {"normalize": "group"},
}
"""`short` is dead for three of five steps, and both rest in the row that resets."""
VARIANTS: dict[str, dict[str, Any]] = {
    "autoreset rows": AUTORESET,
    "autoreset rows, normalized": AUTORESET
    | {"envs": {"normalize_obs": True, "normalize_reward": True}},
    "autoreset rows, advantages of every epoch": AUTORESET | {"advantage": {"recompute": True}},
    "autoreset rows, samples of the return": AUTORESET | {"critic": {"kind": "quantile"}},
    "autoreset rows, trpo": AUTORESET | {"algo": "trpo"},
    "dead agents": DEAD_AGENTS,
    "dead agents of one network": DEAD_AGENTS | {"agents": {"sharing": "all"}},
    "dead agents, one after the other": DEAD_AGENTS | {"agents": {"order": "sequential"}},
}


TOYS = Path(__file__).resolve().parents[1] / "envs"


def small(changes: dict[str, Any]) -> Config:
    base = from_dict(
        {
            "total_steps": 2048,
            "rollout_steps": 64,
            "compile": "off",
            "envs": {"num": 4},
            "network": {"hidden": [8]},
            "region": {"minibatch": 48, "epochs": 2, "learning_rate": 3e-3},
        }
    )
    return from_dict(changes, base)


def unread(rollout: Rollout) -> Tensor:
    """Rows whose observation is read by nobody: of weight 0, and not the last of a cut episode."""
    cut = torch.cat([torch.zeros_like(rollout.truncated[:1]), rollout.truncated[:-1]])
    return (rollout.weight == 0) & ~cut


def filled(x: Any, rows: Tensor, junk: float) -> Any:
    """`x` `[T, N, …]` with junk in some rows; whole numbers are left as they are."""
    given = torch.as_tensor(x)
    if not given.is_floating_point():
        return x
    rows = rows.reshape(*rows.shape, *[1] * (given.ndim - rows.ndim))
    put = torch.where(rows, torch.tensor(junk, dtype=given.dtype), given)
    return put.numpy() if isinstance(x, np.ndarray) else put


def poisoned(rollout: Rollout, junk: float) -> Rollout:
    """The same rollout with junk wherever a row does not count."""
    raw, value = rollout.raw_obs, rollout.value
    dead, free = rollout.weight == 0, unread(rollout)
    known = {MASK, EPISODE_STARTS}
    obs = {k: x if k in known else filled(x, free, junk) for k, x in rollout.obs.items()}
    return replace(
        rollout,
        obs=obs,
        reward=filled(rollout.reward, dead, junk),
        log_prob=filled(rollout.log_prob, dead, junk),
        behavior={k: filled(x, dead, junk) for k, x in rollout.behavior.items()},
        raw_reward=filled(rollout.raw_reward, dead, junk),
        value=None if value is None else filled(value, dead, junk),
        raw_obs=raw and raw._replace(rows={k: filled(x, free, junk) for k, x in raw.rows.items()}),
    )


class Poisoner:
    """A collector between the environments and the loop."""

    def __init__(self, source: EnvironmentSource, change: Callable[[Rollout], Rollout]) -> None:
        self.collector, self.change, self.dead = source.collector, change, 0

    def collect(self, *given: Any) -> Rollout:
        rollout = self.collector.collect(*given)
        self.dead += int((rollout.weight == 0).sum())
        return self.change(rollout)


def two_iterations(
    config: Config, change: Callable[[Rollout], Rollout]
) -> tuple[TrainState, list[dict[str, float]], int]:
    """Train twice on what `change` makes of the rollouts; the state, the metrics, the dead rows."""
    session = open_session(config)
    source: Any = session.source
    try:
        poisoner = source.collector = Poisoner(source, change)
        state, metrics = initial_state(session), []
        for _ in range(2):
            state, _, told = iterate(session, state)
            metrics.append({k: x for k, x in told.items() if not k.startswith("time/")})
        return state, metrics, poisoner.dead
    finally:
        source.close()


@pytest.mark.parametrize("junk", [math.nan, 1e30], ids=["NaN", "huge"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_rows_of_weight_0_hold_changes_no_parameter_and_no_metric(
    name: str, junk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOYS)
    config = small(VARIANTS[name])
    clean, metrics, dead = two_iterations(config, lambda rollout: rollout)
    other, poisoned_metrics, _ = two_iterations(config, lambda x: poisoned(x, junk))
    assert dead > 5
    assert torch.equal(clean.opt_state.params, other.opt_state.params)
    assert (clean.opt_state.params != 0).any()
    np.testing.assert_equal(poisoned_metrics, metrics)
