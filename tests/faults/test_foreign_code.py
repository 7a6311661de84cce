"""A downloaded run or file that names code: no command imports it unless it is told to.

Each case puts a canary into one setting and runs one command on the file that holds it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import yaml

from keel import resume
from keel.apps.language.config import from_dict as language_config
from keel.cli import main
from keel.config import from_dict
from keel.errors import InputError
from keel.tracking.record import CONFIG, dump_config, read_config
from keel.training.api import train
from keel.training.policy import evaluate_policy, open_policy
from keel.training.runner import resume as resume_run
from keel.training.runner import start
from keel.trust import UntrustedCodeError

MODULE = "canary_code"
SOURCE = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

Path({canary!r}).touch()
if "Canary-v0" not in gymnasium.registry:
    gymnasium.register("Canary-v0", f"{{__name__}}:Env", max_episode_steps=20)

class Env(CartPoleEnv):
    pass

def group(obs):
    import numpy as np
    return np.zeros(obs["obs"].shape[:2], np.int64)

def spread(action_space):
    from keel.distributions.actions import Categorical
    return Categorical(int(action_space.n))

def score(example, text):
    return 0.0

def estimate(score):
    return score
"""
SMALL = {
    "total_steps": 64,
    "rollout_steps": 16,
    "envs": {"num": 2, "backend": "sync"},
    "network": {"hidden": [4]},
    "region": {"minibatch": 32, "epochs": 1},
    "evaluation": {"episodes": 1},
    "compile": "off",
}
"""Settings that CartPole is trained with."""
TOKENS = {
    "env": "language",
    "task": "lookup",
    "task_options": "letters=1,facts=4",
    "total_steps": 8,
    "threads": 1,
    "model": {"hidden": 16, "layers": 1, "heads": 2},
    "sample": {"prompts": 2, "group": 4},
    "region": {"minibatch": 8},
    "warmup": {"examples": 0},
    "evaluation": {"prompts": 4},
    "preflight": False,
}

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "environment class": {"env": f"{MODULE}:Env"},
    "Gymnasium id of a module": {"env": f"{MODULE}:Canary-v0"},
    "command": {"env": "subprocess:getoutput", "envs": {"options": "cmd=touch {canary}"}},
    "option": {"envs": {"options": f"env_id={MODULE}:Canary-v0"}},
}
GROUPS: dict[str, dict[str, Any]] = {
    "group function": {"advantage": {"normalize": "group", "group": f"{MODULE}:group"}},
}
DISTRIBUTION: dict[str, Any] = {"network": {"distribution": f"{MODULE}:spread"}}
REWARDS: dict[str, dict[str, Any]] = {
    "reward function": {"reward": {"functions": f"task,{MODULE}:score*0.5"}},
    "estimator": {"algo": f"{MODULE}:estimate"},
}
NAMED = {
    "reward function": "reward.functions canary_code:score",
    "estimator": "algo canary_code:estimate",
}
"""How the refusal lists them."""


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (*_, last) = start(from_dict(SMALL), tmp_path_factory.mktemp("runs"), "cart")
    return last.path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (*_, last) = start(language_config(TOKENS), tmp_path_factory.mktemp("runs"), "words")
    return last.path


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there as soon as the module in the working directory was imported."""
    place = tmp_path / "canary"
    (tmp_path / f"{MODULE}.py").write_text(SOURCE.format(canary=str(place)))
    monkeypatch.setenv("KEEL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("keel.tracking.plots.draw_run", lambda _: [])  # takes seconds
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.delitem(gymnasium.registry, "Canary-v0", raising=False)
    return place


def changed(settings: dict[str, Any], changes: dict[str, Any], canary: Path) -> dict[str, Any]:
    """Settings with a canary in one of them."""
    result = dict(settings)
    for key, value in changes.items():
        if isinstance(value, dict):
            value = {k: v.format(canary=canary) for k, v in value.items()}
            result[key] = {**result.get(key, {}), **value}
        else:
            result[key] = value
    return result


def downloaded(run: Path, changes: dict[str, Any], canary: Path) -> Path:
    """A copy of a run whose file names the canary."""
    copy = canary.parent / "downloads" / "theirs" / run.name
    shutil.copytree(run, copy)
    settings = changed(read_config(run), changes, canary)
    (copy / CONFIG).write_bytes(dump_config(settings))
    return copy


def file_of(settings: dict[str, Any], name: str = "theirs.yaml") -> str:
    Path(name).write_text(yaml.safe_dump(settings))
    return name


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that did nothing."""
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


