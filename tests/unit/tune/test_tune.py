"""Searching settings: the space, the study, and the trust region as a constraint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.config import from_dict
from keel.errors import InputError
from keel.tune import DEFAULT, Found, Range, Tuning, best_of, open_study, read_space, work
from keel.tune.study import JOURNAL

pytest.importorskip("optuna")

SPACE = read_space(["region.learning_rate=1e-4..1e-2:log", "region.epochs=1,2"])


def tuning(folder: Path, trials: int = 3, **more: Any) -> Tuning:
    base = {"env": "CartPole-v1", "total_steps": 2048, "rollout_steps": 64, **more}
    quick = {"evaluation": {"episodes": 1}, "region": {"minibatch": 64, **more.get("region", {})}}
    return Tuning(folder / "study", from_dict(base | quick), SPACE, trials)


def test_a_space_in_words():
    words = ["region.max-kl=0.01..0.1", "region.epochs=2..8", "advantage.normalise=none,batch"]
    assert read_space(words) == {
        "region.max_kl": Range(0.01, 0.1),
        "region.epochs": Range(2, 8),
        "advantage.normalise": ("none", "batch"),
    }
    assert read_space(["region.epochs=2..8"])["region.epochs"].whole  # type: ignore[union-attr]
    assert SPACE["region.learning_rate"] == Range(1e-4, 1e-2, log=True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("region.epochs", "expected FIELD=LOW..HIGH"),
        ("region.epochs=8..2", "8 is not below 2"),
        ("region.epochs=a..2", "'a' is no number"),
        ("region.clip=0..1:log", "begins above 0"),
        ("region.clip=0.1..1:lgo", "only log is known"),
    ],
)
def test_a_bad_space_is_named(word: str, message: str):
    with pytest.raises(InputError, match=message):
        read_space([word])


def test_what_cannot_be_set_is_refused_before_anything_is_made(tmp_path: Path):
    wrong = Tuning(tmp_path / "study", from_dict({}), {"region.epochz": (1, 2)}, 3)
    with pytest.raises(InputError, match=r"did you mean region\.epochs"):
        open_study(wrong)
    assert not (tmp_path / "study").exists()


def test_the_default_space_fits_the_configuration(tmp_path: Path):
    open_study(Tuning(tmp_path / "study", from_dict({}), DEFAULT, 1))


def test_a_study_goes_on_where_it_stopped(tmp_path: Path):
    told: list[Found] = []
    work(tuning(tmp_path, trials=2), told.append)
    assert [x.number for x in told] == [0, 1]
    work(tuning(tmp_path, trials=3), told.append)
    assert [x.number for x in told] == [0, 1, 2]
    work(tuning(tmp_path, trials=3), told.append)
    assert len(told) == 3
    found = best_of(open_study(tuning(tmp_path)))
    scores = [x.score for x in found if x.state == "complete"]
    assert scores == sorted(scores, reverse=True)
    assert all(set(x.settings) == set(SPACE) for x in found)
    lines = (tmp_path / "study" / JOURNAL).read_text().splitlines()
    assert all(json.loads(line) for line in lines)  # plain JSON: nothing in it can run
    assert len(list((tmp_path / "study").glob("trial-*/seed-0/metrics.jsonl"))) == 3


def test_trials_that_keep_leaving_the_region_are_not_the_best(tmp_path: Path):
    """A bound so tight that every update is walked back."""
    tight = tuning(tmp_path, trials=1, region={"max_kl": 1e-6})
    work(tight)
    (found,) = best_of(open_study(tight))
    assert found.violations > 0.5
    assert found.state == "complete"
    assert not found.allowed


def test_the_order_puts_the_region_before_the_score():
    class Study:
        trials: tuple[Any, ...] = ()

    assert best_of(Study()) == []
    good, wild = Found(0, 10.0, {}, 0.0, "complete"), Found(1, 99.0, {}, 0.5, "complete")
    assert good.allowed
    assert not wild.allowed
    assert not Found(2, 99.0, {}, 0.0, "pruned").allowed


def test_the_command_writes_settings_that_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["tune", "CartPole-v1", "--trials", "2", "--total-steps", "2048", "--runs"]
    words += [str(tmp_path), "--rollout-steps", "64", "--region.minibatch", "64"]
    words += ["--search", "region.epochs=1,2", "--evaluation.episodes", "1", "--at-once", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 2
    assert found["best"]["score"] == max(trial["score"] for trial in found["trials"])
    train = ["train", "CartPole-v1", "--config", found["config"], "--total-steps", "1024"]
    assert main([*train, "--runs", str(tmp_path), "--quiet"]) == 0
    assert main(words) == 0
    assert "best: trial" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--trials", "--at-once"])
def test_numbers_that_make_no_sense_are_named(flag: str, capsys: pytest.CaptureFixture[str]):
    assert main(["tune", "CartPole-v1", flag, "0"]) == 2
    assert f"{flag}: expected 1 or more" in capsys.readouterr().err
