"""LandDev-v0 as PettingZoo sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.apps.land import FULL, HELD_OUT, make_rules, parallel_env, play
from keel.apps.land.baselines import greedy_roi
from keel.apps.land.env import LandDev
from keel.errors import InputError

pytest.importorskip("pettingzoo")

from pettingzoo.test import parallel_api_test, parallel_seed_test  # type: ignore[import-untyped]


@pytest.mark.parametrize("options", [{}, {"variant": "small", "agents": 2}, {"agents": 4}])
def test_the_parallel_api(options: dict[str, Any]) -> None:
    parallel_api_test(parallel_env(**options), num_cycles=70)
    parallel_seed_test(lambda: parallel_env(**options), num_cycles=20)


def test_names_and_spaces() -> None:
    env = parallel_env(agents=4)
    assert str(env) == "LandDev-v0"
    assert env.possible_agents == ["industry", "education", "council", "housing"]
    seen, infos = env.reset(seed=3)
    for name in env.agents:
        assert env.observation_space(name) is env.observation_space(name)
        assert env.observation_space(name).contains(seen[name])
        assert env.action_space(name).n == 145
        assert infos[name]["map"] < HELD_OUT
    assert env.state().shape == (95,)
    assert env.state_space.contains(env.state())


def test_seeds_decide_the_map_and_the_next_ones() -> None:
    one, two = parallel_env(), parallel_env()
    first = [one.reset(seed=5)[1]["industry"]["map"], *(_next_map(one) for _ in range(3))]
    second = [two.reset(seed=5)[1]["industry"]["map"], *(_next_map(two) for _ in range(3))]
    assert first == second
    assert len(set(first)) == 4
    assert two.reset(seed=6)[1]["industry"]["map"] != first[0]


def _next_map(env: LandDev) -> int:
    return int(env.reset()[1]["industry"]["map"])


def test_held_out_maps_and_a_map_by_name() -> None:
    env = parallel_env(maps="held_out")
    assert all(_next_map(env) >= HELD_OUT for _ in range(20))
    _, infos = env.reset(options={"map": HELD_OUT + 3})
    assert infos["council"]["map"] == HELD_OUT + 3


def test_the_return_is_the_npv_of_the_report() -> None:
    """Greedy play through the environment, against the same in the batch."""
    env = parallel_env(maps="held_out")
    env.reset(options={"map": HELD_OUT})
    returned, discount, months = dict.fromkeys(env.agents, 0.0), 1.0, 0
    while env.agents:
        action = greedy_roi(env._games, np.random.default_rng(0))[0]
        chosen = dict(zip(env.agents, action, strict=True))
        _, reward, terminated, truncated, infos = env.step(chosen)
        for name, value in reward.items():
            returned[name] += discount * value
            assert not infos[name]["refused"]
        discount *= FULL.gamma
        months += 1
    assert months == 30
    assert all(terminated.values())
    assert not any(truncated.values())
    npv = play(greedy_roi, FULL, [HELD_OUT]).npv
    assert {name: 1000.0 * value for name, value in returned.items()} == pytest.approx(npv)
    assert env.step({}) == ({}, {}, {}, {}, {})


def test_an_illegal_action_waits_and_says_so() -> None:
    env = parallel_env(variant="small")
    seen, _ = env.reset(seed=1)
    mask = seen["industry"]["action_mask"]
    assert mask.dtype == np.int8
    illegal = int(np.flatnonzero(mask == 0)[0])
    _, reward, _, _, infos = env.step({**dict.fromkeys(env.agents, 36), "industry": illegal})
    assert infos["industry"] == {"cash_flow": 0.0, "conflict": False, "refused": True}
    assert not any(reward.values())


def test_rendering() -> None:
    env = parallel_env(variant="small", render_mode="rgb_array", months=2)
    env.reset(seed=0)
    before = env.render()
    env.step(
        dict(zip(env.agents, greedy_roi(env._games, np.random.default_rng(0))[0], strict=True))
    )
    after = env.render()
    assert before is not None
    assert after is not None
    assert before.shape == after.shape
    assert before.dtype == np.uint8
    assert (before != after).any()
    assert parallel_env().render() is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rules": FULL, "welfare": 0.5}, "rules: give them whole, or name what is to change"),
        ({"maps": "test"}, "maps: 'test' is not one of train, held_out"),
        ({"render_mode": "human"}, "render_mode: 'human' is not one of rgb_array"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parallel_env(**options)


def test_wrong_steps() -> None:
    env = parallel_env(rules=make_rules("small"))
    with pytest.raises(InputError, match="state: reset the environment first"):
        env.state()
    env.reset(seed=0)
    with pytest.raises(InputError, match="actions: expected one for each of industry, education"):
        env.step({"industry": 0})


def test_keel_takes_it_as_several_agents() -> None:
    from keel.envs.multi import ParallelEnvs

    envs = ParallelEnvs(lambda: parallel_env(variant="small"), 2)
    obs = envs.reset(0)
    assert obs["parcels"].shape == (2, 3, 12, 30)
    assert obs["state"].shape[-1] == 74
    step = envs.step(obs["action_mask"].argmax(-1))
    assert step.reward.shape == (2, 3)
    envs.close()
