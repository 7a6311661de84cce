"""The directory of a run: names, contents, listing."""

from __future__ import annotations

import json
import math
import re

import pytest
import yaml

from keel.errors import InputError
from keel.tracking import MetricsWriter, RunDirectory, RunError, list_runs, read_config, run_name
from keel.tracking.directory import check_name
from keel.tracking.resume import check_config, config_changes

CONFIG = {"env": "CartPole-v1", "region": {"max_kl": 0.02, "levels": (1, 2)}, "lr": 1e-5}


def create(root, name="demo", **more):
    return RunDirectory.create(root, name, **{"config": CONFIG, **more})


def test_a_run_has_its_files_and_says_what_made_it(tmp_path):
    with create(tmp_path, seed=3, tag="base", choices={"backend": "numpy"}) as run:
        assert run.path == tmp_path / "demo" / "seed-3"
        environment = json.loads((run.path / "environment.json").read_text())
        assert environment["choices"] == {"backend": "numpy"}
        assert environment["packages"]["torch"].startswith("2.")
        assert environment["machine"]["cpus"] >= 1
        assert read_config(run.path)["region"] == {"max_kl": 0.02, "levels": [1, 2]}
        assert read_config(run.path)["lr"] == 1e-5
        assert (run.path / "lock").exists()
        assert run.checkpoints.is_dir()
    assert not (run.path / "lock").exists()


def test_names_are_made_of_safe_characters(tmp_path):
    name = run_name("ALE/Breakout-v5", "ppo")
    assert re.fullmatch(r"ALE-Breakout-v5-ppo-\d{8}-\d{6}", name)
    assert check_name(name) == name


def test_generated_names_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20250101-000000")
    first = run_name("E", "ppo", tmp_path)
    (tmp_path / first).mkdir()
    (tmp_path / f"{first}-2").mkdir()
    assert run_name("E", "ppo", tmp_path) == f"{first}-3"


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b", "x" * 200, "a\0b", "<b>"])
def test_an_unsafe_name_is_refused_with_a_safe_one(tmp_path, name):
    with pytest.raises(InputError, match="for example") as caught:
        create(tmp_path, name)
    assert check_name(re.findall(r"'([^']*)'$", str(caught.value))[0])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_touched(tmp_path):
    create(tmp_path, tag="first").close()
    with pytest.raises(RunError, match="exists already; continue it with `keel resume"):
        create(tmp_path, tag="second")
    assert [run.tag for run in list_runs(tmp_path)] == ["first"]
    assert [p.name for p in (tmp_path / "demo").iterdir()] == ["seed-0"]


def test_a_run_that_came_into_being_meanwhile_is_not_touched(tmp_path, monkeypatch):
    """The check before is a courtesy; the rename at the end decides."""

    def rival(_):
        (tmp_path / "demo" / "seed-0").mkdir()
        (tmp_path / "demo" / "seed-0" / "theirs").touch()
        return {}

    monkeypatch.setattr("keel.tracking.directory.describe_environment", rival)
    with pytest.raises(RunError, match="exists already"):
        create(tmp_path)
    assert [p.name for p in (tmp_path / "demo").rglob("*")] == ["seed-0", "theirs"]


def test_a_failed_creation_leaves_nothing(tmp_path):
    root = tmp_path / "deep" / "runs"
    with pytest.raises(InputError, match="only plain data"):
        create(root, config={"policy": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_is_locked_and_marked(tmp_path):
    run = create(tmp_path)
    run.close("stopped")
    assert list_runs(tmp_path)[0].status == "stopped"
    with RunDirectory.resume(run.path, config=CONFIG) as again:
        assert (again.path / "lock").exists()
        assert list_runs(tmp_path)[0].status == "running"
        record = json.loads((run.path / "run.json").read_text())
        assert len(record["resumed"]) == 1
    assert list_runs(tmp_path)[0].status == "finished"


def test_what_is_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="no such run"):
        RunDirectory.resume(tmp_path / "absent")
    with pytest.raises(RunError, match="not a run"):
        RunDirectory.resume(tmp_path)


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "stopped")]
)
def test_how_a_run_ended_is_recorded(tmp_path, error, status):
    with pytest.raises(error), create(tmp_path):
        raise error
    assert list_runs(tmp_path)[0].status == status


def test_runs_are_listed_with_last_step_and_return(tmp_path):
    with create(tmp_path, "b", tag="x") as run, MetricsWriter(run.metrics) as writer:
        writer.write(10, {"rollout/return_mean": 5.0})
        writer.write(20, {"rollout/return_mean": math.nan})
    create(tmp_path, "a").close()
    (tmp_path / "broken" / "seed-0").mkdir(parents=True)
    found = {run.name: run for run in list_runs(tmp_path)}
    assert (found["b"].step, found["b"].return_mean, found["b"].tag) == (20, 5.0, "x")
    assert found["a"].step is None
    assert math.isnan(found["a"].return_mean)
    assert found["broken"].status == "unreadable"


def test_a_config_with_yaml_tags_is_not_executed(tmp_path):
    run = create(tmp_path)
    run.close()
    canary = tmp_path / "canary"
    (run.path / "config.yaml").write_text(f"a: !!python/object/apply:os.mkdir ['{canary}']")
    with pytest.raises(RunError, match=r"config\.yaml: cannot be read"):
        read_config(run.path)
    assert not canary.exists()


def test_changes_name_absent_fields_too():
    changes = config_changes({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": 4}})
    assert list(map(str, changes)) == ["a: 1 → (absent)", "b.c: 2 → 3", "b.d: (absent) → 4"]


def test_a_section_may_be_allowed_as_a_whole():
    old, new = {"eval": {"episodes": 1}, "evaluate": 1}, {"eval": {"episodes": 2}, "evaluate": 1}
    assert [c.field for c in check_config(old, new, {"eval"})] == ["eval.episodes"]
    with pytest.raises(RunError, match="evaluate: 1 → 2"):
        check_config(old, {**new, "evaluate": 2}, {"eval"})


def test_the_stored_config_is_plain_yaml(tmp_path):
    with create(tmp_path) as run:
        assert yaml.safe_load((run.path / "config.yaml").read_text())["env"] == "CartPole-v1"
