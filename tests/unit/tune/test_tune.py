"""Searching settings: the space, the study, and the trust region as a constraint."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.cli.tune import _report_failures
from keel.config import from_dict
from keel.errors import InputError, KeelError
from keel.tracking.progress import PipedConsole
from keel.tune import (
    DEFAULT,
    Range,
    TrialResult,
    Tuning,
    best_of,
    end_of,
    open_study,
    read_space,
    take_over,
    work,
)
from keel.tune.study import HOPELESS, JOURNAL, _take

pytest.importorskip("optuna")

SPACE = read_space(["region.learning_rate=1e-4..1e-2:log", "region.epochs=1,2"])


def tuning(folder: Path, trials: int = 3, **more: Any) -> Tuning:
    base = {"env": "CartPole-v1", "total_steps": 2048, "rollout_steps": 64, **more}
    quick = {"evaluation": {"episodes": 1}, "region": {"minibatch": 64, **more.get("region", {})}}
    return Tuning(folder / "study", from_dict(base | quick), SPACE, trials)


def test_a_space_in_words():
    words = ["region.max-kl=0.01..0.1", "region.epochs=2..8", "advantage.normalize=none,batch"]
    assert read_space(words) == {
        "region.max_kl": Range(0.01, 0.1),
        "region.epochs": Range(2, 8),
        "advantage.normalize": ("none", "batch"),
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
    told: list[TrialResult] = []
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
    good, wild = (
        TrialResult(0, 10.0, {}, 0.0, "complete"),
        TrialResult(1, 99.0, {}, 0.5, "complete"),
    )
    assert good.allowed
    assert not wild.allowed
    assert not TrialResult(2, 99.0, {}, 0.0, "pruned").allowed


def test_the_command_writes_settings_that_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["tune", "CartPole-v1", "--trials", "3", "--total-steps", "2048", "--runs"]
    words += [str(tmp_path), "--rollout-steps", "64", "--region.minibatch", "64"]
    words += ["--search", "region.epochs=1,2", "--evaluation.episodes", "1", "--at-once", "2"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 3  # two workers that count at once would make it four
    assert found["best"]["score"] == max(trial["score"] for trial in found["trials"])
    train = ["train", "CartPole-v1", "--config", found["config"], "--total-steps", "1024"]
    assert main([*train, "--runs", str(tmp_path), "--quiet"]) == 0
    assert main(words) == 0
    assert "best: trial" in capsys.readouterr().out


def test_workers_that_ask_at_once_get_no_trial_too_many(tmp_path: Path):
    """Each with a study of its own, as processes have."""
    plan = tuning(tmp_path)
    studies = [open_study(plan) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda x: _take(x, plan.folder, 3), [*studies, *studies]))
    assert sorted(trial.number for trial in taken if trial is not None) == [0, 1, 2]


def test_a_failed_trial_is_not_replaced_and_a_finished_one_is_not_repeated(tmp_path: Path):
    optuna = pytest.importorskip("optuna")
    plan = tuning(tmp_path, trials=3)
    study = open_study(plan)
    for state in (optuna.trial.TrialState.FAIL, None):
        trial = study.ask()
        study.tell(trial, None if state else 1.0, state=state)
    assert end_of(study, 3) == 4  # numbers 2 and 3: two more to be finished


def test_what_a_killed_command_left_is_taken_over(tmp_path: Path):
    """A trial that nobody trains, half a line in the journal, and the journal's lock."""
    plan = tuning(tmp_path)
    open_study(plan).ask()
    journal = plan.folder / JOURNAL
    with journal.open("ab") as file:
        file.write(b'{"op_code": 5, "wor')
    Path(f"{journal}.lock").symlink_to(journal)
    study = take_over(plan)
    (trial,) = best_of(study)
    assert (trial.state, trial.reason) == ("failed", "")
    assert study.ask().number == 1
    assert all(json.loads(line) for line in journal.read_text().splitlines())


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt(), ""), (OSError("no disk"), "OSError: no disk")]
)
def test_a_trial_that_was_interrupted_gives_no_reason(
    error: BaseException, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is no sign that the search is hopeless."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("keel.tune.study._train", fail)
    plan = tuning(tmp_path)
    with pytest.raises(type(error)):
        work(plan)
    assert [x.reason for x in best_of(open_study(plan))] == [reason]


NO_EPISODE = {"env": "Pendulum-v1", "total_steps": 256, "rollout_steps": 64}


def test_trials_that_all_fail_alike_end_the_search_and_say_why_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = tuning(tmp_path, trials=9, **NO_EPISODE)
    work(plan)
    trials = best_of(open_study(plan))
    assert [trial.state for trial in trials] == ["failed"] * HOPELESS
    with pytest.raises(KeelError) as caught:
        _report_failures(plan, 0, [], PipedConsole(stderr=True))
    assert str(caught.value) == "no episode ended; train for longer with --total-steps"
    assert plan.folder.is_dir()  # they were trained: what they logged is kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["CartPol-v1"], "CartPole-v1"),
        (["CartPole-v1", "--search", "region.epochz=1,2"], "did you mean region.epochs"),
        (["CartPole-v1", "--envs.options", "nonsense=3"], "nonsense"),
    ],
)
def test_a_search_that_cannot_begin_says_why_once_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["tune", *words, "--trials", "2", "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A file stands where the folder would be: root may write everywhere else."""
    (tmp_path / "runs").write_text("")
    assert main(["tune", "CartPole-v1", "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "cannot be written (Not a directory); choose a writable --runs directory" in error
    assert error.count("\n") == 1


def test_a_journal_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / JOURNAL).write_text("rubbish\nrubbish\n")
    assert main(["tune", "CartPole-v1", "--runs", str(tmp_path), "--name", "mine"]) == 2
    error = capsys.readouterr().err
    assert "study.jsonl: no study can be kept there" in error
    assert error.count("\n") == 1
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("flag", ["--trials", "--at-once"])
def test_numbers_that_make_no_sense_are_named(flag: str, capsys: pytest.CaptureFixture[str]):
    assert main(["tune", "CartPole-v1", flag, "0"]) == 2
    assert f"{flag}: expected 1 or more" in capsys.readouterr().err
