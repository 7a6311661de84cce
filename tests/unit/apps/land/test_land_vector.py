"""The game as Keel trains on it: the same as one by one; a return is a net present value."""

from __future__ import annotations

import numpy as np
import pytest

from keel.apps.land import Games, make_rules
from keel.apps.land.report import gini, net_present_value
from keel.apps.land.vector import LandEnvs, vector_env
from keel.envs import make_envs
from keel.envs.guard import Guarded
from keel.errors import InputError

SMALL = make_rules("small", welfare=0.0)


def random_action(obs: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    return (rng.random(obs["action_mask"].shape) * obs["action_mask"]).argmax(-1)


def test_the_name_leads_here_and_options_are_those_of_the_game() -> None:
    envs = make_envs("land", 2, seed=0, env_kwargs={"variant": "small", "welfare": 0.5})
    assert isinstance(envs, Guarded)
    assert envs.backend == "land"
    assert envs.agents == ("industry", "education", "council")
    assert envs.reset(0)["parcels"].shape == (2, 3, 12, 30)
    with pytest.raises(InputError, match="wellfare"):
        make_envs("land", 2, seed=0, env_kwargs={"wellfare": 0.5})


def test_many_games_at_once_are_the_games_one_by_one() -> None:
    many, rng = vector_env(3, variant="small"), np.random.default_rng(1)
    one = make_envs("land", 1, seed=0, backend="sync", env_kwargs={"variant": "small"})
    obs = many.reset(5)
    game = one.envs._envs[0]  # type: ignore[attr-defined]
    game.reset(seed=0, options={"map": int(many._games.seeds[0])})
    for _ in range(30):
        action = random_action(obs, rng)
        seen = game._observe()
        for a, name in enumerate(many.agents):
            assert np.array_equal(seen[name]["own"], obs["own"][0, a])
            assert np.array_equal(seen[name]["parcels"], obs["parcels"][0, a])
            assert np.array_equal(seen[name]["action_mask"], obs["action_mask"][0, a])
        assert np.array_equal(game.state(), obs["state"][0, 0])
        step = many.step(action)
        _, reward, done, _, _ = game.step(dict(zip(many.agents, action[0], strict=True)))
        assert [reward[name] for name in many.agents] == pytest.approx(step.reward[0].tolist())
        assert all(done.values()) == step.terminated[0].all()
        obs = step.obs


def test_the_return_of_an_episode_is_the_net_present_value() -> None:
    envs, rng = LandEnvs(SMALL, 2), np.random.default_rng(2)
    obs = envs.reset(3)
    games = Games(SMALL, 2)
    games.begin([0, 1], envs._games.seeds.copy())
    months, step = [], None
    for _ in range(SMALL.months):
        action = random_action(obs, rng)
        months.append(games.step(action))
        step = envs.step(action)
        obs = step.obs
    assert step is not None
    npv = net_present_value(months, SMALL)
    assert step.agent_return is not None
    assert np.allclose(step.agent_return * SMALL.scale, npv, atol=1e-6)
    assert np.allclose(step.episode_return, step.agent_return.sum(1))
    assert step.episode_length.tolist() == [30, 30]
    told = step.episode_measures
    assert told is not None
    assert np.allclose(told["npv"], npv.sum(1), atol=1e-6)
    assert np.allclose(told["welfare"], npv.mean(1) * (1.0 - gini(npv)), atol=1e-6)
    begun = np.stack([month.begun for month in months])
    for game in range(2):
        wishes = begun[:, game][begun[:, game] != SMALL.wait]
        assert told["buildings"][game] == wishes.size > 0
        assert told["share_L"][game] == pytest.approx((wishes % 3 == 2).mean())


def test_a_finished_game_goes_on_at_once_on_another_map_of_its_set() -> None:
    envs = LandEnvs(SMALL, 2, "held_out")
    envs.reset(0)
    before = envs._games.seeds.copy()
    wait = np.full((2, 3), SMALL.wait)
    steps = [envs.step(wait) for _ in range(SMALL.months)]
    assert [s.terminated.all() for s in steps] == [False] * 29 + [True]
    told = steps[-1].episode_measures
    assert told is not None
    assert told["buildings"].tolist() == [0.0, 0.0]
    assert np.isnan(told["share_S"]).all()
    assert steps[-1].obs["own"].shape == (2, 3, 26)
    assert (envs._games.seeds != before).all()
    assert (envs._games.seeds >= 1_000_000).all()
    assert envs._games.state.month.tolist() == [0, 0]


def test_saved_games_go_on_bit_for_bit() -> None:
    envs, rng = LandEnvs(SMALL, 2), np.random.default_rng(4)
    obs = envs.reset(7)
    for _ in range(20):
        obs = envs.step(random_action(obs, rng)).obs
    saved = envs.save()
    assert saved is not None
    other = LandEnvs(SMALL, 2)
    other.reset(0)
    other.load(*saved)
    for _ in range(25):  # over the end of a game
        action = random_action(obs, rng)
        a, b = envs.step(action), other.step(action)
        assert np.array_equal(a.reward, b.reward)
        assert np.array_equal(a.episode_return, b.episode_return)
        for key in a.obs:
            assert np.array_equal(a.obs[key], b.obs[key])
        obs = a.obs
