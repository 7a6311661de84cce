"""EnvPool and the ALE: their quirks, behind the same protocol."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.envs import (
    AtariOptions,
    EnvError,
    Envs,
    EnvWarning,
    UnknownEnvError,
    UnsupportedSpaceError,
    make_envs,
)
from keel.errors import InputError

# --- EnvPool ------------------------------------------------------------------------------------


@pytest.fixture
def envpool() -> Any:
    return pytest.importorskip("envpool")


def random_actions(envs: Envs, count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    if isinstance(envs.action_space, spaces.Discrete):
        return [rng.integers(0, envs.action_space.n, envs.num_envs) for _ in range(count)]
    shape = (envs.num_envs, *(envs.action_space.shape or ()))
    return [rng.uniform(-1.5, 1.5, shape).astype(np.float32) for _ in range(count)]


def test_halfcheetah_goes_to_envpool_and_speaks_float32(envpool: Any) -> None:
    with pytest.warns(EnvWarning, match="taken from EnvPool .*gymnasium:HalfCheetah-v5"):
        envs = make_envs("HalfCheetah-v5", 2, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert envs.backend == "envpool"
        obs = envs.reset(0)["obs"]
        step = envs.step(random_actions(envs, 1)[0])
    assert obs.dtype == step.obs["obs"].dtype == step.reward.dtype == np.float32
    assert obs.shape == (2, 17)
    assert isinstance(envs.action_space, spaces.Box)
    assert envs.action_space.shape == (6,)
    assert envs.autoreset == "next_step"
    assert envs.save() is None


@pytest.mark.parametrize("name", ["CartPole-v1", "HalfCheetah-v5"])
def test_truncation_is_at_the_time_limit_and_the_next_row_is_ignored(
    envpool: Any, name: str
) -> None:
    kwargs = {"max_episode_steps": 5}
    envs = make_envs(name, 3, backend="envpool", seed=0, env_kwargs=kwargs)
    envs.reset(0)
    for number, action in enumerate(random_actions(envs, 12), start=1):
        step = envs.step(action)
        assert not step.terminated.any()
        assert step.truncated.all() == (number % 6 == 5)
        assert step.ignored.all() == (number % 6 == 0)
        if step.ignored.all():
            assert not step.reward.any()
        if number % 6 == 5:
            assert step.episode_length.tolist() == [5, 5, 5]


def test_envpools_cartpole_moves_as_gymnasiums_does(envpool: Any) -> None:
    """Put Gymnasium's pole where EnvPool's stands; from there on both must agree."""
    envs = make_envs("CartPole-v1", 1, backend="envpool", seed=0)
    obs, single = envs.reset(3)["obs"], gymnasium.make("CartPole-v1")
    single.reset()
    single.unwrapped.state = obs[0].astype(np.float64)  # type: ignore[attr-defined]
    ended = False
    for action in random_actions(envs, 200):
        step = envs.step(action)
        expected, reward, terminated, truncated, _ = single.step(int(action[0]))
        assert np.allclose(step.obs["obs"][0], expected, atol=1e-4)
        ends = bool(step.terminated[0]), bool(step.truncated[0])
        assert (float(step.reward[0]), *ends) == (reward, terminated, truncated)
        ended = terminated
        if ended:
            break
    assert ended


def test_statistics_over_many_episodes(envpool: Any) -> None:
    envs = make_envs("CartPole-v1", 4, backend="envpool", seed=0)
    envs.reset(0)
    total, length = np.zeros(4), np.zeros(4, dtype=int)
    seen = 0
    for action in random_actions(envs, 200):
        step = envs.step(action)
        total += step.reward
        length += ~step.ignored
        ended = step.episode_index
        assert ended.tolist() == np.flatnonzero(step.terminated | step.truncated).tolist()
        assert step.episode_return.tolist() == total[ended].tolist()
        assert step.episode_length.tolist() == length[ended].tolist()
        total[ended], length[ended] = 0, 0
        seen += ended.size
    assert seen > 20


def test_a_seed_repeats_the_run_and_another_does_not(envpool: Any) -> None:
    envs = make_envs("Hopper-v5", 3, backend="envpool", seed=4, threads=2)
    runs = []
    for seed in (4, 4, 5):
        obs = [envs.reset(seed)["obs"]]
        obs += [envs.step(action).obs["obs"] for action in random_actions(envs, 30)]
        runs.append(np.stack(obs))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert len({row.tobytes() for row in runs[0][0]}) == 3, "each environment has its own seed"


def test_what_envpool_does_not_know_falls_back_with_a_word(envpool: Any) -> None:
    kwargs = {"render_mode": None, "width": 64}
    with pytest.warns(UserWarning, match="EnvPool cannot take it as asked .*width"):
        envs = make_envs("HalfCheetah-v5", 1, seed=0, env_kwargs=kwargs)
    assert envs.backend == "gymnasium sync"


def test_envpool_actions_are_clipped(envpool: Any) -> None:
    one, two = (make_envs("HalfCheetah-v5", 1, seed=0) for _ in range(2))
    one.reset(0), two.reset(0)
    far, edge = np.full((1, 6), 50.0, np.float32), np.ones((1, 6), np.float32)
    assert np.array_equal(one.step(far).obs["obs"], two.step(edge).obs["obs"])


@pytest.mark.parametrize(("name", "hidden"), [("HalfCheetah-v5", 1), ("Hopper-v5", 1)])
def test_envpools_mujoco_moves_and_pays_as_gymnasiums_does(
    envpool: Any, name: str, hidden: int
) -> None:
    """The observation is the state without the first coordinate: put Gymnasium's robot there."""
    pytest.importorskip("mujoco")
    envs, single = make_envs(name, 1, seed=0), gymnasium.make(name)
    obs = envs.reset(5)["obs"][0].astype(np.float64)
    single.reset()
    inner: Any = single.unwrapped
    inner.set_state(
        np.append(np.zeros(hidden), obs[: inner.model.nq - hidden]), obs[-inner.model.nv :]
    )
    for action in random_actions(envs, 10):
        step = envs.step(action)
        expected, reward, terminated, _, _ = single.step(np.clip(action[0], -1, 1))
        assert np.allclose(step.obs["obs"][0], expected, atol=1e-3)
        assert step.reward[0] == pytest.approx(float(reward), abs=1e-3)
        assert step.terminated[0] == terminated


