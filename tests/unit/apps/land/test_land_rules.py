"""Rules and maps: what can be asked for, and that a seed is a map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.apps.land.games import Games
from keel.apps.land.maps import HELD_OUT, draw_map, held_out, map_seeds
from keel.apps.land.rules import FULL, SMALL, TRADES, Rules, legacy_rules, make_rules
from keel.errors import InputError


def test_the_full_game_is_what_the_design_says() -> None:
    assert (FULL.parcels, FULL.months, FULL.actions, FULL.wait) == (48, 30, 145, 144)
    assert FULL.names == ("industry", "education", "council")
    assert FULL.gamma == pytest.approx(1.0 / 1.008)
    assert (SMALL.parcels, SMALL.externalities, SMALL.welfare) == (12, False, 1.0)


def test_agents_are_a_number_or_names() -> None:
    assert make_rules(agents=2).names == ("industry", "education")
    assert make_rules(agents=4).names == tuple(TRADES)
    assert make_rules("small", ["housing", "council"]).names == ("housing", "council")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"agents": 1}, "agents: expected 2 to 4, got 1"),
        ({"agents": ["industry", "industry"]}, "agents: each trade may be there once"),
        ({"agents": ["industry", "farms"]}, "agents: 'farms' is not one of"),
        ({"variant": "smal"}, "did you mean 'small'"),
        ({"wellfare": 0.5}, "option: 'wellfare' is not one of .* did you mean 'welfare'"),
        ({"welfare": 1.5}, "welfare: expected 0 to 1, got 1.5"),
        ({"credit": -1.0}, "credit: expected at least 0, got -1.0"),
        ({"months": 0}, "months: expected more than 0, got 0"),
        ({"reward": "nvp"}, "reward: 'nvp' is not one of npv, legacy"),
        (
            {"reward": "legacy", "scale": 1000.0},
            "scale: expected one of 500, 2000, 3000 with reward=legacy, got 1000",
        ),
    ],
)
def test_wrong_rules_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_rules(**options)


@pytest.mark.parametrize("scale", [500.0, 2_000.0, 3_000.0])
def test_the_legacy_reward_has_its_scales_and_faults(scale: float) -> None:
    rules = legacy_rules(scale)
    assert (rules.reward, rules.scale) == ("legacy", scale)
    assert rules.late_build_npv
    assert rules.reward_clip
    assert make_rules(reward="legacy").scale == 3_000.0


def test_a_seed_is_a_map_wherever_it_is_drawn() -> None:
    alone = draw_map(FULL, 12_345)
    games = Games(FULL, 5)
    games.begin([4, 1, 2], [9, 12_345, 3])
    for one, many in zip(alone, games.world, strict=True):
        np.testing.assert_array_equal(one[0], many[1])
    games.begin([3], [12_345])
    np.testing.assert_array_equal(games.world.price[3], alone.price[0])
    assert games.seeds.tolist() == [0, 12_345, 3, 12_345, 9]


def test_maps_stay_as_they_were_published() -> None:
    """Seeds stand in reports: their maps must not change with a version."""
    world = draw_map(FULL, 1_000_000)
    assert world.price[0, :3] == pytest.approx([329.1471293631, 244.1084851817, 199.7475288636])
    assert world.level[0, :8].tolist() == [4, 3, 3, 3, 4, 3, 3, 1]
    assert int(world.first[0]) == 1


def test_maps_are_within_their_bounds() -> None:
    games = Games(FULL, 200)
    games.begin(np.arange(200), np.arange(200))
    world = games.world
    assert world.price.min() >= 110.0
    assert world.price.max() <= 1_100.0
    assert world.price.max() > 1_000.0
    assert 0.0 <= world.zone.min() < 10.0 < 190.0 < world.zone.max() <= 200.0
    # of 48 parcels ranked by quality, those from 4.8, 9.6, 24 and 36 on are one level higher
    counts = np.stack([np.bincount(row, minlength=6)[1:] for row in world.level])
    assert (counts == [5, 5, 14, 12, 12]).all()
    assert set(world.first.tolist()) == {0, 1, 2}
    assert 0.05 < world.river.mean() < 0.3


def test_hub_distance_and_river_follow_from_where_they_lie() -> None:
    world = draw_map(FULL, 4)
    place = np.stack(np.divmod(np.arange(48), 8), 1)
    apart = np.sqrt(((place[:, None] - world.hubs[0]) ** 2).sum(-1))
    np.testing.assert_allclose(world.hub[0], apart.min(-1))
    middle, bend, length, phase = world.course[0]
    row = middle + bend * np.sin(place[:, 1] / length + phase)
    np.testing.assert_array_equal(world.river[0], np.abs(place[:, 0] - row) < 0.5)
    near, far = world.hub[0] < 1.5, world.hub[0] > 4.0
    assert world.price[0, near].mean() > 2.0 * world.price[0, far].mean()


def test_held_out_maps_are_never_trained_on() -> None:
    rng = np.random.default_rng(0)
    trained = map_seeds("train", 10_000, rng)
    judged = np.append(map_seeds("held_out", 10_000, rng), held_out(50))
    assert trained.max() < HELD_OUT <= judged.min()
    games = Games(FULL, 400)
    games.begin(np.arange(400), np.append(trained[:200], judged[-200:]))
    assert np.unique(games.world.price, axis=0).shape[0] == 400
    with pytest.raises(InputError, match="maps: 'test' is not one of train, held_out"):
        map_seeds("test", 1, rng)


@pytest.mark.parametrize("seeds", [[-1], [0.5]])
def test_seeds_are_whole_numbers(seeds: list[Any]) -> None:
    with pytest.raises(InputError, match="seeds: expected integers of at least 0"):
        Games(Rules(), 1).begin([0], seeds)
