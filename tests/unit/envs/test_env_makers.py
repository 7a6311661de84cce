"""Environments named `module:attribute`: refused before they are called, if they can be none."""

from __future__ import annotations

from pathlib import Path

import maker_toys
import pytest

from keel.cli import main
from keel.envs import make_envs
from keel.envs.faults import EnvError
from keel.errors import InputError


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("Walk", {}, 3),
        ("Walk", {"length": 2}, 2),
        ("Walk", {"max_episode_steps": 1}, 1),
        ("make_walk", {"length": 2}, 2),
        ("make_untyped", {}, 3),
        ("make_anything", {}, 3),
        ("make_short", {}, 1),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "sync"])
def test_a_class_or_a_function_of_gymnasium_is_an_environment(
    name: str, options: dict[str, int], steps: int, backend: str
) -> None:
    envs = make_envs(
        f"maker_toys:{name}",
        2,
        seed=0,
        env_kwargs=options,
        backend=backend,  # type: ignore[arg-type]
    )
    envs.reset(0)
    lengths = [
        x for _ in range(steps) for x in envs.step(maker_toys.np.zeros(2, int)).episode_length
    ]
    envs.close()
    assert lengths == [steps, steps]


def test_a_function_may_make_several_agents() -> None:
    envs = make_envs("maker_toys:make_countdown", 1, seed=0)
    assert envs.backend == "pettingzoo"
    assert envs.agents == ("long", "short")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("subprocess:getoutput", "'subprocess' is a module of Python's standard library"),
        ("os:system", "'os' is a module of Python's standard library"),
        ("builtins:exec", "'builtins' is a module of Python's standard library"),
        ("maker_toys:run_command", "it belongs to 'subprocess'"),
        ("maker_toys:Process", "it belongs to 'subprocess'"),
        ("maker_toys:make_number", "annotated to return something else"),
        ("maker_toys:make_nothing", "annotated to return something else"),
        ("maker_toys:Other", "the class has no reset and step"),
        ("maker_toys:number", "it is a int"),
        ("maker_toys:make_words", "it gave a str"),
    ],
)
def test_what_makes_no_environment_is_refused_before_it_is_called(
    name: str, reason: str, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    options = {"command": f"touch {canary}"} if "make_n" in name else {}
    if name in ("subprocess:getoutput", "maker_toys:run_command"):
        options = {"cmd": f"touch {canary}"}
    maker_toys.CALLS.clear()
    with pytest.raises(EnvError, match="is no Gymnasium or PettingZoo environment") as caught:
        make_envs(name, 1, seed=0, env_kwargs=options)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not canary.exists()
    assert maker_toys.CALLS == []


def test_options_that_it_does_not_take_are_named_before_the_call() -> None:
    with pytest.raises(InputError, match="maker_toys:Walk: got an unexpected keyword argument"):
        make_envs("maker_toys:Walk", 1, seed=0, env_kwargs={"colour": 1})


def test_a_command_that_is_typed_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    words = ["--envs.options", f"cmd=touch {canary}", "--runs", str(tmp_path / "runs"), "--quiet"]
    assert main(["train", "subprocess:getoutput", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "keel: subprocess:getoutput: is no Gymnasium or PettingZoo environment" in error
    assert not canary.exists()
    assert not (tmp_path / "runs").exists()