def test_dicts_and_masks_of_envpool(envpool: Any) -> None:
    """Snake: a board, a counter and a mask; the mask is legal in every row, finished ones too."""
    envs = make_envs("Snake-v1", 4, seed=0)
    assert envs.backend == "envpool"
    obs = envs.reset(0)
    assert isinstance(envs.observation_space, spaces.Dict)
    assert sorted(envs.observation_space) == ["grid", "step_count"]
    assert obs["step_count"].dtype == np.int64
    finished = 0
    for _ in range(60):
        assert obs["action_mask"].dtype == bool
        assert obs["action_mask"].any(1).all()
        step = envs.step(np.ones(4, dtype=np.int64))  # to the right, into the wall
        finished += step.episode_index.size
        obs = step.obs
    assert finished > 0


def test_bounds_that_are_limits_of_a_type_are_no_bounds(envpool: Any) -> None:
    space = make_envs("CheetahRun-v1", 1, seed=0).observation_space
    assert isinstance(space, spaces.Dict)
    assert all(isinstance(inner, spaces.Box) for inner in space.values())
    assert np.isneginf(space["velocity"].low).all()  # type: ignore[attr-defined]


def test_games_for_several_players_are_refused(envpool: Any) -> None:
    with pytest.raises(UnsupportedSpaceError, match="Go9x9-v1: a game for several players"):
        make_envs("Go9x9-v1", 1, seed=0)


def test_an_unknown_option_is_named(envpool: Any) -> None:
    with pytest.raises(InputError, match="EnvPool's Hopper-v5 does not know gravity"):
        make_envs("Hopper-v5", 1, backend="envpool", seed=0, env_kwargs={"gravity": 1})
    with pytest.raises(UnknownEnvError, match="Hopper-v5"):
        make_envs("Hoper-v5", 1, backend="envpool", seed=0)


def test_native_environments_cannot_be_loaded(envpool: Any) -> None:
    with pytest.raises(EnvError, match="EnvPool cannot restore its state"):
        make_envs("CartPole-v1", 1, backend="envpool", seed=0).load({}, {})


# --- Atari --------------------------------------------------------------------------------------


