"""Hierarchical exploration: which temperature the bandit takes, and that nothing else moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from keel.config import check, from_dict
from keel.controllers.bandit import FORGET, TemperatureLadder
from keel.controllers.controllers import Outcome
from keel.errors import InputError
from keel.training.session import train
from keel.types import HyperParams


def temperatures(ladder: TemperatureLadder, returns: list[float]) -> list[float]:
    """The temperature wanted after each update."""
    state, hparams, wanted = ladder.init(), HyperParams(learning_rate=1e-3), []
    for value in returns:
        state, hparams = ladder(state, Outcome(kl=0.0, return_mean=value), hparams)
        wanted.append(hparams.temperature)
    return wanted


def test_every_rung_is_tried_from_the_coolest() -> None:
    wanted = temperatures(TemperatureLadder(interval=2, magnitude=4.0), [0.0] * 6)
    assert wanted == [1.0, 2.0, 2.0, 4.0, 4.0, 1.0]


def test_the_bound_decides_by_hand() -> None:
    """Blocks of one update, returns 1, 3, 2. Weights 0.81, 0.9, 1 sum to 2.71, log 2.71 = 0.997;
    means 1, 3, 2, range 2: 1 + 2·1.109 = 3.22, 3 + 2·1.052 = 5.10, 2 + 2·0.998 = 4.00."""
    ladder = TemperatureLadder(interval=1, magnitude=4.0)
    assert FORGET == 0.9
    assert temperatures(ladder, [1.0, 3.0, 2.0])[-1] == 2.0
    assert temperatures(ladder, [3.0, 1.0, 2.0])[-1] == 1.0
    assert temperatures(ladder, [1.0, 2.0, 3.0])[-1] == 4.0


def test_a_block_counts_by_the_mean_of_its_returns() -> None:
    """Blocks of two updates: 1 and 3, then 8 and none, then 1 and 1. Means 2, 8, 1, of which those
    before fade by 0.9 each time: weights 0.81, 0.9, 1."""
    ladder = TemperatureLadder(interval=2, magnitude=4.0)
    state, hparams = ladder.init(), HyperParams()
    for value in (1.0, 3.0, 8.0, math.nan, 1.0, 1.0):
        state, hparams = ladder(state, Outcome(kl=0.0, return_mean=value), hparams)
    weights = [state[f"weight{rung}"] for rung in range(3)]
    totals = [state[f"total{rung}"] for rung in range(3)]
    assert weights == pytest.approx([0.81, 0.9, 1.0])
    assert totals == pytest.approx([0.81 * 2.0, 0.9 * 8.0, 1.0])
    assert (state["since"], state["sum"], state["count"]) == (0.0, 0.0, 0.0)


def test_a_rung_whose_best_is_long_ago_is_judged_by_its_mean() -> None:
    """Of returns 10, 9 and 0 the first two go on: after 10 again, weights 1.729, 0.81 and 0.9 have
    means 10, 9, 0: 10 + 10·√(log 3.439/1.729) = 18.5, 9 + 10·√(1.235/0.81) = 21.3, 11.7."""
    ladder = TemperatureLadder(interval=1, magnitude=4.0)
    assert temperatures(ladder, [10.0, 9.0, 0.0, 10.0])[-2:] == [1.0, 2.0]


def test_a_rung_that_was_forgotten_is_tried_again() -> None:
    """The best rung is taken again and again, and the weights of the others fade."""
    ladder = TemperatureLadder(interval=1, magnitude=4.0)
    best = {1.0: 1.0, 2.0: 0.0, 4.0: 0.5}
    state, hparams, wanted = ladder.init(), HyperParams(learning_rate=1e-3), []
    for _ in range(60):
        outcome = Outcome(kl=0.0, return_mean=best[hparams.temperature])
        state, hparams = ladder(state, outcome, hparams)
        wanted.append(hparams.temperature)
    assert wanted.count(1.0) > 30
    assert {2.0, 4.0} <= set(wanted[30:])


def test_a_block_without_a_finished_episode_goes_on() -> None:
    wanted = temperatures(TemperatureLadder(interval=2, magnitude=4.0), [math.nan] * 4 + [1.0])
    assert wanted == [1.0] * 4 + [2.0]


def settings(**explore: Any) -> dict[str, Any]:
    return {
        "env": "CartPole-v1",
        "total_steps": 2_048,
        "rollout_steps": 64,
        "envs": {"num": 4, "backend": "sync"},
        "region": {"minibatch": 128, "max_kl": 0.02},
        "explore": {"pulse_interval": 1, **explore},
    }


def test_a_ladder_of_one_temperature_changes_no_bit() -> None:
    final = []
    for explore in ({}, {"hierarchical": True, "pulse_magnitude": 1.0}):
        *_, last = train(from_dict(settings(**explore)))
        final.append(last)
    assert torch.equal(final[0].state.opt_state.params, final[1].state.opt_state.params)
    assert final[0].session.source.returns == final[1].session.source.returns


def test_the_gate_passes_and_the_bound_holds_while_the_temperature_moves() -> None:
    """Before any step the replayed log-probs are those that sampled, at every temperature."""
    config = from_dict(settings(hierarchical=True, pulse_magnitude=3.0))
    assert config.region.gate
    steps = list(train(config))
    assert all(step.metrics["train/kl_exact"] <= 0.02 for step in steps)
    assert max(step.metrics["train/temperature"] for step in steps) > 1.5
    assert max(step.metrics["train/kl_temperature"] for step in steps) <= 0.01


def test_pulses_and_the_ladder_are_not_for_one_run() -> None:
    with pytest.raises(InputError, match=r"explore\.hierarchical: .* --explore\.no-pulses"):
        check(from_dict(settings(hierarchical=True, pulses=True)))
