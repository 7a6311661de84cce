"""Settings, flags, presets, plans and metrics under the names that they had in version 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.ablate.plan import RENAMED as OLD_PLANS
from keel.ablate.plan import plan_named
from keel.cli.environments import resolve
from keel.cli.legacy_flags import translate_train
from keel.compare.sources import load_runs
from keel.config import from_dict, to_dict
from keel.config.origins import leaves
from keel.config.reading import FIELDS, SECTIONS, rename_settings, setting_name
from keel.errors import InputError
from keel.presets import RENAMED as OLD_PRESETS
from keel.presets import names, preset
from keel.tracking import metric, read_metrics

OLD = {
    "bc": {"demos": "there", "coef": 0.5},
    "network": {"kind": "items", "memory_size": 8},
    "natural": {"land": True},
    "envs": {"normalise_obs": True, "normalise-reward": True},
    "critic": {"normalise": "off"},
    "advantage": {"normalise": "robust"},
    "stabiliser": {"recovery": 5},
}
TODAY = {
    "demos": {"path": "there", "coef": 0.5},
    "network": {"kind": "pointer", "recurrent_size": 8},
    "natural": {"rescale_to_kl": True},
    "envs": {"normalize_obs": True, "normalize-reward": True},
    "critic": {"normalize": "off"},
    "advantage": {"normalize": "robust"},
    "stabilizer": {"recovery": 5},
}


def test_files_with_old_names_are_read() -> None:
    assert rename_settings(OLD) == TODAY
    parts = ("network", "natural", "envs", "critic", "advantage")
    old, today = ({name: every[name] for name in parts} for every in (OLD, TODAY))
    assert from_dict(old) == from_dict(today)


def test_settings_of_today_stay_as_they_are() -> None:
    settings = to_dict(preset("land"))
    assert rename_settings(settings) == settings
    known = dict(leaves(preset("default")))
    assert [setting_name(name) for name in known] == list(known)


@given(st.sampled_from([*FIELDS, *SECTIONS]), st.booleans())
def test_an_old_name_leads_to_a_setting_that_exists(old: str, negated: bool) -> None:
    section, dot, leaf = old.partition(".")
    word = f"{section}.no-{leaf.replace('_', '-')}" if dot and negated else old
    today = setting_name(word).replace("-", "_").replace(".no_", ".")
    known = dict(leaves(preset("default")))
    assert today in known or any(name.startswith(f"{today}.") for name in known)
    assert setting_name(today) == today


@pytest.mark.parametrize(
    "settings", [{"bc": {}, "demos": {}}, {"network": {"memory": "both", "recurrent": "both"}}]
)
def test_a_setting_under_both_names_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match="both are given"):
        from_dict(settings)


def test_flags_by_their_old_names_set_what_they_set() -> None:
    old = "X-v0 --bc.demos DIR --bc.coef 0.5 --network.kind items --envs.no-normalise-obs"
    words = translate_train([*old.split(), "--network.memory_size=4", "--natural.no-land"])
    assert words[1:] == [
        *("--demos.path", "DIR", "--demos.coef", "0.5", "--network.kind", "pointer"),
        *("--envs.no-normalize-obs", "--network.recurrent_size", "4"),
        "--natural.no-rescale-to-kl",
    ]
    resolved = resolve(translate_train(["CartPole-v1", "--network.memory", "both"]))
    sources = {setting.name: setting.source for setting in resolved.settings}
    assert resolved.options.config.network.recurrent == "both"
    assert sources["network.recurrent"] == "flag"


@pytest.mark.parametrize("old", OLD_PRESETS)
def test_presets_by_their_old_names(old: str) -> None:
    assert old not in names()
    assert preset(old) == preset(OLD_PRESETS[old])


@pytest.mark.parametrize("old", OLD_PLANS)
def test_plans_by_their_old_names(old: str) -> None:
    assert plan_named(old) == plan_named(OLD_PLANS[old]) is not None


def test_metrics_by_their_old_names(tmp_path: Path) -> None:
    """A run that was begun by version 0.1 and resumed has both in one file."""
    lines = [
        {"step": 1, "ledger/old_token": 0.5, "ledger/spent_token": None,
         "flags": {"ledger/spent_token": "inf"}},
        {"step": 2, "kl/old_token": 0.25, "kl/spent_token": 1.0},
    ]  # fmt: skip
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for wanted in (None, ["kl/old_token", "kl/spent_token"]):
        table = read_metrics(file, wanted)
        assert table["kl/old_token"].tolist() == [0.5, 0.25]
        assert table["kl/spent_token"].tolist() == [float("inf"), 1.0]
        assert not [name for name in table.columns if name.startswith("ledger/")]
    assert metric("ledger/old_token") is metric("kl/old_token")


def test_runs_of_both_versions_differ_by_their_settings_only(tmp_path: Path) -> None:
    for name, text in (("a", "bc: {coef: 0.5}"), ("b", "demos: {coef: 0.5}")):
        folder = tmp_path / name / "seed-0"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"env: X-v0\n{text}\n")
        (folder / "metrics.jsonl").write_text('{"step": 1, "rollout/return_mean": 1.0}\n')
        (folder / "run.json").write_text("{}")
    runs = load_runs([tmp_path / "a", tmp_path / "b"], by="bc.coef")
    assert {run.group for run in runs} == {"coef=0.5"}