@pytest.fixture(params=["ale", "envpool"])
def atari(request: pytest.FixtureRequest) -> str:
    pytest.importorskip({"ale": "ale_py", "envpool": "envpool"}[request.param])
    return str(request.param)


def make_breakout(backend: str, n: int = 2, **options: Any) -> Envs:
    atari = AtariOptions(**options)
    return make_envs("Breakout", n, backend=backend, seed=0, atari=atari)  # type: ignore[arg-type]


def test_breakout_is_shown_as_four_gray_frames(atari: str) -> None:
    envs = make_breakout(atari)
    assert envs.backend == atari
    assert envs.reset(0)["obs"].shape == (2, 4, 84, 84)
    step = envs.step(np.zeros(2, dtype=np.int64))
    assert step.obs["obs"].dtype == np.uint8
    assert step.reward.dtype == np.float32
    assert isinstance(envs.action_space, spaces.Discrete)
    assert envs.action_space.n == 4
    assert envs.save() is None


@pytest.mark.parametrize("name", ["Pong", "ALE/Pong-v5"])
def test_aliases_go_to_the_ale(name: str) -> None:
    pytest.importorskip("ale_py")
    assert make_envs(name, 1, seed=0).backend == "ale"


def test_a_lost_life_ends_an_episode_but_not_the_game(atari: str) -> None:
    """Without moving, Breakout's five lives are lost one by one."""
    envs = make_breakout(atari, 1, episodic_life=True)
    envs.reset(0)
    ends, games, lengths, count = 0, 0, [], 0
    previous = False
    for _ in range(260):
        step = envs.step(np.array([3]))
        assert bool(step.ignored[0]) == previous, (
            "a served ball is the game's move, not the agent's"
        )
        assert not (step.ignored & (step.terminated | step.truncated)).any()
        count += int(~step.ignored[0])
        previous = bool(step.terminated[0] or step.truncated[0])
        ends += previous
        if step.episode_index.size:
            games += 1
            lengths.append(int(step.episode_length[0]))
            assert lengths[-1] == count
            count = 0
            break
    assert (ends, games) == (5, 1)


def test_without_episodic_life_only_the_game_ends() -> None:
    pytest.importorskip("ale_py")
    envs = make_breakout("ale", 1)
    envs.reset(0)
    for _ in range(400):
        step = envs.step(np.array([1]))
        if step.terminated[0]:
            break
    assert step.episode_index.tolist() == [0]
    after = envs.step(np.array([1]))
    assert after.ignored[0]
    assert after.reward[0] == 0.0


def test_rewards_are_clipped_to_their_sign_but_returns_stay_raw(atari: str) -> None:
    """Asterix gives 50 points at a time; both games are cut after 90 steps."""
    pair = [
        make_envs("Asterix", 3, backend=atari, seed=0, atari=options)  # type: ignore[arg-type]
        for options in (
            AtariOptions(max_frames=360),
            AtariOptions(max_frames=360, clip_reward=True),
        )
    ]
    for envs in pair:
        envs.reset(0)
    total, largest = np.zeros(3), 0.0
    for action in random_actions(pair[0], 90):
        raw, clipped = (envs.step(action) for envs in pair)
        assert np.array_equal(np.sign(raw.reward), clipped.reward)
        total += raw.reward
        largest = max(largest, float(raw.reward.max()))
    assert largest >= 50.0
    assert raw.episode_return.tolist() == clipped.episode_return.tolist() == total.tolist()


def test_the_ale_truncates_at_its_frame_limit() -> None:
    pytest.importorskip("ale_py")
    envs = make_breakout("ale", 2, max_frames=40)
    envs.reset(0)
    for _ in range(9):
        assert not envs.step(np.zeros(2, dtype=np.int64)).truncated.any()
    step = envs.step(np.zeros(2, dtype=np.int64))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert step.episode_length.tolist() == [10, 10]


def test_the_ale_is_seeded() -> None:
    pytest.importorskip("ale_py")
    envs = make_breakout("ale", 3)
    runs = []
    for seed in (0, 0, 1):
        frames = [envs.reset(seed)["obs"]]
        frames += [envs.step(action).obs["obs"] for action in random_actions(envs, 15)]
        runs.append(np.stack(frames))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
