"""Distributional critics find a return distribution that is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keel.config import from_dict
from keel.networks import popart
from keel.networks.critics import Histogram, Quantile
from keel.training.session import train

from .arms import draw, seen, true_quantiles

SETTINGS = {
    "env": "TwoArms-v0",
    "total_steps": 400_000,
    "rollout_steps": 128,
    "envs": {"num": 16},
    "network": {"hidden": [32, 32]},
    "advantage": {"gamma": 1.0, "lam": 1.0},
    "region": {"learning_rate": 5e-3, "minibatch": 512, "max_kl": 0.005, "max_grad_norm": 5.0},
    "explore": {"entropy_coef": 0.05},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "critic",
    [
        {"kind": "quantile"},
        {"kind": "quantile", "ordered": True},
        {"kind": "hl_gauss"},
        {"kind": "two_hot"},
    ],
    ids=lambda critic: "-".join(map(str, critic.values())),
)
def test_the_distribution_of_both_arms_is_found(critic: dict[str, object]) -> None:
    """Wasserstein-1 within 5 % of the scale; every quantile within 3 points of its level."""
    *_, last = train(from_dict({**SETTINGS, "critic": critic}))
    agent, params = last.session.agent, last.state.opt_state.params
    assert isinstance(agent.critic, Quantile | Histogram)
    rng = np.random.default_rng(0)
    fine = (np.arange(3200) + 0.5) / 3200
    for arm in (0, 1):
        raw = agent.raw_value(params, {"obs": torch.from_numpy(seen(1 + arm))[None]})
        levels = agent.critic.levels(raw).numpy()
        predicted = popart.in_reward(params, agent.critic.quantiles(raw))[0].numpy()
        samples = draw(arm, 200_000, rng)
        curve = np.interp(fine, levels, np.sort(predicted))
        distance = np.abs(curve - true_quantiles(arm, fine)).mean()
        assert distance <= 0.05 * samples.std()
        shares = np.array([(samples < q).mean() for q in predicted])
        assert np.abs(shares - levels).max() <= 0.03
        assert agent.value_of(params, raw).item() == pytest.approx(1.5, abs=0.1)
    assert last.metrics["train/coverage_80"] == pytest.approx(0.8, abs=0.05)
