"""Whole runs: the promise over a training, exact resume, evaluation, controllers, the command."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info

import keel
from keel.cli import main
from keel.config import Config, from_dict
from keel.errors import InputError
from keel.tracking.reader import read_metrics
from keel.tracking.record import dump_config, read_config
from keel.training import evaluation
from keel.training.checkpoint import load, newest_step
from keel.training.loop import iterate
from keel.training.runner import Progress, ResumeWarning, resume, start
from keel.training.session import initial_state, open_session


def tiny(**changes: Any) -> Config:
    """A run of eight iterations that takes a second or two."""
    base = from_dict(
        {
            "total_steps": 1024,
            "rollout_steps": 16,
            "compile": "off",
            "region": {"minibatch": 48, "epochs": 2, "learning_rate": 1e-3},
            "evaluation": {"episodes": 4},
            "checkpoints": {"every": 256, "keep": 2},
        }
    )
    return from_dict(changes, base)


def finish(run: Iterator[Progress]) -> Progress:
    *_, last = run
    return last


PENDULUM = {"env": "Pendulum-v1", "envs": {"normalize_obs": True, "normalize_reward": True}}
LAND = {
    "env": "land",
    "envs": {"num": 8, "options": "variant=small", "normalize_obs": True, "normalize_reward": True},
    "network": {"kind": "items", "hidden": [8]},
    "advantage": {"normalize": "group"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "CartPole": {},
    "evaluations on the way": {"evaluation": {"episodes": 1, "every": 192}},
    "Pendulum with normalizers": PENDULUM,
    "everything adaptive": {
        "region": {"target_kl": 0.01, "adaptive_rate": True, "adaptive_kl": True, "kl_coef": 0.1},
        "explore": {
            "entropy_coef": 0.01,
            "entropy_decay": 0.9,
            "pulses": True,
            "pulse_interval": 2,
        },
        "advantage": {"recompute": True, "clamp": 10},
    },
    "HalfCheetah on Gymnasium": {
        "env": "HalfCheetah-v5",
        "envs": {"backend": "sync", "normalize_obs": True, "normalize_reward": True},
        "advantage": {"recompute": True},
    },
    "GRU": {"network": {"memory": "both", "memory_size": 8}},
    "GRU of a decoupled critic": {
        "network": {"kind": "decoupled", "memory": "critic", "memory_size": 8, "features": 16}
    },
    "state-dependent deviations": PENDULUM | {"network": {"state_std": True}},
    "three developers": LAND,
    "three developers of one network": LAND | {"agents": {"sharing": "all"}},
    "three developers in turn": LAND
    | {"agents": {"order": "sequential"}, "critic": {"normalize": "on"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_is_bit_equal_to_one_without_interruption(name: str, tmp_path: Path) -> None:
    """Fault 10: parameters, optimizer, normalizers, random streams and metrics."""
    if "HalfCheetah" in name:
        pytest.importorskip("mujoco")
    config = tiny(**VARIANTS[name])
    whole = finish(start(config, tmp_path, "whole"))
    interrupted = start(config, tmp_path, "interrupted")
    for progress in interrupted:
        if progress.steps >= 384:
            break
    interrupted.close()
    again = finish(resume(tmp_path / "interrupted" / "seed-0"))
    for mine, other in zip(
        whole.iteration.state.opt_state, again.iteration.state.opt_state, strict=True
    ):
        assert torch.equal(mine, other)
    lines = [
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "crc"))}
            for line in (tmp_path / run / "seed-0" / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "interrupted")
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 8


def test_environments_without_a_state_start_new_episodes_and_say_so(tmp_path: Path) -> None:
    config = tiny(envs={"backend": "async", "num": 2}, region={"minibatch": 32})
    run = start(config, tmp_path, "run")
    next(run)
    run.close()
    with pytest.warns(ResumeWarning, match="cannot save their state"):
        finish(resume(tmp_path / "run" / "seed-0"))


@pytest.mark.parametrize("rate", [1e-3, 0.05, 1.0])
def test_no_update_of_a_run_leaves_the_trust_region(rate: float, tmp_path: Path) -> None:
    """Even with a learning rate of 1: the measured KL stays inside, and walk-backs are counted."""
    config = tiny(region={"learning_rate": rate, "max_kl": 0.01, "schedule": "constant"})
    last = finish(start(config, tmp_path, "run"))
    table = read_metrics(last.path)
    assert (table["train/kl_exact"] <= 0.01).all()
    assert last.iteration.state.kl_exact_max <= 0.01
    if rate == 1.0:
        assert last.iteration.state.rollbacks > 0
        assert (table["train/kl_requested"] > 0.01).any()


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path) -> None:
    params = [
        finish(start(tiny(seed=seed), tmp_path, name)).iteration.state.opt_state.params
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[0], params[2])


def test_the_best_evaluation_stays_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is kept, however old it gets, also by a run that was resumed after it."""
    scores = iter([5.0, 100.0, 50.0, 10.0, 70.0, 20.0, 30.0, 40.0, 60.0])

    def scored(*_: Any, **__: Any) -> Any:
        value = next(scores)
        return SimpleNamespace(metrics=lambda: {"eval/return_mean": value})

    monkeypatch.setattr(evaluation, "evaluate", scored)
    config = tiny(evaluation={"every": 128}, checkpoints={"every": 128, "keep": 1})
    path = tmp_path / "run" / "seed-0"
    run = start(config, tmp_path, "run")
    for progress in run:
        if progress.steps >= 512:
            break
    run.close()
    last = finish(resume(path))
    assert last.iteration.state.best_return == 100.0
    best = json.loads((path / "checkpoints" / "best.json").read_text())
    assert best["step"] == 256
    assert load(path, 256).data["best_return"] == 100.0


