"""What moves beside the parameters: as far as its share of the bound allows, and no farther."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from keel.config import from_dict
from keel.experience.rollout import Rollout
from keel.training.session import Session, open_session
from keel.training.shift import STATISTICS_SHARE, TEMPERATURE_SHARE, Shift, shift


@pytest.fixture(params=["Pendulum-v1", "CartPole-v1"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    envs = {"num": 4, "backend": "sync", "normalize_obs": True}
    made = open_session(from_dict({"env": request.param, "rollout_steps": 64, "envs": envs}))
    yield made
    made.source.close()


def moved(session: Session, wanted: float, bound: float) -> tuple[Shift, Rollout, torch.Tensor]:
    """A shift of a policy that is far from its beginning, and so feels what it sees."""
    source: Any = session.source
    params = 12.0 * session.agent.initial
    rollout = source.collector.collect(params, 1.0, source.obs_normalizer)
    found = shift(session.agent, params, rollout, source.obs_normalizer, wanted, bound)
    return found, rollout, params


def kl(session: Session, params: torch.Tensor, rollout: Rollout, found: Shift) -> float:
    """From what sampled to what was shifted, by torch.distributions."""
    rows, now = rollout.batch(), found.rollout.batch()
    with torch.no_grad():
        policy = session.agent.policy(params, now.obs, found.temperature)

    def distribution(tree: dict[str, torch.Tensor]) -> torch.distributions.Distribution:
        if "logits" in tree:
            return torch.distributions.Categorical(logits=tree["logits"].double())
        normal = torch.distributions.Normal(tree["mean"].double(), tree["log_std"].double().exp())
        return torch.distributions.Independent(normal, 1)

    old, new = distribution(rows.behavior), distribution(policy)
    each = torch.distributions.kl_divergence(old, new)
    return ((each * rows.weight).sum() / rows.weight.sum()).item()


def test_statistics_go_as_far_as_a_quarter_of_the_bound(session: Session) -> None:
    bound = 1e-3
    found, rollout, params = moved(session, 1.0, bound)
    assert found.changed
    assert found.normalizer is not None
    scaling, goal = found.normalizer.scaling["obs"], found.normalizer.settle().scaling["obs"]
    way = np.abs(scaling.inverse - 1.0) / np.abs(goal.inverse - 1.0)
    assert (way > 0.0).all()
    assert (way < 1.0).all()
    exact = kl(session, params, rollout, found)
    assert 0.5 * STATISTICS_SHARE * bound <= exact <= STATISTICS_SHARE * bound
    assert found.metrics["train/kl_normaliser"] == pytest.approx(exact, rel=1e-3)


def test_without_a_bound_everything_moves_at_once(session: Session) -> None:
    found, _, _ = moved(session, 3.0, math.inf)
    assert found.normalizer is not None
    for a, b in zip(
        found.normalizer.scaling["obs"], found.normalizer.settle().scaling["obs"], strict=True
    ):
        assert np.array_equal(a, b)
    assert found.temperature == 3.0


def test_a_temperature_goes_as_far_as_half_of_the_bound_together_with_them(
    session: Session,
) -> None:
    bound = 1e-3
    found, rollout, params = moved(session, 3.0, bound)
    assert 1.0 < found.temperature < 3.0
    exact = kl(session, params, rollout, found)
    assert STATISTICS_SHARE * bound < exact <= TEMPERATURE_SHARE * bound
    assert found.metrics["train/kl_temperature"] == pytest.approx(exact, rel=1e-3)


def test_nothing_moves_where_nothing_is_wanted() -> None:
    session = open_session(from_dict({"env": "CartPole-v1", "rollout_steps": 64}))
    source: Any = session.source
    try:
        rollout = source.collector.collect(session.agent.initial, 1.0, None)
        found = shift(session.agent, session.agent.initial, rollout, None, 1.0, 0.05)
    finally:
        source.close()
    assert found.rollout is rollout
    assert not found.changed
    assert set(found.metrics.values()) == {0.0}
