"""`keel.train` and its neighbours: environments as objects, settings by name, loops, resuming."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import face_toys
import gymnasium
import numpy as np
import pytest
import yaml

import keel
from keel import registry
from keel.config import nested
from keel.envs import EnvError, EnvWarning
from keel.errors import InputError
from keel.tracking.directory import read_record
from keel.training.checkpoint import load as load_checkpoint

SMALL: dict[str, Any] = {
    "total_steps": 64,
    "rollout_steps": 16,
    "minibatch": 16,
    "epochs": 1,
    "hidden": [4],
    "evaluation": {"episodes": 2},
    "num": 2,
    "compile": "off",
    "normalize_reward": False,
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KEEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(Path(face_toys.__file__).parent)
    return


def train(env: Any, name: str = "run", **settings: Any) -> keel.Run:
    return keel.train(env, name=name, **{**SMALL, **settings})


def config_of(run: keel.Run) -> Any:
    return yaml.safe_load((run.path / "config.yaml").read_text())


def test_a_run_has_a_path_a_policy_metrics_and_evaluations(tmp_path: Path) -> None:
    run = train("CartPole-v1")
    assert run.path == Path("runs/run/seed-0")
    assert run.metrics.step.tolist() == [32, 64]
    assert run.policy.step in (32, 64)
    assert run.evaluate(3).returns == keel.evaluate(run.path, episodes=3).returns
    assert repr(run).startswith("Run('runs/run/seed-0', finished, 64 steps, return ")
    with pytest.raises(TypeError, match=r"for iteration in keel\.iterate\(…\)"):
        list(run)


SOURCES = {
    "id": "CartPole-v1",
    "class": face_toys.Five,
    "function": face_toys.make_five,
    "lambda": lambda: face_toys.Five(3.0),
    "instance": face_toys.Five(3.0),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_environments_of_every_kind_train_and_are_evaluated(kind: str) -> None:
    run = train(SOURCES[kind])
    assert read_record(run.path)["status"] == "finished"
    paid = {"class": 5.0, "function": 5.0, "lambda": 15.0, "instance": 15.0}
    if kind in paid:
        assert run.evaluate(2).returns == [paid[kind]] * 2
        assert keel.evaluate(run, env=lambda: face_toys.Five(2.0), episodes=1).mean == 10.0
    stored = {"class": "face_toys:Five", "function": "face_toys:make_five", "id": "CartPole-v1"}
    assert config_of(run)["env"].startswith(stored.get(kind, "object:"))
    assert keel.resume(run, total_steps=96).metrics.step.tolist() == [32, 64, 96]


def test_what_was_passed_is_not_touched() -> None:
    env = face_toys.Five()
    train(env)
    assert (env.resets, env.closed) == (0, False)


def test_an_environment_that_cannot_be_copied_trains_alone_and_is_given_back() -> None:
    env = face_toys.Locked()
    settings = {key: value for key, value in SMALL.items() if key != "num"}
    with pytest.warns(EnvWarning, match="cannot be copied, so there are no evaluations"):
        run = keel.train(env, name="locked", **settings)
    assert config_of(run)["envs"]["num"] == 1
    assert "eval/return_mean" not in run.metrics.columns
    assert not env.closed
    with pytest.raises(InputError, match="cannot be copied; pass a callable"):
        train(env, "two")
    assert not Path("runs/two").exists()


def test_a_vector_environment_says_how_many_there_are() -> None:
    venv = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    settings = {key: value for key, value in SMALL.items() if key != "num"}
    run = keel.train(venv, name="vector", **settings)
    assert config_of(run)["envs"]["num"] == 3
    assert run.metrics.step.tolist() == [48, 96]
    assert len(run.evaluate(3).returns) == 3
    with pytest.raises(InputError, match=r"envs.num: is 2, the vector environment has 3"):
        train(venv, "two")


def test_agents_of_a_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "envs")
    import parallel_toys

    run = train(lambda: parallel_toys.Countdown(), critic={"normalize": "off"})
    assert set(run.evaluate(1).agents) == {"long", "short"}
    obs, info = (env := parallel_toys.Countdown()).reset(seed=0)
    masks = {"long": info["long"]["action_mask"]}
    actions, _ = run.policy.act(obs, mask=masks)
    assert set(actions) == set(env.agents)


def test_wrappers_go_around_each_other_the_innermost_first() -> None:
    run = train(face_toys.Five, wrappers=[face_toys.Double, face_toys.add_ten])
    assert config_of(run)["envs"]["wrappers"] == ["face_toys:Double", "face_toys:add_ten"]
    assert run.evaluate(1).returns == [5 * (2.0 * 1.0 + 10.0)]
    other = train(face_toys.Five, "other", wrappers=[face_toys.add_ten, face_toys.Double])
    assert other.evaluate(1).returns == [5 * 2.0 * (1.0 + 10.0)]


def elsewhere(code: str) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path.insert(0, {str(Path(face_toys.__file__).parent)!r})\n{code}"
    words = [sys.executable, "-c", script]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def test_another_process_finds_what_has_an_import_path_and_asks_for_the_rest() -> None:
    train(face_toys.Five, "found", wrappers=[face_toys.Double])
    train(lambda: face_toys.Five(3.0), "lost")
    done = elsewhere(
        "import keel, face_toys\n"
        "print(keel.resume('runs/found', total_steps=96).evaluate(1).mean)\n"
        "print(keel.load('runs/lost').act([0.0, 0.0])[1])\n"
        "for action in (keel.resume, keel.evaluate):\n"
        "    try: action('runs/lost')\n"
        "    except keel.KeelError as error: print(error)\n"
        "env = lambda: face_toys.Five(4.0)\n"
        "print(keel.evaluate('runs/lost', env=env, episodes=1).mean)\n"
        "print(keel.resume('runs/lost', env=env, total_steps=96).evaluate(1).mean)\n"
        "try: keel.resume('runs/found', env=env, total_steps=128)\n"
        "except keel.InputError as error: print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [lines[i] for i in (0, 1, 4, 5)] == ["10.0", "None", "20.0", "20.0"]
    for line in lines[2:4]:
        assert "was passed from Python and has no import path, so no other process" in line
    assert "was trained with face_toys:Five, not with object:lambda_" in lines[6]


def test_code_that_a_file_names_as_a_wrapper_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_objects", {})  # nothing was passed in this process
    file = tmp_path / "settings.yaml"
    file.write_text("env: CartPole-v1\nenvs: {wrappers: [downloaded_toys:Double]}\n")
    with pytest.raises(InputError, match=r"envs\.wrappers downloaded_toys:Double.*trust_code=True"):
        keel.train(config=file)
    file.write_text("env: CartPole-v1\nenvs: {wrappers: [gymnasium.wrappers:NumpyToTorch, 3]}\n")
    with pytest.raises(InputError, match=r"envs\.wrappers"):
        keel.train(config=file)


def test_settings_by_their_last_name() -> None:
    run = train("CartPole-v1", max_kl=0.02, **{"region.clip": 0.1}, advantage={"lam": 0.9})
    config = config_of(run)
    region = config["region"]
    assert (region["max_kl"], region["clip"], config["advantage"]["lam"]) == (0.02, 0.1, 0.9)


def test_what_stands_for_a_section_goes_with_settings_of_it() -> None:
    assert nested({"network": "mlp", "hidden": [4]}) == {"network": {"kind": "mlp", "hidden": [4]}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mlp"}, r"^kind: may be network\.kind, critic\.kind; say which, for example"),
        ({"max_k": 0.1}, r"^unknown setting max_k; did you mean region\.max_kl\?$"),
        ({"clip": 0.1, "region": {"clip": 0.2}}, r"^region\.clip: is given twice$"),
        ({"max_kl": "much"}, r"^region\.max_kl: expected a number, got 'much'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        keel.iterate("CartPole-v1", **settings)


def test_nothing_happens_before_the_first_iteration_and_all_is_closed_after_the_last() -> None:
    loop = keel.iterate(face_toys.Five, name="loop", **SMALL)
    assert not Path("runs").exists()
    first = next(loop)
    assert read_record(first.path)["status"] == "running"
    assert (first.steps, first.done) == (32, False)
    loop.close()
    assert read_record(first.path)["status"] == "stopped"
    assert load_checkpoint(first.path).step == 32


def test_an_error_in_the_users_own_loop_leaves_a_checkpoint() -> None:
    def loop() -> None:
        for _ in keel.iterate(face_toys.Five, name="raised", **SMALL):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    gc.collect()  # the error holds the frame, and with it the loop
    run = Path("runs/raised/seed-0")
    assert read_record(run)["status"] == "stopped"
    assert load_checkpoint(run).step == 32


def test_hyperparameters_that_are_set_hold_and_are_kept() -> None:
    settings = {**SMALL, "total_steps": 160, "schedule": "linear", "entropy_coef": 0.01}
    rates, clips, bounds, entropies = [], [], [], []
    for iteration in keel.iterate("CartPole-v1", name="set", **settings):
        metrics = iteration.metrics
        rates.append(metrics["train/learning_rate"])
        clips.append(metrics["train/clip_range"])
        bounds.append(metrics["train/max_kl"])
        entropies.append(metrics["train/entropy_coef"])
        if iteration.steps == 32:
            iteration.set(learning_rate=1e-5, clip=0.05, max_kl=0.004, entropy_coef=0.5)
        if iteration.steps == 96:
            break
    assert rates[1:] == [1e-5, 1e-5]
    assert rates[0] != 1e-5
    assert (clips[1:], bounds[1:], entropies[1:]) == ([0.05] * 2, [0.004] * 2, [0.5] * 2)
    data = load_checkpoint(iteration.path).data
    assert data["hparams"]["clip_high"] == 0.05
    resumed = keel.resume(iteration.path)
    assert resumed.metrics["train/learning_rate"].tolist()[3:] == [1e-5, 1e-5]


def test_hyperparameters_that_cannot_be_set() -> None:
    with pytest.raises(InputError, match=r"^set: 'learning_rat' is not one of .*; did you mean"):
        next(keel.iterate("CartPole-v1", name="a", **SMALL)).set(learning_rat=1.0)
    with pytest.raises(InputError, match=r"^region.learning_rate: expected a number above 0"):
        next(keel.iterate("CartPole-v1", name="b", **SMALL)).set(learning_rate=-1.0)
    settings = {**SMALL, "entropy_coef": 0.0}
    with pytest.raises(InputError, match="no entropy bonus"):
        next(keel.iterate("CartPole-v1", name="c", **settings)).set(entropy_coef=0.1)
    with pytest.raises(InputError, match="clip: this run has none"):
        next(keel.iterate("CartPole-v1", name="d", **{**SMALL, "clip": None})).set(clip=0.1)


def test_a_callback_sees_every_iteration_and_may_stop() -> None:
    seen: list[int] = []

    def on_iteration(iteration: Any) -> bool:
        seen.append(iteration.steps)
        return iteration.steps < 64

    run = train("CartPole-v1", total_steps=640, on_iteration=on_iteration)
    assert seen == [32, 64]
    assert read_record(run.path)["status"] == "stopped"
    assert load_checkpoint(run.path).step == 64


def test_a_run_from_the_weights_of_another() -> None:
    old = train("CartPole-v1", "old", normalize_obs=True)
    last = load_checkpoint(old.path, 64)
    settings = {**SMALL, "normalize_obs": True, "learning_rate": 1e-30, "total_steps": 32}
    new = keel.train("CartPole-v1", name="new", start_from=last.path, **settings)
    weights = load_checkpoint(new.path).weights
    for name, x in last.weights.items():
        np.testing.assert_allclose(weights[name].numpy(), x.numpy(), atol=1e-12)
    assert load_checkpoint(new.path).data["steps"] == 32
    count = "obs_normalizer/obs.weight"
    seen = load_checkpoint(new.path).tensors[count] - last.tensors[count]
    assert 24 <= seen <= 32  # all rows but those of autoresets
    record = json.loads((new.path / "environment.json").read_text())
    assert record["choices"]["start_from"] == str(last.path.resolve())
    with pytest.raises(keel.KeelError, match="start_from"):
        train("CartPole-v1", "wide", start_from=old.path, hidden=[5])
    with pytest.raises(keel.KeelError, match="start_from"):
        train("Acrobot-v1", "acrobot", start_from=old.path)
    assert not Path("runs/wide").exists()


def test_progress_is_lines_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    train("CartPole-v1", "quiet")
    assert capsys.readouterr().out == ""
    train("CartPole-v1", "told", progress=True)
    assert "64/64" in capsys.readouterr().out


class Nothing:
    """No environment."""


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(InputError, match="expected an id, a class, a callable or an environment"):
        keel.train(3)
    with pytest.raises(EnvError, match="the class has no reset and step"):
        train(Nothing)
    assert keel.check_env(face_toys.Five) == []
    assert keel.check_env(lambda: face_toys.Five(float("nan"))) != []


def test_a_run_on_tokens_begins_and_goes_on_in_the_same_way() -> None:
    small = {
        "task": "addition",
        "total_steps": 8,
        "threads": 1,
        "model": {"hidden": 16, "layers": 1, "heads": 2},
        "sample": {"prompts": 2, "group": 2},
        "region": {"minibatch": 4},
        "warmup": {"examples": 8, "epochs": 1, "minibatch": 4},
        "evaluation": {"prompts": 2},
    }
    run = keel.train("language", name="words", **small)
    assert run.metrics.step.tolist() == [4, 8]
    assert keel.resume(run, total_steps=12).metrics.step.tolist() == [4, 8, 12]
    loop = keel.iterate("language", name="set", **small)
    next(loop).set(learning_rate=1e-6)
    assert next(loop).metrics["train/learning_rate"] == 1e-6
    loop.close()
