"""Runs with demonstrations: from the command line to the metrics, resumed, and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keel import presets
from keel.apps.demonstrations import record_function, save_demos
from keel.apps.demonstrations.experts import lean_away
from keel.cli import main
from keel.config import Config, Demonstrations, check
from keel.errors import InputError
from keel.tracking.live import plain_line
from keel.training.environments import EnvironmentSource
from keel.training.runner import resume, start
from keel.training.session import train

CARTPOLE = presets.preset("CartPole")


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "bad"
    save_demos(record_function("CartPole-v1", lean_away, 4, seed=0), path)
    return path


def config_for(demos: Path, algo: str = "ppo", **cloning: object) -> Config:
    base = CARTPOLE if algo == "ppo" else presets.preset("default-trpo")
    return replace(
        base,
        env="CartPole-v1",
        total_steps=1536,
        rollout_steps=32,
        envs=replace(base.envs, num=16),
        region=replace(base.region, minibatch=256),
        demos=Demonstrations(path=str(demos), **cloning),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
@pytest.mark.parametrize("loss", ["plain", "filtered", "weighted"])
def test_every_region_carries_every_loss(demos: Path, algo: str, loss: str):
    for iteration in train(config_for(demos, algo, loss=loss)):
        metrics = iteration.metrics
        assert metrics["train/kl_exact"] <= metrics["train/max_kl"]
        assert metrics["train/kl_demos"] >= 0.0
        assert metrics["train/bc_coef"] <= 1.0
        if math.isfinite(metrics["train/bc_gradient_ratio"]):
            assert metrics["train/bc_gradient_ratio"] <= 1.0 + 1e-6
        assert ("train/bc_share_used" in metrics) == (loss == "filtered")
        assert ("train/bc_share_at_cap" in metrics) == (loss == "weighted")


def test_an_unbalanced_run_is_warned_of(demos: Path):
    for steer in ("gradient", "loss"):  # the note's own ratio, whatever steers
        first = next(train(config_for(demos, coef=100.0, control="fixed", steer=steer)))
        assert first.metrics["warn/bc_dominates"] > 2.0
        assert first.metrics["warn/bc_dominates"] == first.metrics["train/bc_ppo_ratio"]
        assert first.metrics["train/bc_gradient_ratio"] > 2.0


@pytest.mark.parametrize(("ratio", "warned"), [(1.99, False), (2.0, False), (2.01, True)])
def test_the_warning_is_given_above_two_and_is_the_ratio(ratio: float, warned: bool):
    metrics = {"train/bc_coef": 0.3, "train/bc_ppo_ratio": ratio, "train/bc_gradient_ratio": 0.1}

    def told_of(metrics: dict[str, float]) -> dict[str, float]:
        given: Any = SimpleNamespace(metrics=metrics)
        return EnvironmentSource.after_update(*[None] * 3, given)  # type: ignore[arg-type]

    told = told_of(metrics)
    assert told["train/bc_coef_adjusted"] == 0.3
    assert str(told["warn/bc_dominates"]) == str(ratio if warned else math.nan)
    assert told_of({"train/loss": 1.0}) == {}


def test_the_coefficient_reported_is_the_one_in_use(demos: Path):
    """Also where the limit on the pull lowers it inside of the update, which no controller sees."""
    for algo in ("ppo", "trpo"):
        for iteration in train(config_for(demos, algo, coef=100.0)):
            metrics = iteration.metrics
            used = metrics["train/policy_loss_bc_weighted"] / metrics["train/bc_loss"]
            assert metrics["train/bc_coef_adjusted"] == pytest.approx(used, rel=1e-6)
            assert metrics["train/bc_coef_adjusted"] < 100.0


def test_decay_and_the_note_s_rule_turn_the_coefficient(demos: Path):
    decayed = [
        i.metrics["train/bc_coef_adjusted"]
        for i in train(config_for(demos, control="decay", decay=0.5))
    ]
    assert decayed == [1.0, 0.5, 0.25]
    noted = [
        i.metrics["train/bc_coef_adjusted"]
        for i in train(config_for(demos, control="adaptive", steer="loss"))
    ]
    assert all(0.01 <= x <= 1.0 for x in noted)
    assert min(noted) < 1.0


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
@pytest.mark.parametrize("cloning", [{}, {"loss": "weighted"}, {"control": "decay"}])
def test_a_run_with_demonstrations_resumes_exactly(
    demos: Path, tmp_path: Path, algo: str, cloning: dict[str, str]
):
    config = config_for(demos, algo, **cloning)
    envs = replace(config.envs, normalize_obs=True, normalize_reward=True)
    config = replace(config, envs=envs, evaluation=replace(config.evaluation, episodes=2))
    *_, whole = start(config, tmp_path, "whole")
    partial = start(config, tmp_path, "partial")
    first = next(partial)
    partial.close()
    *_, resumed = resume(first.path)
    for name, value in whole.metrics.items():
        if not name.startswith("time/"):
            assert str(resumed.metrics[name]) == str(value), name  # as text: NaN equals NaN


def test_a_run_goes_on_from_wherever_one_stands(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(demos.parent)
    running = start(config_for(Path(demos.name)), tmp_path, "run")
    path = next(running).path
    running.close()
    monkeypatch.chdir(tmp_path)
    next(resume(path))


def test_demonstrations_must_not_change_under_a_run(demos: Path, tmp_path: Path):
    moved = tmp_path / "demos"
    save_demos(record_function("CartPole-v1", lean_away, 2, seed=0), moved)
    running = start(config_for(moved), tmp_path, "run")
    path = next(running).path
    running.close()
    for file in moved.iterdir():
        file.unlink()
    moved.rmdir()
    save_demos(record_function("CartPole-v1", lean_away, 2, seed=1), moved)
    with pytest.raises(InputError, match="has changed since"):
        resume(path)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"coef": 2.0}, "demos.coef: needs demonstrations"),
        ({"path": "x", "cap": 3.0}, "demos.cap: belongs to demos.loss weighted"),
        ({"path": "x", "decay": 0.5}, "demos.decay: belongs to demos.control decay"),
        ({"path": "x", "coef": 0.001}, "demos.coef_min: expected at most demos.coef"),
        ({"path": "x", "episodes": 0}, "demos.episodes: expected at least 1"),
        ({"path": "x", "control": "fixed", "coef_min": 0.5}, "demos.coef_min: belongs to"),
        ({"path": "x", "coef": 0.0}, "demos.coef: expected a number above 0"),
        ({"path": "x", "coef": -1.0}, "demos.coef: expected no negative"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(wrong: dict[str, object], says: str):
    with pytest.raises(InputError, match=says):
        check(replace(CARTPOLE, demos=Demonstrations(**wrong)))  # type: ignore[arg-type]


def test_trpo_has_no_loss_to_steer_by():
    trpo = replace(presets.preset("default-trpo"), env="CartPole-v1")
    with pytest.raises(InputError, match="surrogate loss is 0"):
        check(replace(trpo, demos=Demonstrations(path="x", steer="loss")))


def test_a_policy_with_memory_is_refused():
    network = replace(CARTPOLE.network, recurrent="actor")
    with pytest.raises(InputError, match=r"network\.recurrent none"):
        check(replace(CARTPOLE, network=network, demos=Demonstrations(path="x")))


def test_missing_demonstrations_leave_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", "--demos.path", "nowhere"]) != 0
    assert "no demonstrations here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    expert = "keel.apps.demonstrations.experts:swing"
    assert main(["demos", "record", "MountainCar-v0", "--policy", expert, "--out", "car"]) == 0
    words = "--total-steps 512 --demos.path car --demos.loss weighted --demos.cap 5"
    words += " --name car --json"
    assert main(["train", "MountainCar-v0", *words.split()]) == 0
    lines = (tmp_path / "runs/car/seed-0/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["train/bc_coef"] > 0.0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 512
    assert (tmp_path / "runs/car/seed-0/demonstrations.png").stat().st_size > 10_000


def test_the_display_says_what_demonstrations_do():
    metrics = {"train/bc_coef": 0.05, "train/bc_gradient_ratio": 1.0, "train/bc_cosine": -0.25}
    assert "bc 0.05  pull 1  cosine -0.25" in plain_line(1, 2, metrics)
    assert "pull" not in plain_line(1, 2, {})