def test_normalizers_change_the_policy_by_a_kl_of_their_own(tmp_path: Path) -> None:
    last = finish(start(tiny(**PENDULUM), tmp_path, "run"))
    table = read_metrics(last.path)
    kl, bound = table["train/kl_normaliser"], table["train/max_kl"]
    assert (kl > 0.0).all()
    assert (kl <= 0.25 * bound).all(), "what is more is held back"
    assert (kl <= table["train/kl_exact"] + 0.1 * bound).all(), "a part of it, before any step"


def test_the_critic_may_have_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    config = tiny(region={"learning_rate": 1e-3, "critic_learning_rate": 4e-3})
    table = read_metrics(finish(start(config, tmp_path, "run")).path)
    assert table["train/critic_learning_rate"] == pytest.approx(4.0 * table["train/learning_rate"])
    still = tiny(region={"learning_rate": 1e-3, "critic_learning_rate": 1e-30})
    session = open_session(still)
    try:
        after, _, _ = iterate(session, initial_state(session))
    finally:
        session.source.close()
    moved = ((after.opt_state.params - session.agent.initial).abs() > 1e-20)[0]
    critic = session.agent.layout.columns("critic")
    assert moved[~critic].double().mean() > 0.9
    assert not moved[critic].any()


def test_pulses_heat_the_policy_and_the_gate_stays_shut(tmp_path: Path) -> None:
    config = tiny(explore={"pulses": True, "pulse_interval": 2})
    last = finish(start(config, tmp_path, "run"))
    table = read_metrics(last.path)
    assert set(table["train/temperature"]) == {1.0, 2.0}
    assert (table["train/gate_log_ratio"] < 1e-3).all()


def test_entropy_decays_to_its_floor(tmp_path: Path) -> None:
    config = tiny(explore={"entropy_coef": 0.05, "entropy_decay": 0.5, "entropy_coef_min": 0.01})
    coefficients = read_metrics(finish(start(config, tmp_path, "run")).path)["train/entropy_coef"]
    assert coefficients.tolist() == pytest.approx([0.05, 0.025, 0.0125] + 5 * [0.01])


def test_the_learning_rate_ends_at_nothing(tmp_path: Path) -> None:
    rates = read_metrics(finish(start(tiny(), tmp_path, "run")).path)["train/learning_rate"]
    assert rates.tolist() == pytest.approx([1e-3 * (1 - i / 8) for i in range(8)])


def test_a_changed_config_is_shown_and_refused(tmp_path: Path) -> None:
    """Fault 11."""
    finish(start(tiny(), tmp_path, "run"))
    with pytest.raises(keel.KeelError, match=r"region\.max_kl"):
        resume(tmp_path / "run" / "seed-0", tiny(region={"max_kl": 0.01}))
    longer = finish(resume(tmp_path / "run" / "seed-0", tiny(total_steps=1152)))
    assert longer.steps == 1152


def test_other_shapes_are_refused_before_training(tmp_path: Path) -> None:
    """Fault 12."""
    finish(start(tiny(), tmp_path, "run"))
    run = tmp_path / "run" / "seed-0"
    settings = read_config(run)
    settings["network"]["hidden"] = [32, 32]
    (run / "config.yaml").write_bytes(dump_config(settings))
    with pytest.raises(
        keel.KeelError, match=r"the checkpoint has .1, 9155. float32, this run has .1, 2531."
    ):
        resume(run)


