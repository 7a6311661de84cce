"""`keel train --config FILE`: the file's environment counts, and one that is typed goes before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import keel
from keel.cli import language as language_command
from keel.cli.arguments import check_file
from keel.cli.environments import GRAMMAR, parse
from keel.cli.kinds import grammar_for
from keel.cli.train import run
from keel.errors import InputError


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"env": "Pendulum-v1", "total_steps": 4096}))
    return str(path)


def test_the_environment_of_the_file_is_trained_on(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(["--config", file])
    assert (options.env, options.config.env) == ("Pendulum-v1", "Pendulum-v1")
    assert options.config.total_steps == 4096
    assert capsys.readouterr().err == ""


def test_the_preset_is_that_of_the_files_environment(file: str) -> None:
    assert parse(["--config", file]).config.network == parse(["Pendulum-v1"]).config.network
    assert parse(["--config", file]).config.envs == parse(["Pendulum-v1"]).config.envs


@pytest.mark.parametrize(
    "words", [["Acrobot-v1", "--config", "FILE"], ["--seed", "3", "--config", "FILE", "Acrobot-v1"]]
)
def test_the_environment_that_is_typed_wins_and_says_so(
    words: list[str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse([file if word == "FILE" else word for word in words])
    assert options.config.env == "Acrobot-v1"
    assert options.config.total_steps == 4096
    error = capsys.readouterr().err
    assert error == f"keel: training on Acrobot-v1, as asked, not on Pendulum-v1 of {file}\n"


def test_the_same_environment_twice_is_nothing_to_talk_about(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(["Pendulum-v1", "--config", file])
    assert capsys.readouterr().err == ""


def test_of_a_flag_that_is_given_twice_the_last_counts(file: str, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("total_steps: 8192")
    options = parse(["CartPole-v1", "--config", file, "--config", str(other)])
    assert (options.config_file, options.config.total_steps) == (other, 8192)
    twice = parse(["CartPole-v1", "--algo", "trpo", "--algo", "ppo"]).config
    assert twice == parse(["CartPole-v1"]).config


def test_without_any_name_nothing_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("total_steps: 4096")
    with pytest.raises(InputError, match="train what"):
        parse(["--config", str(tmp_path / "x.yaml")])


def test_a_file_of_a_run_on_tokens_trains_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump({"env": "language", "task": "sort", "total_steps": 64}))
    begun: list[Any] = []

    def start(config: Any, *_: Any, **__: Any) -> Iterator[Any]:
        begun.append(config)
        yield from ()

    monkeypatch.setattr("keel.training.runner.start", start)
    assert run(["--config", str(path)]) == 0
    assert [(x.env, x.task, x.total_steps) for x in begun] == [("language", "sort", 64)]
    assert grammar_for(["--config", str(path)]) is language_command.GRAMMAR
    assert grammar_for(["CartPole-v1", "--config", str(path)]) is GRAMMAR
    assert language_command.resolve(["--config", str(path)]).options.config.task == "sort"


def test_language_that_is_typed_goes_before_the_file(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({"env": "CartPole-v1", "total_steps": 64}))
    words = ["language", "--config", str(path)]
    config = language_command.resolve(words).options.config
    assert config.env == "language"
    check_file(config, words, trust_code=False)
    assert "training on language, as asked, not on CartPole-v1" in capsys.readouterr().err


def test_python_takes_the_environment_of_a_file_too(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(config: Any, *_: Any, **__: Any) -> Iterator[Any]:
        yield config

    monkeypatch.setattr("keel.training.runner.start", start)
    (trained,) = keel.iterate(config=file, seed=3)
    assert (trained.env, trained.seed, trained.total_steps) == ("Pendulum-v1", 3, 4096)
    (trained,) = keel.iterate("Acrobot-v1", config=file)
    assert (trained.env, trained.total_steps) == ("Acrobot-v1", 4096)
    with pytest.raises(InputError, match="which environment"):
        keel.train()
