"""What holds for every play on every map."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from land_toys import Event, audit

from keel.apps.land.arrays import World
from keel.apps.land.baselines import play_out, random_legal, wait
from keel.apps.land.games import Games
from keel.apps.land.observations import marginal_npv, observe
from keel.apps.land.report import net_present_value
from keel.apps.land.rules import FULL, SMALL, TRADES, Rules
from keel.errors import InputError

SEEDS = st.integers(0, 2**40)
MANY = settings(max_examples=25)


@st.composite
def some_rules(draw: st.DrawFn) -> Rules:
    """From rich to so poor that debt and bankruptcy are common."""
    trades = draw(st.permutations(list(TRADES.values())).flatmap(
        lambda order: st.integers(2, 4).map(lambda count: tuple(order[:count]))
    ))  # fmt: skip
    cash = draw(st.sampled_from([0.3, 1.0, 4.0]))
    base = draw(st.sampled_from([FULL, SMALL]))
    return replace(
        base,
        trades=tuple(replace(trade, cash=cash * trade.cash) for trade in trades),
        months=draw(st.sampled_from([7, 30])),
        credit=draw(st.sampled_from([0.0, 1_600.0, 6_000.0])),
        interest=draw(st.sampled_from([0.0, 0.012, 0.2])),
        rate=draw(st.sampled_from([0.0, 0.008, 0.05])),
        life=draw(st.sampled_from([10.0, 240.0])),
        externalities=draw(st.booleans()),
        welfare=draw(st.sampled_from([0.0, 0.4, 1.0])),
        scale=draw(st.sampled_from([1.0, 1_000.0])),
    )


def begun(rules: Rules, seeds: list[int]) -> Games:
    games = Games(rules, len(seeds))
    games.begin(np.arange(len(seeds)), seeds)
    return games


@MANY
@given(some_rules(), st.lists(SEEDS, min_size=1, max_size=3), st.integers(0, 99))
def test_the_return_is_the_net_present_value(rules: Rules, seeds: list[int], play: int) -> None:
    """Against an auditor who sees nothing but which building was begun when."""
    games, rng = begun(rules, seeds), np.random.default_rng(play)
    months = [games.step(random_legal(games, rng)) for _ in range(rules.months)]
    returned = sum(rules.gamma**k * month.reward for k, month in enumerate(months)) * rules.scale
    for game in range(len(seeds)):
        events = [
            Event(month, agent, int(wish) // 3, int(wish) % 3)
            for month, found in enumerate(months)
            for agent, wish in enumerate(found.begun[game])
            if wish != rules.wait
        ]
        npv = audit(rules, World(*(room[[game]] for room in games.world)), events)
        mixed = [(1.0 - rules.welfare) * own + rules.welfare * np.mean(npv) for own in npv]
        assert returned[game] == pytest.approx(mixed, abs=1e-6, rel=1e-9)
        assert net_present_value(months, rules)[game] == pytest.approx(npv, abs=1e-6, rel=1e-9)


@MANY
@given(some_rules(), SEEDS, st.integers(0, 99))
def test_cash_is_what_flowed(rules: Rules, seed: int, play: int) -> None:
    games, rng = begun(rules, [seed]), np.random.default_rng(play)
    flows = sum(games.step(random_legal(games, rng)).flow for _ in range(rules.months))
    start = [trade.cash for trade in rules.trades]
    assert games.state.cash[0] == pytest.approx(np.add(start, flows[0]), abs=1e-6)


@MANY
@given(some_rules(), SEEDS, st.integers(0, 99), st.data())
def test_masks_say_exactly_what_is_done(
    rules: Rules, seed: int, play: int, data: st.DataObject
) -> None:
    """After some months, every action of one developer, in a copy of the game each."""
    games, rng = begun(rules, [seed]), np.random.default_rng(play)
    for _ in range(data.draw(st.integers(0, rules.months - 1))):
        games.step(random_legal(games, rng))
    agent = data.draw(st.integers(0, rules.agents - 1))
    copies = games.select(np.zeros(rules.actions, int))
    action = np.full((rules.actions, rules.agents), rules.wait)
    action[:, agent] = np.arange(rules.actions)
    month = copies.step(action)
    legal = games.mask[0, agent]
    np.testing.assert_array_equal(
        month.begun[:, agent], np.where(legal, np.arange(legal.size), rules.wait)
    )
    np.testing.assert_array_equal(month.refused[:, agent], ~legal)
    assert not month.conflict.any()
    waited = copies.state.owner[~legal | (np.arange(legal.size) == rules.wait)]
    assert (waited == games.state.owner[0]).all()
    owned = (copies.state.owner == agent).sum(-1) - (games.state.owner[0] == agent).sum()
    np.testing.assert_array_equal(owned[:-1], legal[:-1])
    assert legal[rules.wait]
    if games.state.bankrupt[0, agent]:
        assert legal.sum() == 1


@MANY
@given(some_rules(), st.lists(SEEDS, min_size=2, max_size=4), st.integers(0, 99), st.data())
def test_saved_games_continue_bit_for_bit(
    rules: Rules, seeds: list[int], play: int, data: st.DataObject
) -> None:
    games, rng = begun(rules, seeds), np.random.default_rng(play)
    until = data.draw(st.integers(0, rules.months - 1))
    for _ in range(until):
        games.step(random_legal(games, rng))
    arrays, said = games.save()
    other = Games(rules, len(seeds))
    other.load(arrays, json.loads(json.dumps(said)))
    np.testing.assert_array_equal(other.mask, games.mask)
    for _ in range(until, rules.months):
        action = random_legal(games, rng)
        for mine, theirs in zip(games.step(action), other.step(action), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for mine, theirs in zip(observe(games), observe(other), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(arrays["seeds"], seeds)


def test_what_does_not_fit_is_not_loaded() -> None:
    arrays, said = Games(FULL, 2).save()
    with pytest.raises(InputError, match="load: count is 2 there, 3 here"):
        Games(FULL, 3).load(arrays, said)
    with pytest.raises(InputError, match=r"load: rules is '\w+' there, '\w+' here"):
        Games(replace(FULL, rate=0.01), 2).load(arrays, said)
    del arrays["state/cash"]
    with pytest.raises(InputError, match=r"load: state/cash is missing, or not of shape \[2, 3\]"):
        Games(FULL, 2).load(arrays, said)


@settings(max_examples=12)
@given(some_rules(), SEEDS, st.integers(0, 99), st.data())
def test_worth_is_what_a_building_adds(
    rules: Rules, seed: int, play: int, data: st.DataObject
) -> None:
    """Played to the end with everybody waiting, with and without it; interest is left out."""
    rules = replace(rules, interest=0.0, welfare=0.0)
    games, rng = begun(rules, [seed]), np.random.default_rng(play)
    for _ in range(data.draw(st.integers(0, rules.months - 1))):
        games.step(random_legal(games, rng))
    agent = data.draw(st.integers(0, rules.agents - 1))
    legal = np.flatnonzero(games.mask[0, agent])
    copies = games.select(np.zeros(legal.size, int))
    action = np.full((legal.size, rules.agents), rules.wait)
    action[:, agent] = legal
    month = copies.step(action)
    total = (month.flow + rules.gamma * month.terminal_value)[:, agent]
    if not month.done.any():
        total = total + rules.gamma * play_out(copies, wait, rng)[:, agent]
    expected = np.append(marginal_npv(games)[0, agent].ravel(), 0.0)[legal]
    np.testing.assert_allclose(total - total[-1], expected, atol=1e-6)


@MANY
@given(st.lists(SEEDS, min_size=2, max_size=4, unique=True), st.integers(0, 99))
def test_games_side_by_side_do_not_touch(seeds: list[int], play: int) -> None:
    many, alone = begun(FULL, seeds), begun(FULL, seeds[1:2])
    rng = np.random.default_rng(play)
    for _ in range(12):
        action = random_legal(many, rng)
        together, single = many.step(action), alone.step(action[1:2])
        for mine, theirs in zip(together, single, strict=True):
            np.testing.assert_array_equal(mine[1:2], theirs)
    np.testing.assert_array_equal(observe(many).parcels[1], observe(alone).parcels[0])