def test_nothing_is_created_for_an_environment_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(keel.KeelError, match="CartPole-v1"):
        start(tiny(env="CartPol-v1"), tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


def test_training_from_python_in_five_lines(tmp_path: Path) -> None:
    steps = [
        progress.steps
        for progress in keel.iterate(
            "CartPole-v1",
            runs=tmp_path,
            total_steps=1024,
            compile="off",
            region={"epochs": 1},
            evaluation={"episodes": 2},
        )
    ]
    assert steps == [512, 1024]


FLAGS = ("--total-steps", "1024", "--compile", "off", "--region.epochs", "1", "--quiet")


def test_the_command_ends_with_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["train", "CartPole-v1", "--runs", str(tmp_path), "--json", "--max_kl", "0.02", *FLAGS]
    )
    out = capsys.readouterr().out
    result = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert result["max_kl"] == 0.02
    assert result["kl_exact_max"] <= 0.02
    assert result["steps"] == 1024
    assert {"run", "return_mean", "rollbacks", "steps_per_second"} <= set(result)
    assert result["health"] == []
    for picture in ("learning.png", "trust-region.png"):
        assert (Path(result["run"]) / picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_goes_wrong_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate of 0.1 and no bound: the first update leaves one action, for good."""
    sick = ["--seed", "1", "--region.learning-rate", "0.1", "--region.no-certify"]
    small = ["--total-steps", "2560", "--compile", "off"]
    command = ["train", "CartPole-v1", "--runs", str(tmp_path), *small, *sick]
    assert main([*command, "--json"]) == 0
    health = {x["metric"]: x for x in json.loads(capsys.readouterr().out)["health"]}
    assert health["rollout/action_share_max"]["healthy"] == [None, 0.99]
    assert health["rollout/action_share_max"]["since"] == 1024
    assert main(command) == 0
    assert "watch: rollout/action_share_max 1 above 0.99 since" in capsys.readouterr().out


def test_resume_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "CartPole-v1", "--runs", str(tmp_path), "--name", "a", *FLAGS])
    run = tmp_path / "a" / "seed-0"
    assert main(["resume", str(run), "--total-steps", "2e3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2048


def test_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "CartPole-v1", "--runs", str(tmp_path), *FLAGS[:-1]])
    out = capsys.readouterr().out
    assert "trust region: largest exact KL(old‖new) of any update" in out
    assert "KL 0." in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("CartPol-v1",), "CartPole-v1"),
        (("CartPole-v1", "--preset", "CartPol"), "did you mean 'CartPole'"),
        (("CartPole-v1", "--region.max-kl", "-1"), "region.max_kl: expected a number above 0"),
        (("CartPole-v1", "--config", "nothing.yaml"), "cannot be read"),
        (("CartPole-v1", "--device", "gpu"), "device: 'gpu' cannot be used"),
        (
            ("CartPole-v1", "--region.dual-clip", "3", "--region.clip", "None"),
            "region.dual_clip: goes with PPO's own clip",
        ),
    ],
)
def test_bad_input_creates_nothing(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault 33."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["train", *args]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_copied_to_tensorboard(tmp_path: Path) -> None:
    """Every iteration, under the same names; and a verdict in words beside the numbers."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    last = finish(start(tiny(log="tensorboard"), tmp_path, "run"))
    events = accumulator(str(last.path / "tensorboard"))
    events.Reload()
    copied = events.Scalars("train/kl_exact")
    lines = [json.loads(line) for line in (last.path / "metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in copied] == [line["step"] for line in lines]
    assert copied[-1].value == pytest.approx(lines[-1]["train/kl_exact"])
    assert {line["train/verdict"] for line in lines} <= {"accepted", "walked_back", "rejected"}


def test_an_unknown_or_missing_copy_is_told_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        tiny(log="tensorbord")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match=r"keel-rl\[trackio\]"):
        start(tiny(log="trackio"), tmp_path, "run")
    assert not list(tmp_path.iterdir())


def test_the_price_of_the_certificate_is_logged(tmp_path: Path) -> None:
    last = finish(start(tiny(), tmp_path, "run"))
    assert 0.0 < last.metrics["time/certify_seconds"] < last.metrics["time/update_seconds"]


def test_small_matrices_are_multiplied_by_one_thread() -> None:
    """Whichever library does it: a second thread would only wait, and take a core for it."""
    open_session(tiny()).source.close()
    threads = [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]
    assert threads
    assert set(threads) == {1}


def test_a_loop_that_a_program_leaves_open_is_closed_at_exit(tmp_path: Path) -> None:
    """Its checkpoint is saved and the lock is given back, without a word on stderr."""
    script = (
        "import keel\n"
        "loop = keel.iterate('CartPole-v1', total_steps=4096, name='left')\n"
        "print(next(loop).steps)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    run = tmp_path / "runs" / "left" / "seed-0"
    assert newest_step(run) == int(done.stdout)
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