NEEDS_ENVIRONMENT: dict[str, Callable[[str], list[str]]] = {
    "evaluate": lambda run: ["evaluate", run, "--episodes", "1"],
    "video": lambda run: ["evaluate", run, "--episodes", "1", "--video", "x.gif"],
    "demos record": lambda run: ["demos", "record", "CartPole-v1", "--policy", run, "--out", "d"],
    "resume": lambda run: ["resume", run, "--total-steps", "128", "--quiet"],
}
NEEDS_NONE: dict[str, Callable[[str], list[str]]] = {
    "export": lambda run: ["export", run, "--onnx", "x.onnx"],
    "runs": lambda run: ["runs", "list", "--runs", str(Path(run).parents[1])],
    "runs export": lambda run: ["runs", "export", run, "--csv", "x.csv"],
    "compare": lambda run: ["compare", run, run],
    "route": lambda run: ["route", "--policy", run, "--backends", "http://127.0.0.1:9"],
    "land": lambda run: ["land", run, "--maps", "1"],
    "serving judge": lambda run: ["serving", "judge", run, "--seeds", "1"],
}


CASES = [
    (command, field)
    for command in (*NEEDS_ENVIRONMENT, *NEEDS_NONE)
    for field in (*ENVIRONMENTS, *GROUPS)
    if (command, field) != ("video", "group function")  # as evaluate, but takes long
]


