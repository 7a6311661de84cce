"""What settings are in force and where they come from: --print-config, --help, presets, envs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from keel.apps.language import config as language
from keel.apps.language import presets as language_presets
from keel.cli import main
from keel.cli.settings import field_help
from keel.config import Config, from_dict, to_dict
from keel.config.origins import leaves
from keel.envs.catalog import catalog, matching
from keel.presets import names, preset


def out(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 0
    return capsys.readouterr().out


def sources(text: str) -> dict[str, str]:
    """The comment behind each setting, by its name without the section."""
    pairs = (line.split("#") for line in text.splitlines() if "#" in line and line[0] != "#")
    return {setting.split(":")[0].strip(): source.strip() for setting, source in pairs}


def test_every_setting_is_printed_with_its_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("region: {max-kl: 0.07, epochs: 3}\nseed: 4\n")
    text = out(
        capsys, "train", "HalfCheetah-v5", "--config", str(file), "--print-config",
        "--region.epochs", "10", "--region.no-gate", "--n-envs=16",
    )  # fmt: skip
    source = sources(text)
    assert source["env"] == "flag"
    assert source["minibatch"] == "preset HalfCheetah"
    assert source["max_kl"] == source["seed"] == f"file {file}"
    assert source["epochs"] == "flag"  # even where the preset has the same value
    assert source["gate"] == source["num"] == "flag"
    assert source["clip"] == "default"
    assert text.splitlines()[0].endswith(
        f"flag before file {file} before preset HalfCheetah before default"
    )
    values = yaml.safe_load(text)
    assert (values["region"]["max_kl"], values["region"]["epochs"]) == (0.07, 10)
    assert len(source) == len({name.rpartition(".")[2] for name, _ in leaves(Config())})


def test_what_is_printed_is_a_file_that_sets_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = out(capsys, "train", "Breakout", "--algo", "trpo", "--print-config")
    assert from_dict(yaml.safe_load(text)) == preset("breakout-trpo")
    file = tmp_path / "all.yaml"
    file.write_text(text)
    again = out(capsys, "train", "--config", str(file), "--print-config", "--json")
    settings = json.loads(again)
    assert settings["env"] == {"value": "Breakout", "source": f"file {file}"}
    assert settings["natural.damping"]["value"] == 0.1


def test_a_language_run_prints_its_settings_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(
        capsys, "train", "language", "--task", "addition", "--kl_coef", "0.5", "--print-config"
    )
    source = sources(text)
    assert source["task"] == "flag"
    assert source["coef"] == "flag"
    assert source["task_options"] == "preset addition"
    assert language.from_dict(yaml.safe_load(text)).kl.coef == 0.5


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("CartPole-v1",), ["# optimizer step: kernels", "# actor: kernels"]),
        (("CartPole-v1", "--algo", "trpo"), ["# actor: kernels", "# Fisher product: kernels"]),
        (
            ("CartPole-v1", "--region.value-clip", "0.2"),
            ["# optimizer step: torch (region.value_clip is set)", "# actor: kernels"],
        ),
        (("no_such:Env",), ["# optimizer step: decided when the environment is known"]),
        (("language",), ["# optimizer step: torch (kernels take no language models)"]),
    ],
)
def test_what_computes_a_run_is_printed_below_its_settings(
    words: tuple[str, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(capsys, "train", *words, "--print-config")
    assert text.splitlines()[-len(lines) :] == lines
    assert yaml.safe_load(text)["env"] == words[0]


def test_one_seed_of_seeds_is_the_seed_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "train", "CartPole-v1", "--seeds", "7", "--print-config")
    assert yaml.safe_load(text)["seed"] == 7


def test_the_environment_may_stand_in_the_file_or_the_preset(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("env: Pendulum-v1\n")
    text = out(capsys, "train", "--config", str(file), "--print-config")
    assert yaml.safe_load(text)["env"] == "Pendulum-v1"
    assert yaml.safe_load(text)["advantage"]["gamma"] == 0.9  # of the preset of Pendulum
    text = out(capsys, "train", "--preset", "Hopper", "--print-config")
    assert yaml.safe_load(text)["env"] == "Hopper-v5"
    assert main(["train", "--print-config"]) == 2
    assert "train what?" in capsys.readouterr().err


def test_help_shows_the_defaults_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(out(capsys, "train", "HalfCheetah-v5", "--help").split())
    assert "--region.learning-rate 0.0005 Adam's step size." in text
    assert "those of HalfCheetah-v5 (preset HalfCheetah)" in text
    assert "--faults" not in text
    text = " ".join(out(capsys, "train", "Hopper-v5", "--algo", "trpo", "-h").split())
    assert "--natural.cg-iters 10" in text
    text = " ".join(out(capsys, "train", "--help").split())
    assert "those of the preset default" in text
    text = " ".join(out(capsys, "train", "language", "--task", "lookup", "--help").split())
    assert "--region.learning-rate 0.001" in text


@pytest.mark.parametrize("args", [("CartPole-v1",), ("language",)])
def test_all_settings_are_shown_on_request(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", *args, "--help-all"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--print-config" in text
    assert "--checkpoints.keep" in text


@pytest.mark.parametrize("kind", [Config, language.Language])
def test_every_setting_has_a_help_text(kind: type) -> None:
    without = [name for name, text in field_help(kind).items() if not text and name != "env"]
    assert without == []


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(out(capsys, "presets", "--json"))}
    assert set(rows) == {*names(), *language_presets.names()}
    assert rows["hopper-trpo"]["trains"] == "Hopper-v5"
    assert rows["hopper-trpo"]["algo"] == "trpo"
    assert rows["lookup"]["trains"] == "language --task lookup"
    assert rows["default"]["trains"] == "any environment"
    assert "CartPole-v1" in out(capsys, "presets")
    settings = yaml.safe_load(out(capsys, "presets", "show", "CartPole"))
    assert to_dict(from_dict(settings)) == to_dict(preset("CartPole"))
    assert json.loads(out(capsys, "presets", "show", "lookup", "--json"))["settings"]["task"] == (
        "lookup"
    )
    assert "keel presets show NAME" in out(capsys, "presets", "--help")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("presets", "show", "CartPol"), "did you mean 'CartPole'?"),
        (("presets", "shwo"), "did you mean 'show'?"),
        (("presets", "show"), "missing: NAME"),
        (("envs", "nothing-like-that"), "nothing is called 'nothing-like-that'"),
        (("envs", "--josn"), "did you mean --json?"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(args)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_environments_are_listed_with_what_they_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row["name"]: row for row in json.loads(out(capsys, "envs", "--json"))}
    assert rows["CartPole-v1"]["preset"] == "CartPole"
    assert rows["CartPole-v1"]["extra"] is None
    assert rows["Hopper-v5"]["extra"] == "mujoco"
    assert rows["Breakout"]["extra"] == "atari"
    assert rows["simple_spread"]["extra"] == "multi-agent"
    assert rows["serving"]["preset"] == "router"
    assert rows["language --task lookup"]["preset"] == "lookup"
    assert "Hopper-v4" not in rows
    monkeypatch.setattr("keel.envs.catalog._installed", lambda module: False)
    table = out(capsys, "envs", "Hopper")
    assert 'pip install "keel-rl[mujoco]"' in table
    assert "CartPole" not in table


def test_a_pattern_finds_names_and_families() -> None:
    entries = catalog()
    assert [x.name for x in matching(entries, "half*v5")] == ["HalfCheetah-v5"]
    assert {x.family for x in matching(entries, "atari")} == {"Atari"}
    assert matching(entries, "") == entries


@pytest.mark.parametrize("name", ["Taxi-v4", "Blackjack-v1", "CarRacing-v3", "Pusher-v5", "land"])
def test_what_is_listed_as_ready_can_be_made(name: str) -> None:
    from keel.envs import make_envs
    from keel.training.session import agent_for

    entry = next(x for x in catalog() if x.name == name)
    if not entry.ready:
        pytest.skip(f"needs {entry.extra}")
    envs = make_envs(name, 1, seed=0)
    try:
        assert agent_for(Config(env=name), envs, 0).initial.numel() > 0
    finally:
        envs.close()
