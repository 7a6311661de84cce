"""What developers and the critic see."""

from __future__ import annotations

import numpy as np
import pytest
from land_toys import build, flat, wishes

from keel.apps.land.baselines import greedy_roi, random_legal
from keel.apps.land.games import Games
from keel.apps.land.observations import (
    OWN,
    PARCEL,
    PRIVATE,
    Observation,
    marginal_npv,
    observe,
    state_names,
)
from keel.apps.land.rules import FULL, SMALL, Rules, legacy_rules, make_rules

S, M, L = range(3)


def own(observation: Observation, agent: int, name: str) -> float:
    return float(observation.own[0, agent, OWN.index(name)])


def parcel(observation: Observation, agent: int, where: int, name: str) -> float:
    return float(observation.parcels[0, agent, where, PARCEL.index(name)])


def test_every_feature_has_one_name() -> None:
    assert len(set(OWN)) == len(OWN) == 26
    assert len(set(PARCEL)) == len(PARCEL) == 30
    for agents, size in ((2, 53), (3, 74), (4, 95)):
        names = state_names(make_rules(agents=agents))
        assert len(set(names)) == len(names) == size


@pytest.mark.parametrize("rules", [FULL, SMALL, make_rules(agents=4), legacy_rules(500.0)])
def test_all_that_is_seen_is_finite_and_of_size_one(rules: Rules) -> None:
    games, rng = Games(rules, 16), np.random.default_rng(0)
    games.begin(np.arange(16), np.arange(16))
    for month in range(rules.months):
        observation = observe(games)
        for x in observation[:3]:
            assert x.dtype == np.float32
            assert np.isfinite(x).all()
            assert np.abs(x).max() < 8.0
        np.testing.assert_array_equal(observation.mask, games.mask)
        games.step((random_legal if month % 2 else greedy_roi)(games, rng))
    assert np.isfinite(observe(games).parcels).all()  # also when nothing is left to be decided


def test_own_features_of_a_small_story() -> None:
    """Industry builds an S, then an L: of full demand 2600 it has 180, and 520 coming in three."""
    games = flat(FULL, first=1)
    games.step(wishes(games, industry=build(0, S)))
    games.step(wishes(games, industry=build(9, L)))
    observation = observe(games)
    cash = 15_000.0 - 1500.0 + 55.0 - 3000.0
    assert own(observation, 0, "cash") == pytest.approx(cash / 10_000.0)
    assert own(observation, 0, "money with credit") == pytest.approx((cash + 3000.0) / 10_000.0)
    assert own(observation, 0, "debt of credit") == 0.0
    assert own(observation, 0, "bankrupt") == 0.0
    assert own(observation, 0, "operating of full demand") == pytest.approx(180.0 / 2600.0)
    assert own(observation, 0, "operating of all demand") == pytest.approx(180.0 / 4200.0)
    assert own(observation, 0, "operating and coming of full demand") == pytest.approx(
        700.0 / 2600.0
    )
    coming = [own(observation, 0, f"coming in {k}") for k in (1, 2, 3)]
    assert coming == pytest.approx([0.0, 0.0, 520.0 / 2600.0])
    assert [own(observation, 0, f"buildings {size}") for size in "SML"] == [1 / 8, 0.0, 1 / 8]
    assert own(observation, 0, "profit a month") == pytest.approx(0.055)
    assert [own(observation, k, "priority") for k in range(3)] == [
        1.0,
        0.5,
        0.0,
    ]  # (2 + 1) mod 3 is first
    assert [own(observation, k, "month") for k in range(3)] == pytest.approx([2 / 30] * 3)
    assert [own(observation, 1, name) for name in OWN[-4:]] == [0.0, 1.0, 0.0, 0.0]
    assert [own(observation, 0, f"legal {size}") for size in "SML"] == pytest.approx([46 / 48] * 3)
    best = marginal_npv(games)[0, 0].max(0) / 1000.0
    assert [own(observation, 0, f"best worth {size}") for size in "SML"] == pytest.approx(best)


def test_debt_is_seen_against_the_line_and_cut() -> None:
    games = flat(FULL)
    games.state.cash[0] = [-1500.0, -50_000.0, 2000.0]
    observation = observe(games)
    assert [own(observation, k, "debt of credit") for k in range(3)] == [0.5, 3.0, 0.0]
    assert own(observation, 1, "money with credit") == 0.0
    assert parcel(observation, 1, 0, "cost S of money") == 3.0
    assert parcel(observation, 2, 0, "cost S of money") == pytest.approx(1100.0 / 5000.0)


