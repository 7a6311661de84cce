"""Demonstrations: recorded, kept, checked, and read from Minari."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import keel
from keel.apps.demonstrations import (
    Demos,
    check_fits,
    experts,
    from_minari,
    load_demos,
    record,
    record_function,
    record_policy,
    save_demos,
)
from keel.cli import main
from keel.errors import InputError, KeelError
from keel.experience.demo_files import joined, only
from keel.training.policy import open_policy


def lean(obs: np.ndarray) -> int:
    """CartPole: push to where the pole falls; holds it for a few hundred steps."""
    return int(obs[2] + 0.5 * obs[3] > 0)


def wide(obs: np.ndarray) -> np.ndarray:
    return np.zeros(2)


def torque(obs: np.ndarray) -> np.ndarray:
    return np.array([0.5], np.float32)


def demos(**changes: Any) -> Demos:
    """Two episodes: three steps that end, two that are cut off."""
    base = Demos(
        env="CartPole-v1",
        obs={"obs": np.arange(20, dtype=np.float32).reshape(5, 4)},
        action=np.array([0, 1, 0, 1, 1]),
        reward=np.array([1, 2, 3, 4, 5], np.float32),
        terminated=np.array([0, 0, 1, 0, 0], bool),
        truncated=np.array([0, 0, 0, 0, 1], bool),
        lengths=(3, 2),
        source="by hand",
    )
    return replace(base, **changes)


def test_returns_by_hand():
    assert demos().returns == [6.0, 9.0]


def test_what_is_written_comes_back(tmp_path: Path):
    save_demos(demos(), tmp_path / "demos")
    back = load_demos(tmp_path / "demos")
    assert (back.obs["obs"] == demos().obs["obs"]).all()
    for name in ("action", "reward", "terminated", "truncated"):
        assert (getattr(back, name) == getattr(demos(), name)).all()
    assert (back.env, back.lengths, back.source) == ("CartPole-v1", (3, 2), "by hand")
    with pytest.raises(InputError, match="exists already"):
        save_demos(demos(), tmp_path / "demos")


def test_some_episodes_and_several_sets():
    second = only(demos(), [False, True])
    assert second is not None
    assert (second.returns, second.lengths) == ([9.0], (2,))
    assert second.obs["obs"][0, 0] == 12.0
    assert only(demos(), [False, False]) is None
    assert joined([demos(), second]).returns == [6.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": np.zeros(0), "lengths": ()}, "empty"),
        ({"obs": {}}, "no observations"),
        ({"action": np.zeros(4)}, "action has 4 rows, reward 5"),
        ({"reward": np.array([1, 2, np.nan, 4, 5])}, "reward is not finite at step 2"),
        ({"obs": {"obs": np.full((5, 4), np.inf)}}, "obs/obs is not finite at step 0"),
        ({"lengths": (3, 1)}, "episodes of 4 steps together, but 5 rows"),
        ({"lengths": (2, 3)}, "with its last step"),
        ({"reward": np.zeros((5, 1))}, r"reward has shape \[5, 1\], expected one row a step"),
        ({"action": np.float32(1.0)}, r"action has shape \[\]"),
        ({"terminated": np.zeros(5, np.float32)}, "terminated is float32, expected true or false"),
    ],
)
def test_what_is_not_whole_is_not_written(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        save_demos(demos(**changes), tmp_path / "demos")
    assert not list(tmp_path.iterdir())


BOX = spaces.Box(-1.0, 1.0, (4,))


@pytest.mark.parametrize(
    ("observation", "action", "changes", "message"),
    [
        (spaces.Box(-1, 1, (3,)), spaces.Discrete(2), {}, r"'obs' has shape \[4\], .* \[3\]"),
        (spaces.Dict({"a": BOX}), spaces.Discrete(2), {}, "no observation 'a'"),
        (BOX, spaces.Box(-1, 1, (2,)), {}, r"actions have shape \[\], the environment's \[2\]"),
        (BOX, spaces.Discrete(1), {}, "3 of 5 actions are outside .* the first is 1 at step 1"),
        (BOX, spaces.Box(-1, 1, (1,)), {"action": np.full((5, 1), 2.0)}, "5 of 5 actions"),
        (BOX, spaces.Discrete(2), {"action": np.full(5, 0.5)}, "actions are float64, Discrete"),
    ],
)
def test_what_does_not_fit_the_environment_is_named(
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    changes: dict[str, Any],
    message: str,
):
    with pytest.raises(InputError, match=message):
        check_fits(demos(**changes), observation, action, "demos")


def test_what_fits_passes():
    check_fits(demos(), BOX, spaces.Discrete(2), "demos")
    check_fits(demos(action=np.zeros((5, 2), np.int64)), BOX, spaces.MultiDiscrete([2, 3]), "demos")


def test_a_function_is_recorded_as_it_played():
    """The same actions from the same seed give the same episode in Gymnasium itself."""
    found = record_function("CartPole-v1", lean, 3, seed=5)
    assert len(found.lengths) == 3
    assert found.steps == sum(found.lengths) == sum(found.returns)
    assert found.terminated.sum() + found.truncated.sum() == 3
    assert all(
        lean(obs) == action for obs, action in zip(found.obs["obs"], found.action, strict=True)
    )
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    for i in range(found.lengths[0] - 1):
        env.state = found.obs["obs"][i].astype(np.float64)  # type: ignore[attr-defined]
        after = env.step(int(found.action[i]))[0]
        assert after == pytest.approx(found.obs["obs"][i + 1], abs=1e-5)


def test_continuous_actions_are_recorded_in_the_environments_units():
    found = record_function("Pendulum-v1", torque, 1, seed=0)
    assert found.action.shape == (200, 1)
    assert (found.action == 0.5).all()
    assert found.truncated[-1]
    assert not found.terminated.any()


@pytest.mark.parametrize("memory", ["none", "both"])
def test_a_run_is_recorded(tmp_path: Path, memory: str):
    settings = {"total_steps": 2048, "rollout_steps": 64, "network": {"memory": memory}}
    last = keel.train(
        "CartPole-v1",
        runs=tmp_path,
        region={"minibatch": 64},
        evaluation={"episodes": 2},
        **settings,
    )
    policy = open_policy(last.path)
    found = record_policy(policy, 4, seed=1)
    check_fits(found, policy.observation_space, policy.action_space, "demos")
    assert len(found.lengths) == 4
    assert "at step 2,048" in found.source
    again = record_policy(policy, 4, seed=1)
    assert (again.action == found.action).all()


def test_a_gaussian_is_recorded_as_the_environment_takes_it(tmp_path: Path):
    """A wide policy draws beyond the bounds nearly always; what is recorded must fit."""
    last = keel.train(
        "Pendulum-v1",
        runs=tmp_path,
        total_steps=512,
        rollout_steps=64,
        network={"log_std": 2.0},
        region={"minibatch": 64},
        evaluation={"episodes": 1},
    )
    policy = open_policy(last.path)
    found = record_policy(policy, 2, seed=0)
    check_fits(found, policy.observation_space, policy.action_space, "demos")
    assert (np.abs(found.action) == 2.0).mean() > 0.3


def test_a_run_shows_what_it_can_where_rewards_are_others(tmp_path: Path):
    last = keel.train(
        "MountainCar-v0",
        runs=tmp_path,
        total_steps=512,
        rollout_steps=32,
        region={"minibatch": 64},
        evaluation={"episodes": 1},
    )
    policy = open_policy(last.path)
    sparse = "keel.apps.demonstrations.sparse:MountainCarSparse-v0"
    found = record_policy(policy, 2, env=sparse, seed=0)
    assert found.env == sparse
    assert set(found.reward.tolist()) <= {0.0, 1.0}
    with pytest.raises(InputError, match="was trained on MountainCar-v0, whose observation_space"):
        record_policy(policy, 1, env="CartPole-v1")


@pytest.mark.parametrize(
    ("env", "expert", "returns"),
    [
        ("MountainCar-v0", experts.swing, (-130.0, -100.0)),
        ("MountainCarContinuous-v0", experts.swing_force, (80.0, 100.0)),
        ("CartPole-v1", experts.lean_away, (7.0, 12.0)),
        ("keel.apps.demonstrations.sparse:MountainCarSparse-v0", experts.swing, (1.0, 1.0)),
    ],
)
def test_scripted_experts_are_as_good_and_bad_as_they_say(
    env: str, expert: Any, returns: tuple[float, float]
):
    found = record_function(env, expert, 5, seed=0)
    assert returns[0] <= min(found.returns)
    assert max(found.returns) <= returns[1]


def test_far_is_beyond_ten_metres():
    """A push of the whole body is worth nothing before it."""
    env = gymnasium.make("keel.apps.demonstrations.sparse:HalfCheetahFar-v0")
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[1] == 0.0
    data = env.unwrapped.data  # type: ignore[attr-defined]
    data.qpos[0] = 10.5
    assert env.step(np.zeros(6, np.float32))[1] == 1.0
    env.close()


def test_another_version_and_an_endless_length_are_named(tmp_path: Path):
    save_demos(demos(), tmp_path / "demos")
    file = tmp_path / "demos" / "demos.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "version": 99}))
    with pytest.raises(InputError, match="version 99, this Keel reads version 1"):
        load_demos(tmp_path / "demos")
    file.write_text(json.dumps({**written, "lengths": [float("inf")]}))
    with pytest.raises(InputError, match="not as `keel demos record` writes it"):
        load_demos(tmp_path / "demos")


def test_many_short_episodes_are_no_endless_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "MOST_STEPS", 100)
    assert len(record_function("CartPole-v1", experts.lean_away, 20, seed=0).lengths) == 20
    with pytest.raises(KeelError, match="did not end within 100 steps"):
        record_function("Pendulum-v1", torque, 1, seed=0)


def test_the_command_records_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = str(tmp_path / "demos")
    words = ["demos", "record", "CartPole-v1", "--policy", f"{__name__}:lean", "--out", out]
    assert main([*words, "--episodes", "3", "--min-return", "100"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert main(["demos", "show", out, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["env"] == "CartPole-v1"
    assert min(told["returns"]) >= 100.0
    assert main([*words, "--episodes", "3"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["play"], "'play' is not one of record, show"),
        (["show", "nowhere"], "no demonstrations here"),
        (["record", "CartPole-v1", "--policy", "nowhere", "--out", "x"], "no such run"),
        (["record", "CartPole-v1", "--policy", "nowhere:f", "--out", "x"], "cannot be imported"),
        (
            ["record", "CartPole-v1", "--policy", f"{__name__}:wide", "--out", "x"],
            r"expected an action of shape [], got [2]",
        ),
        (
            [
                "record",
                "CartPole-v1",
                "--policy",
                f"{__name__}:lean",
                "--out",
                "x",
                "--episodes",
                "0",
            ],
            "--episodes: expected at least 1",
        ),
        (
            [
                *[
                    "record",
                    "CartPole-v1",
                    "--episodes",
                    "1",
                    "--min-return",
                    "501",
                    "--out",
                    "x",
                    "--policy",
                ],
                f"{__name__}:lean",
            ],
            "only 0 of 20 episodes earned that much",
        ),
    ],
)
def test_bad_input_is_named(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main(["demos", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["demos.json", "demos.safetensors"])
def test_damaged_files_are_named(tmp_path: Path, file: str):
    save_demos(demos(), tmp_path / "demos")
    (tmp_path / "demos" / file).write_bytes(b"{}")
    with pytest.raises(InputError, match=r"cannot be read|not as `keel demos record` writes it"):
        load_demos(tmp_path / "demos")


def test_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A data set written by Minari itself, read as it was played."""
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = gymnasium.make("CartPole-v1")
    buffers, played = [], []
    for seed in (0, 1):
        seen, actions, ends = [env.reset(seed=seed)[0]], [], []
        while not ends or not ends[-1]:
            actions.append(lean(seen[-1]))
            obs, _, ended, _, _ = env.step(actions[-1])
            seen.append(obs)
            ends.append(ended)
        played += list(zip(seen[:-1], actions, strict=True))
        buffers.append(
            EpisodeBuffer(
                id=seed,
                observations=np.stack(seen),
                actions=np.array(actions),
                rewards=[1.0] * len(actions),
                terminations=ends,
                truncations=[False] * len(actions),
            )
        )
    minari.create_dataset_from_buffers("cartpole/lean-v0", buffers, env="CartPole-v1")
    found = from_minari("cartpole/lean-v0")
    assert found.env == "CartPole-v1"
    assert found.steps == len(played)
    assert len(found.lengths) == 2
    assert np.allclose(found.obs["obs"], np.stack([obs for obs, _ in played]))
    assert found.action.tolist() == [action for _, action in played]
    assert found.returns == [float(n) for n in found.lengths]
    assert len(from_minari("cartpole/lean-v0", 1).lengths) == 1
    with pytest.raises(InputError, match="not on this machine"):
        from_minari("cartpole/nobody-v0")
