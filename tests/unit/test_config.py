"""Configuration: strict, with suggestions, before anything is created. Faults 29, 33 and 34."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keel.config import Config, anchored, check, from_dict, load, options, to_dict
from keel.errors import InputError
from keel.presets import names, preset, preset_for


def test_a_config_survives_its_own_file(tmp_path: Path) -> None:
    import yaml

    config = from_dict({"seed": 3, "region": {"max_kl": 0.02}, "network": {"hidden": [32, 32]}})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_dict(config)))
    assert load(path) == config


def test_what_is_missing_comes_from_the_base() -> None:
    base = from_dict({"seed": 7, "region": {"epochs": 3}})
    config = from_dict({"region": {"max-kl": "0.01"}}, base)
    assert (config.seed, config.region.epochs, config.region.max_kl) == (7, 3, 0.01)


def test_numbers_may_be_written_as_people_write_them() -> None:
    config = from_dict({"total_steps": "1e6", "region": {"learning_rate": 1, "clip": None}})
    assert config.total_steps == 1_000_000
    assert config.region.learning_rate == 1.0
    assert config.region.clip is None


def test_derived_sizes() -> None:
    sizes = {"total_steps": 1000, "rollout_steps": 16, "envs": {"num": 8}}
    config = from_dict({**sizes, "region": {"minibatch": 64}})
    assert (config.batch, config.iterations) == (128, 8)


BAD = {
    "unknown key regoin; did you mean region?": {"regoin": {}},
    "unknown key region.max_lk; did you mean region.max_kl?": {"region": {"max_lk": 1}},
    "region: expected keys and values, got 3": {"region": 3},
    "seed: expected a whole number, got 1.5": {"seed": 1.5},
    "seed: expected a whole number, got True": {"seed": True},
    "region.max_kl: expected a number, got 'lots'": {"region": {"max_kl": "lots"}},
    "region.max_kl: expected a number, got nan": {"region": {"max_kl": float("nan")}},
    "envs.guard: expected true or false, got 'yes'": {"envs": {"guard": "yes"}},
    "network.hidden: expected a list of whole numbers, got 64": {"network": {"hidden": 64}},
    "compile: 'atuo' is not one of auto, on, off; did you mean 'auto'?": {"compile": "atuo"},
    "total_steps: expected a number above 0, got 0": {"total_steps": 0},
    "envs.num: expected a number above 0, got 0": {"envs": {"num": 0}},
    "region.critic_learning_rate: expected a number above 0, got 0.0": {
        "region": {"critic_learning_rate": 0.0}
    },
    "region.critic_learning_rate: belongs to --algo ppo": {
        "algo": "trpo",
        "region": {"critic_learning_rate": 1e-3},
    },
    "region.max_kl: expected a number above 0, got -1.0": {"region": {"max_kl": -1}},
    "explore.entropy_coef: expected no negative number": {"explore": {"entropy_coef": -0.1}},
    "advantage.gamma: expected a number from 0 to 1": {"advantage": {"gamma": 1.5}},
    "region.clip: expected a number between 0 and 1": {"region": {"clip": 2.0}},
    "region.minibatch: 4096 rows, but a rollout has only 1024": {"region": {"minibatch": 4096}},
    "region.early_stop: needs region.target_kl": {"region": {"early_stop": "epoch"}},
    "region.adaptive_rate: needs region.target_kl": {"region": {"adaptive_rate": True}},
    "network.hidden: expected widths above 0": {"network": {"hidden": []}},
}


@pytest.mark.parametrize("message", BAD)
def test_a_mistake_is_named_with_what_to_do(message: str) -> None:
    with pytest.raises(InputError) as error:
        from_dict(BAD[message])
    assert message in str(error.value)


def test_yaml_is_data_and_never_code(tmp_path: Path) -> None:
    """Fault 34: a tag that would run a command is refused, and nothing runs."""
    canary = tmp_path / "canary"
    path = tmp_path / "evil.yaml"
    path.write_text(f"env: !!python/object/apply:os.system ['touch {canary}']\n")
    with pytest.raises(InputError, match="not plain YAML"):
        load(path)
    assert not canary.exists()


def test_a_file_that_is_missing_or_no_mapping_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="expected keys and values, got list"):
        load(tmp_path / "list.yaml")


@pytest.mark.parametrize("name", names())
def test_every_preset_is_valid(name: str) -> None:
    check(preset(name))


def test_presets_are_found_by_environment() -> None:
    assert preset_for("CartPole-v1")[0] == "CartPole"
    assert preset_for("ALE/Unheard-v5")[0] == "default"
    assert preset_for("gymnasium:HalfCheetah-v5")[0] == "HalfCheetah"
    assert preset_for("envpool:HalfCheetah-v5", "trpo")[0] == "halfcheetah-trpo"
    assert preset_for("mine:HalfCheetah-v5")[0] == "default"  # somebody else's, of that name
    with pytest.raises(InputError, match="did you mean 'CartPole'"):
        preset("CartPol")


def test_configs_are_frozen() -> None:
    assert replace(Config(), seed=1) != Config()
    with pytest.raises(AttributeError):
        Config().seed = 3  # type: ignore[misc]


def test_a_recorded_trace_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = from_dict({"env": "serving", "envs": {"options": "trace=azure.csv, requests=50"}})
    named = options(anchored(config))
    assert named == {"trace": str(tmp_path / "azure.csv"), "requests": 50}
    assert anchored(anchored(config)) == anchored(config)
    other = from_dict({"env": "CartPole-v1", "envs": {"options": "trace=azure.csv"}})
    assert anchored(other) == other  # another environment's options are its own
