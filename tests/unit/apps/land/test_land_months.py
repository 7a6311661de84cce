"""The months of a game, each rule with numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from land_toys import build, flat, wishes

from keel.apps.land import kernels
from keel.apps.land.games import Games
from keel.apps.land.rules import COUNCIL, FULL, INDUSTRY, Rules, legacy_rules, make_rules
from keel.errors import InputError

S, M, L = range(3)
GAMMA = 1.0 / 1.008
ALONE = replace(FULL, externalities=False)


def test_one_building_to_the_last_cent() -> None:
    """An industrial S on land of 500 + 100 in a game of four months.

    It costs 900 + 600 = 1500, operates from the second month on and earns 180 − 100 − 25 = 55 in
    three of them; at the end it has three of 240 months behind it and is worth
    0.7 · 900 · (1 − 3/240) = 622.125, its land 500.
    """
    games = flat(replace(ALONE, months=4))
    months = [games.step(wishes(games, industry=build(0, S)))]
    months += [games.step(wishes(games)) for _ in range(3)]
    assert [month.flow[0, 0] for month in months] == [-1500.0, 55.0, 55.0, 55.0]
    assert [month.terminal_value[0, 0] for month in months] == [0.0, 0.0, 0.0, 1122.125]
    assert [month.done[0] for month in months] == [False, False, False, True]
    assert games.state.cash[0, 0] == 15_000.0 - 1500.0 + 165.0
    returned = 1000.0 * sum(GAMMA**k * month.reward[0, 0] for k, month in enumerate(months))
    by_hand = -1500.0 + 55.0 * (GAMMA + GAMMA**2 + GAMMA**3) + 1122.125 * GAMMA**4
    assert returned == pytest.approx(by_hand, abs=1e-9)
    assert returned == pytest.approx(-250.68, abs=0.01)


@pytest.mark.parametrize(("size", "delay", "earns"), [(S, 1, 55.0), (M, 2, 95.0), (L, 4, 150.0)])
def test_construction_takes_one_two_or_four_months(size: int, delay: int, earns: float) -> None:
    games = flat(ALONE)
    games.step(wishes(games, industry=build(5, size)))
    flows = [games.step(wishes(games)).flow[0, 0] for _ in range(6)]
    assert flows == [0.0] * (delay - 1) + [earns] * (7 - delay)


def test_a_building_begun_last_is_worth_its_residual_and_its_land() -> None:
    games = flat(replace(ALONE, months=1))
    month = games.step(wishes(games, council=build(2, L)))
    assert month.flow[0, 2] == -(1800.0 + 600.0)
    assert month.terminal_value[0, 2] == 0.7 * 1800.0 + 500.0


@pytest.mark.parametrize(
    ("capacity", "paid"),
    [
        (0.0, 0.0),
        (1000.0, 1000.0),
        (2600.0, 2600.0),
        (3000.0, 2800.0),
        (4200.0, 3400.0),
        (5200.0, 3500.0),
    ],
)
def test_demand_pays_in_three_parts(capacity: float, paid: float) -> None:
    """In full to 2600, half to 4200, a tenth beyond."""
    pays = kernels.demand_pays.py_func  # type: ignore[attr-defined]
    assert pays(capacity, INDUSTRY.demand, FULL.slopes) == pytest.approx(paid)


def test_saturated_demand_reaches_the_cash() -> None:
    """Six L of 520 are a capacity of 3120, which earns 2600 + 260, less 6 · 370."""
    games = flat(replace(ALONE, credit=1e6, interest=0.0))
    for parcel in range(6):
        games.step(wishes(games, industry=build(parcel, L)))
    for _ in range(4):
        month = games.step(wishes(games))
    assert month.flow[0, 0] == pytest.approx(2860.0 - 6 * 370.0)


def test_interest_is_on_the_debt_with_which_a_month_began() -> None:
    poor = replace(INDUSTRY, cash=500.0)
    games = flat(replace(ALONE, trades=(poor, COUNCIL)))
    assert games.step(wishes(games, industry=build(0, S))).flow[0, 0] == -1500.0
    assert games.state.cash[0, 0] == -1000.0
    assert games.step(wishes(games)).flow[0, 0] == pytest.approx(55.0 - 12.0)
    assert games.step(wishes(games)).flow[0, 0] == pytest.approx(55.0 - 0.012 * 957.0)


@pytest.mark.parametrize(("cash", "legal"), [(-1500.0, True), (-1500.01, False)])
def test_the_credit_line_is_hard(cash: float, legal: bool) -> None:
    """A building of 1500 takes a developer to the line of −3000, and not a cent beyond."""
    games = flat(replace(ALONE, trades=(replace(INDUSTRY, cash=cash), COUNCIL)))
    assert games.mask[0, 0, build(0, S)] == legal
    month = games.step(wishes(games, industry=build(0, S)))
    assert (month.refused[0, 0], month.begun[0, 0] == build(0, S)) == (not legal, legal)


def test_the_bankrupt_can_only_wait_but_their_buildings_go_on() -> None:
    """At the line, interest of 36 is more than nothing earned: the next month begins below it."""
    games = flat(replace(ALONE, trades=(replace(INDUSTRY, cash=0.0), COUNCIL)))
    games.step(wishes(games, industry=build(0, L)))  # 3000: at the line, and four months to build
    assert not games.state.bankrupt.any()
    games.step(wishes(games))
    assert games.state.cash[0, 0] == -3036.0
    assert games.state.bankrupt.tolist() == [[True, False]]
    assert games.mask[0, 0].nonzero()[0].tolist() == [games.rules.wait]
    games.state.cash[0, 0] = 1e6
    month = games.step(wishes(games, industry=build(1, S)))
    assert month.refused[0, 0]
    assert games.state.owner[0, 1] == -1
    assert games.mask[0, 0].nonzero()[0].tolist() == [games.rules.wait]  # rich again, but out
    games.step(wishes(games))
    assert games.step(wishes(games)).flow[0, 0] == 150.0


def test_levels_gate_sizes() -> None:
    games = Games(FULL, 1)
    games.begin([0], [3])
    for parcel, level in enumerate(games.world.level[0]):
        legal = games.mask[0, 0, 3 * parcel : 3 * parcel + 3].tolist()
        assert legal == [level >= 3, level >= 4, level >= 5]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_conflicts_go_to_whose_turn_it_is_and_losing_costs_nothing(first: int) -> None:
    games = flat(ALONE, first=first)
    for month in range(4):
        wish = build(7 + month, S)
        found = games.step(np.full((1, 3), wish))
        winner = (first + month) % 3
        assert found.begun[0].tolist() == [wish if k == winner else 144 for k in range(3)]
        assert found.conflict[0].tolist() == [k != winner for k in range(3)]
        assert not found.refused.any()
        losers = [k for k in range(3) if k != winner]
        assert (found.flow[0, losers] > -100.0).all()
    assert games.state.cash[0].min() > 6_000.0


def test_who_is_first_depends_on_the_seed() -> None:
    games = Games(FULL, 30)
    games.begin(np.arange(30), np.arange(30))
    parcel = games.mask[:, 0].argmax(-1)
    month = games.step(np.repeat(parcel[:, None], 3, 1))
    assert ((month.begun != 144).sum(-1) == 1).all()
    assert (month.begun != 144).any(0).all()


@pytest.mark.parametrize(("mill", "school"), [(9, 11), (11, 9), (11, 27)])
def test_pollution_is_felt_two_parcels_away_from_the_month_after(mill: int, school: int) -> None:
    """120 · (1 − 0.12 · exp(−2 / 1.2)) = 117.28, less 75 to run; whichever parcel comes first."""
    games = flat(FULL)
    games.step(wishes(games, industry=build(mill, L), education=build(school, S)))
    flows = [games.step(wishes(games)).flow[0, 1] for _ in range(5)]
    dirty = 120.0 * (1.0 - 0.12 * math.exp(-2.0 / 1.2)) - 75.0
    assert flows == pytest.approx([45.0, 45.0, 45.0, dirty, dirty])
    assert dirty == pytest.approx(42.28, abs=0.01)


def test_pollution_leaves_a_least_income() -> None:
    foul = replace(INDUSTRY, pollutes=(5.0, 5.0, 5.0))
    games = flat(replace(FULL, trades=(foul, FULL.trades[1])))
    games.step(wishes(games, industry=build(0, S), education=build(1, S)))
    assert games.step(wishes(games)).flow[0, 1] == pytest.approx(0.4 * 120.0 - 75.0)


def test_prestige_raises_the_price_next_door() -> None:
    """500 · (1 + 0.11 · exp(−1 / 1.2)) = 523.9 once the town hall stands, and 500 until then."""
    games = flat(FULL)
    games.step(wishes(games, council=build(20, L)))
    for _ in range(3):
        assert games.land_prices()[0, 21] == 500.0
        games.step(wishes(games))
    dear = 500.0 * (1.0 + 0.11 * math.exp(-1.0 / 1.2))
    assert games.land_prices()[0, 21] == pytest.approx(dear)
    assert dear == pytest.approx(523.90, abs=0.01)
    assert games.land_prices()[0, 20] == 500.0
    paid = games.step(wishes(games, industry=build(21, S))).flow[0, 0]
    assert paid == pytest.approx(-(900.0 + dear + 100.0))


def test_welfare_mixes_in_the_mean() -> None:
    """One pays 1500, the others nothing: the mean of three is −500."""
    for share, expected in ((0.0, [-1.5, 0.0, 0.0]), (0.3, [-1.2, -0.15, -0.15])):
        games = flat(replace(ALONE, welfare=share))
        month = games.step(wishes(games, industry=build(0, S)))
        assert month.reward[0] == pytest.approx(expected)
    games = flat(replace(ALONE, welfare=1.0))
    month = games.step(wishes(games, industry=build(0, S)))
    assert month.reward[0] == pytest.approx([-0.5] * 3)


def cheap_or_dear(rules: Rules, price: float, zone: float) -> Games:
    games = flat(rules)
    games.world.price[:] = price
    games.world.zone[:] = zone
    return games


def test_the_legacy_reward_pays_for_size() -> None:
    """Industry: 12 · 55 − 900 − 1300 < −1500, so an S on the dearest land paid −1500 + 5; an L on
    the cheapest 12 · 150 − 2400 − 110 + 3700 = 2990, + 15; waiting nothing, for ever."""
    rules = replace(legacy_rules(3000.0), reward_clip=False)
    dear = cheap_or_dear(rules, 1100.0, 200.0)
    month = dear.step(wishes(dear, industry=build(0, S)))
    assert month.reward[0] * 3000.0 == pytest.approx([-1495.0, 0.0, 0.0])
    for _ in range(4):
        assert not dear.step(wishes(dear)).reward.any()
    cheap = cheap_or_dear(rules, 110.0, 0.0)
    month = cheap.step(wishes(cheap, industry=build(0, L)))
    assert month.reward[0] * 3000.0 == pytest.approx([3005.0, 0.0, 0.0])


@pytest.mark.parametrize("scale", [500.0, 2_000.0, 3_000.0])
def test_the_legacy_reward_is_scaled_and_clipped(scale: float) -> None:
    """An M on flat land: 12 · 95 − 2100 + 1500 = 540, + 10."""
    games = flat(legacy_rules(scale))
    month = games.step(wishes(games, industry=build(0, M)))
    assert month.reward[0, 0] == pytest.approx(min(1.0, 550.0 / scale))


def test_the_legacy_reward_punishes_debt() -> None:
    """From 600, an M of 2100 leaves a debt of 1500, half of the credit line: 250 of 500."""
    poor = replace(INDUSTRY, cash=600.0)
    games = flat(replace(legacy_rules(3000.0), trades=(poor, COUNCIL)))
    month = games.step(wishes(games, industry=build(0, M)))
    assert month.reward[0, 0] * 3000.0 == pytest.approx(550.0 - 250.0)


def test_the_legacy_reward_without_its_fault_counts_the_months_that_are_left() -> None:
    """Begun in the last of three months an S never operates; in the first it does for two."""
    for late, first, last in ((True, 12, 12), (False, 2, 0)):
        rules = make_rules(reward="legacy", months=3, late_build_npv=late)
        games = flat(rules)
        got = [games.step(wishes(games, industry=build(k, S))).reward[0, 0] for k in range(3)]
        counted = [55.0 * months - 1500.0 + 5.0 for months in (first, last)]
        assert [3000.0 * got[0], 3000.0 * got[2]] == pytest.approx(counted)


def test_late_build_npv_pays_twelve_months_that_never_come() -> None:
    """An S begun last: 660 − 1500 + (630 + 500) / 1.008 is a gain, the truth is without the 660."""
    kept = 1130.0 * GAMMA
    for late, expected in ((False, kept - 1500.0), (True, kept - 1500.0 + 660.0)):
        games = flat(replace(ALONE, months=1, late_build_npv=late))
        month = games.step(wishes(games, industry=build(0, S)))
        assert month.reward[0, 0] * 1000.0 == pytest.approx(expected)
        assert month.flow[0, 0] == -1500.0
        assert (expected > 0.0) == late


def test_late_build_npv_then_pays_nothing_more_but_interest() -> None:
    poor = replace(INDUSTRY, cash=500.0)
    games = flat(replace(ALONE, trades=(poor, COUNCIL), late_build_npv=True))
    games.step(wishes(games, industry=build(0, S)))
    month = games.step(wishes(games))
    assert month.reward[0, 0] * 1000.0 == pytest.approx(-12.0)
    assert month.flow[0, 0] == pytest.approx(43.0)


def test_reward_clip_cuts_at_one() -> None:
    games = flat(replace(ALONE, reward_clip=True))
    assert games.step(wishes(games, industry=build(0, S))).reward[0, 0] == -1.0
    assert games.step(wishes(games)).reward[0, 0] == pytest.approx(0.055)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (np.zeros((2, 3), int), r"action: expected shape \[1, 3\], got \[2, 3\]"),
        (np.full((1, 3), 145), "action: expected 0 to 144"),
        (np.full((1, 3), -1), "action: expected 0 to 144"),
    ],
)
def test_actions_that_do_not_exist(action: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Games(FULL, 1).step(action)


def test_a_game_that_is_over_must_be_begun_anew() -> None:
    games = flat(replace(FULL, months=1))
    assert games.step(wishes(games)).done.all()
    with pytest.raises(InputError, match="step: a game is over; begin it anew first"):
        games.step(wishes(games))
    games.begin([0], [5])
    assert games.state.cash[0].tolist() == [15_000.0, 10_000.0, 10_000.0]
    games.step(wishes(games))


def test_wrong_beginnings() -> None:
    with pytest.raises(InputError, match="count: expected at least 1 game, got 0"):
        Games(FULL, 0)
    games = Games(FULL, 2)
    with pytest.raises(InputError, match="seeds: expected 2, one for each game, got 1"):
        games.begin([0, 1], [4])
    with pytest.raises(InputError, match=r"games: expected numbers below 2, got \[2\]"):
        games.begin([2], [4])