@pytest.mark.parametrize(("command", "field"), CASES)
def test_a_downloaded_run_executes_nothing(
    command: str,
    field: str,
    cartpole: Path,
    canary: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported: list[object] = []
    monkeypatch.setattr("keel.training.export.export_onnx", _stop(exported))
    run = downloaded(cartpole, {**ENVIRONMENTS, **GROUPS}[field], canary)
    words = {**NEEDS_ENVIRONMENT, **NEEDS_NONE}[command](str(run))
    imports_it = command == "resume" or (command in NEEDS_ENVIRONMENT and field in ENVIRONMENTS)
    if command == "demos record" and field != "option":
        imports_it = False  # the environment was typed
    if imports_it:
        before = sorted(run.rglob("*"))
        assert "--trust-code" in refused(words, capsys)
        assert sorted(run.rglob("*")) == before
    else:
        status = main(words)
        assert status == 0 or command not in ("evaluate", "runs", "runs export", "compare")
        assert command != "export" or exported  # the policy was opened all the same
    assert not canary.exists()
    assert MODULE not in sys.modules


@pytest.mark.parametrize("command", ["evaluate", "demos record", "resume", "export"])
def test_what_opens_a_policy_imports_no_distribution_of_a_downloaded_run(
    command: str, cartpole: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = downloaded(cartpole, DISTRIBUTION, canary)
    words = {**NEEDS_ENVIRONMENT, **NEEDS_NONE}[command](str(run))
    assert "network.distribution canary_code:spread" in refused(words, capsys)
    assert not canary.exists()
    if command == "evaluate":
        assert main([*words, "--trust-code"]) == 0
        assert canary.exists()


def test_a_downloaded_file_imports_no_distribution(
    canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(changed({"env": "CartPole-v1", **SMALL}, DISTRIBUTION, canary))
    error = refused(["train", "--config", file, "--quiet"], capsys)
    assert "network.distribution canary_code:spread" in error
    assert not canary.exists()
    assert not Path("runs").exists()


def _stop(opened: list[object]) -> Callable[[object, Path], None]:
    """Stand in for the writing of an ONNX file, which takes seconds."""

    def export(policy: object, _: Path) -> None:
        opened.append(policy)
        raise InputError("far enough")

    return export


@pytest.mark.parametrize("command", ["evaluate", "resume"])
@pytest.mark.parametrize("field", ["environment class", "Gymnasium id of a module"])
def test_trusted_code_is_imported(
    command: str, field: str, cartpole: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So the canary sings where it is let out: the test above can fail."""
    run = downloaded(cartpole, ENVIRONMENTS[field], canary)
    main([*NEEDS_ENVIRONMENT[command](str(run)), "--trust-code"])
    assert canary.exists()


def test_a_trusted_function_is_imported(cartpole: Path, canary: Path) -> None:
    run = downloaded(cartpole, GROUPS["group function"], canary)
    assert main(["resume", str(run), "--total-steps", "128", "--quiet", "--trust-code"]) == 0
    assert canary.exists()


def test_a_command_stays_refused_even_if_it_is_trusted(
    cartpole: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trust lets code be imported; what is no environment is still never called."""
    run = downloaded(cartpole, ENVIRONMENTS["command"], canary)
    error = refused(["evaluate", str(run), "--trust-code"], capsys)
    assert "subprocess:getoutput: is no Gymnasium or PettingZoo environment" in error
    assert not canary.exists()


FILES: dict[str, Callable[[str], list[str]]] = {
    "train": lambda file: ["train", "--config", file, "--quiet"],
    "train seeds": lambda file: ["train", "--config", file, "--seeds", "0", "1"],
    "tune": lambda file: ["tune", "CartPole-v1", "--config", file, "--trials", "1"],
    "ablate": lambda file: ["ablate", "CartPole-v1", "--config", file, "--vary", "seed=0,1"],
}


FILE_CASES = [
    (command, field)
    for command in FILES
    for field in (*ENVIRONMENTS, *GROUPS)
    # the environment of tune and ablate is always typed
    if command.startswith("train") or field in ("option", "group function")
]


@pytest.mark.parametrize(("command", "field"), FILE_CASES)
def test_a_downloaded_file_executes_nothing(
    command: str,
    field: str,
    canary: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is started
    base = {"env": "CartPole-v1", **SMALL}
    file = file_of(changed(base, {**ENVIRONMENTS, **GROUPS}[field], canary))
    error = refused(FILES[command](file), capsys)
    assert f"keel: {file}: names code from outside of Keel" in error
    assert not canary.exists()
    assert MODULE not in sys.modules
    assert not Path("runs").exists()


def test_the_settings_of_a_downloaded_file_are_printed_without_its_code(
    canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of({**SMALL, **ENVIRONMENTS["environment class"]})
    assert main(["train", "--config", file, "--print-config"]) == 0
    assert capsys.readouterr().out.endswith("decided when the environment is known\n")
    assert not canary.exists()
    assert main(["train", f"{MODULE}:Env", "--config", file, "--print-config"]) == 0
    assert capsys.readouterr().out.endswith("# actor: kernels\n")
    assert canary.exists()


@pytest.mark.parametrize("place", ["settings", "vary", "variants", "stops", "env"])
def test_a_downloaded_plan_executes_nothing(
    place: str, canary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    name = f"{MODULE}:group"
    plan: dict[str, Any] = {"env": "CartPole-v1", "settings": dict(SMALL), "vary": {"seed": [0, 1]}}
    if place == "settings":
        plan["settings"]["advantage.group"] = name
    elif place == "vary":
        plan["vary"] = {"advantage.group": [name]}
    elif place == "env":
        plan["env"] = f"{MODULE}:Env"
    else:
        if place == "variants":
            del plan["vary"]
        plan[place] = {"one": {"advantage.group": name}}
    error = refused(["ablate", file_of(plan)], capsys)
    assert MODULE in error
    assert "--trust-code" in error
    assert not canary.exists()
    assert main(["ablate", "theirs.yaml", "--dry-run"]) == 0  # imports nothing
    assert not canary.exists()


@pytest.mark.parametrize("field", REWARDS)
@pytest.mark.parametrize("command", ["evaluate", "resume", "export", "runs", "compare", "route"])
def test_a_downloaded_run_on_tokens_executes_nothing(
    command: str, field: str, tokens: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = downloaded(tokens, REWARDS[field], canary)
    words = {**NEEDS_ENVIRONMENT, **NEEDS_NONE}[command](str(run))
    if command == "resume":
        assert NAMED[field] in refused(words, capsys)
    else:
        status = main(words)
        assert status == 0 or command in ("export", "route")
    assert not canary.exists()
    assert MODULE not in sys.modules


@pytest.mark.parametrize("field", REWARDS)
def test_a_downloaded_file_of_a_run_on_tokens_executes_nothing(
    field: str, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of(changed(TOKENS, REWARDS[field], canary))
    for words in (["train", "language", "--config", file], ["train", "--config", file]):
        assert NAMED[field] in refused(words, capsys)
    assert not canary.exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize("field", REWARDS)
def test_trusted_functions_of_tokens_are_imported(field: str, tokens: Path, canary: Path) -> None:
    run = downloaded(tokens, REWARDS[field], canary)
    with pytest.raises(UntrustedCodeError):
        resume_run(run)
    assert not canary.exists()
    resume_run(run, trust_code=True).close()
    assert canary.exists()


def test_the_same_from_python(cartpole: Path, canary: Path) -> None:
    run = downloaded(cartpole, ENVIRONMENTS["environment class"], canary)
    file = file_of({**SMALL, "env": f"{MODULE}:Env"})
    with pytest.raises(UntrustedCodeError, match="trust_code=True"):
        resume(run)
    with pytest.raises(UntrustedCodeError):
        train(config=file)
    policy = open_policy(run)  # weights and spaces, without the environment
    assert policy.observation_space.shape == (4,)
    with pytest.raises(UntrustedCodeError):
        evaluate_policy(policy, episodes=1)
    assert not canary.exists()
    assert evaluate_policy(open_policy(run, trust_code=True), episodes=1).returns
    assert canary.exists()


def test_an_older_checkpoint_asks_its_environment_only_if_it_is_trusted(
    cartpole: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before checkpoints held the spaces, a policy could not be opened without them."""
    run = downloaded(cartpole, ENVIRONMENTS["environment class"], canary)
    monkeypatch.setattr("keel.training.policy.INTERFACE", "not there")
    with pytest.raises(UntrustedCodeError):
        open_policy(run)
    assert not canary.exists()
    assert open_policy(run, trust_code=True).masked is False


def test_what_was_typed_is_trusted_and_remembered(
    canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run is trained with code named on the command line; afterwards it is one's own."""
    file = file_of(SMALL, "mine.yaml")
    words = ["train", f"{MODULE}:Env", "--config", file, "--name", "mine", "--quiet"]
    assert main([*words, "--advantage.group", f"{MODULE}:group"]) == 0
    assert main(["evaluate", "runs/mine", "--episodes", "1"]) == 0
    assert main(["resume", "runs/mine/seed-0", "--total-steps", "128", "--quiet"]) == 0
    assert main(["train", "--config", "runs/mine/seed-0/config.yaml", "--quiet"]) == 0
    capsys.readouterr()
    # the same code, found in another folder: a download with a module of the same name
    elsewhere = canary.parent / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(f"{MODULE}.py", elsewhere)
    shutil.move("runs", elsewhere)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        patch.setattr(sys, "path", [x for x in sys.path if x != str(canary.parent)])
        patch.delitem(sys.modules, MODULE)
        assert "--trust-code" in refused(["evaluate", "runs/mine"], capsys)


def test_children_inherit_trust(canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was asked about once; its cells are not asked again."""
    from keel.ablate.plan import read_plan
    from keel.ablate.work import tasks_of
    from keel.cli.seeds import _command

    plan = {"env": f"{MODULE}:Env", "settings": SMALL, "vary": {"region.epochs": [1]}}
    tasks = tasks_of(read_plan(Path(file_of(plan))), Path("runs"))
    for task in tasks:
        words = task.command()
        assert "--trust-code" in words
        assert main(words[3:]) == 0
    assert canary.exists()
    plan["env"] = "CartPole-v1"
    assert "--trust-code" not in tasks_of(read_plan(Path(file_of(plan))), Path("r"))[0].command()
    assert "--trust-code" in _command(["x.yaml", "--trust-code", "--seeds", "0", "1"], "n", 0)