def test_the_best_of_nothing_is_zero_and_the_best_of_bad_is_bad() -> None:
    games = flat(FULL)
    arrays, data = games.save()
    arrays["state/month"][:] = 29
    arrays["state/bankrupt"][0, 1] = True
    games.load(arrays, data)
    observation = observe(games)
    assert own(observation, 0, "best worth S") < 0.0
    assert [own(observation, 1, f"{what} S") for what in ("best worth", "legal")] == [0.0, 0.0]


def test_parcels_look_different_to_different_eyes() -> None:
    games = flat(FULL)
    games.step(wishes(games, education=build(3, L)))
    observation = observe(games)
    assert [parcel(observation, k, 3, "own") for k in range(3)] == [0.0, 1.0, 0.0]
    assert [parcel(observation, k, 3, "of education") for k in range(3)] == [1.0, 0.0, 1.0]
    for agent in range(3):
        assert [parcel(observation, agent, 3, x) for x in ("free", "S", "M", "L")] == [
            0.0,
            0.0,
            0.0,
            1.0,
        ]
        assert parcel(observation, agent, 3, "operates") == 0.0
        assert parcel(observation, agent, 3, "months left") == 0.75
        assert parcel(observation, agent, 3, "worth L") == 0.0
        assert parcel(observation, agent, 4, "free") == 1.0
        assert parcel(observation, agent, 4, "price") == 0.5
        assert parcel(observation, agent, 4, "zone") == 0.5
        assert parcel(observation, agent, 4, "level") == 1.0
    assert parcel(observation, 0, 4, "cost M of money") == pytest.approx(2100.0 / 18_000.0)
    value = marginal_npv(games)
    assert parcel(observation, 2, 4, "worth L") == pytest.approx(value[0, 2, 4, L] / 1000.0)
    assert parcel(observation, 2, 4, "worth L of cost") == pytest.approx(value[0, 2, 4, L] / 2400.0)


def test_offers_agree_with_the_mask() -> None:
    games, rng = Games(FULL, 8), np.random.default_rng(1)
    games.begin(np.arange(8), np.arange(8))
    for _ in range(20):
        games.step(random_legal(games, rng))
        observation = observe(games)
        at = PARCEL.index("legal S")
        legal = observation.parcels[..., at : at + 3].reshape(8, 3, -1)
        np.testing.assert_array_equal(legal, observation.mask[..., :-1])


def test_what_was_seen_stays_as_it_was() -> None:
    games = flat(FULL, count=2)
    games.step(np.tile(wishes(games, industry=build(0, S)), (2, 1)))
    observation = observe(games)
    copies = [x.copy() for x in observation]
    games.begin([0], [3])
    games.step(np.full((2, 3), FULL.wait))
    for before, now in zip(copies, observation, strict=True):
        np.testing.assert_array_equal(before, now)


def test_the_critic_sees_everyone_and_the_land() -> None:
    games = flat(FULL)
    games.step(wishes(games, industry=build(0, S), council=build(1, M)))
    observation, names = observe(games), state_names(FULL)
    private = len(PRIVATE)
    for agent in range(3):
        part = observation.state[0, agent * private : (agent + 1) * private]
        np.testing.assert_array_equal(part, observation.own[0, agent, :private])
    land = dict(zip(names, observation.state[0].tolist(), strict=True))
    assert land["month"] == pytest.approx(1 / 30)
    assert land["free level 5"] == pytest.approx(46 / 48)
    assert (land["free level 3"], land["price level 3"]) == (0.0, 0.0)
    assert land["price level 5"] == pytest.approx(0.5)
    dirt = games.state.pollution[0, 2:].mean()
    assert land["pollution"] == pytest.approx(dirt, rel=1e-5)
    assert dirt > 0.0


def test_mean_prices_are_of_what_is_free() -> None:
    games = Games(FULL, 1)
    games.begin([0], [17])
    games.step(wishes(games, industry=int(games.mask[0, 0].argmax())))
    free, level = games.state.owner[0] == -1, games.world.level[0]
    observation = dict(zip(state_names(FULL), observe(games).state[0].tolist(), strict=True))
    for at in (3, 4, 5):
        these = free & (level == at)
        assert observation[f"free level {at}"] == pytest.approx(these.sum() / 48)
        price = games.land_prices()[0, these].mean() / 1000.0
        assert observation[f"price level {at}"] == pytest.approx(price, rel=1e-5)
