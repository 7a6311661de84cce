"""The flow of a case: sick run, diagnosis from the log alone, fix, cured run, page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.cases import CASES, FORMS, Case, Shown, run_case
from keel.cases.figures import written
from keel.cases.running import folder_of, read_alone, sick_config
from keel.cli import main
from keel.errors import InputError, RunError
from keel.tracking.reader import read_metrics
from keel.training.api import train

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "threads": 1,
    "envs.num": 16,
    "rollout_steps": 32,
    "evaluation.episodes": 0,
    "region.epochs": 1,
    "region.minibatch": 256,
    "region.gate": False,
    "faults.epsilon_greedy": 0.5,
}
TINY = Case(
    name="tiny",
    title="actions <that> stray",
    note="000",
    symptom="A policy that does not do what it means.",
    belief="The learning rate & nothing else.",
    lesson="Half of the actions are random, and their log-probs do not know.",
    settings=SMALL,
    forms={"short": {"total_steps": 2_048}, "usual": {"total_steps": 4_096}, "full": {}},
    minutes=dict.fromkeys(FORMS, "seconds"),
    shown=(
        Shown("train/gate_log_ratio", "largest |log ratio|", "lower"),
        Shown("rollout/return_mean", "return", "higher", ".1f"),
        Shown("train/nothing", "a metric that is not there", "lower"),
    ),
    family="consistency",
    repair={"faults.epsilon_greedy": 0.0},
    repaired="Log-probs are those of the actions taken.",
)


def test_a_case_from_the_sick_run_to_its_page(tmp_path: Path) -> None:
    lines: list[str] = []
    shares: list[tuple[str, float]] = []
    outcome = run_case(
        TINY, runs=tmp_path, form="short", tell=lines.append, advance=lambda *x: shares.append(x)
    )
    assert outcome.finding.family == "consistency"
    assert outcome.sick.path == tmp_path / "case-tiny-short" / "sick" / "seed-0"
    cured = yaml.safe_load((outcome.cured.path / "config.yaml").read_text())
    assert cured["faults"]["epsilon_greedy"] == 0.0
    assert {one.setting: one.new for one in outcome.patches}.items() <= {
        "region.gate": True
    }.items()
    assert cured["region"]["gate"] is True
    assert read_metrics(outcome.cured.path)["train/gate_log_ratio"].max() < 1e-3
    assert read_metrics(outcome.sick.path)["train/gate_log_ratio"].min() > 1e-3
    assert shares[0][0] == "sick run"
    assert shares[-1] == ("cured run", 1.0)
    assert lines[0] == "sick run: CartPole-v1, 2,048 steps"
    page = outcome.html.read_text(encoding="utf-8")
    assert "actions &lt;that&gt; stray" in page.lower()
    assert "<that>" not in page
    assert "The learning rate &amp; nothing else." in page
    assert "not logged" in page
    assert page.count("<svg") >= 3
    assert outcome.png.read_bytes().startswith(b"\x89PNG")

    before = (outcome.sick.path / "metrics.jsonl").read_bytes()
    lines.clear()
    again = run_case(TINY, runs=tmp_path, form="short", tell=lines.append)
    assert [again.sick.reused, again.cured.reused] == [True, True]
    assert lines[0].startswith("sick run: there already")
    assert (outcome.sick.path / "metrics.jsonl").read_bytes() == before

    other = replace(TINY, settings={**SMALL, "region.clip": 0.3})
    with pytest.raises(InputError, match=r"was trained otherwise.*clip.*--overwrite"):
        run_case(other, runs=tmp_path, form="short")
    fresh = run_case(other, runs=tmp_path, form="short", overwrite=True)
    assert not fresh.sick.reused
    assert (outcome.sick.path / "metrics.jsonl").read_bytes() != before


def test_what_was_begun_goes_on(tmp_path: Path) -> None:
    folder = folder_of(TINY, tmp_path, "short")
    given = {**TINY.settings, **TINY.forms["short"], "seed": 3}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(sick_config(TINY, given)))
    begun = train(config=file, runs=folder, name="sick", on_iteration=lambda _: False)
    assert len(begun.metrics) == 1
    lines: list[str] = []
    outcome = run_case(TINY, runs=tmp_path, form="short", seed=3, tell=lines.append)
    assert lines[0].startswith("sick run: goes on")
    assert read_metrics(outcome.sick.path).step.tolist() == [512, 1024, 1536, 2048]


def test_the_doctor_does_not_see_what_was_planted(tmp_path: Path) -> None:
    given = {**TINY.settings, "total_steps": 512, "seed": 0}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(sick_config(TINY, given)))
    run = train(config=file, runs=tmp_path, name="one")
    settings = read_alone(run.path).settings
    assert settings["region.gate"] is False
    assert [name for name in settings if "fault" in name] == []


def test_a_run_without_a_finding_has_nothing_to_cure(tmp_path: Path) -> None:
    sound = replace(TINY, settings={**SMALL, "faults.epsilon_greedy": 0.0})
    with pytest.raises(RunError, match="the doctor finds nothing in this run"):
        run_case(sound, runs=tmp_path, form="short")


def test_a_fix_that_only_stops_the_run_is_tried_and_shown(tmp_path: Path) -> None:
    outcome = run_case(replace(TINY, stops=True), runs=tmp_path, form="short")
    assert outcome.stopped.startswith("consistency gate: ")
    assert "With that setting alone" in outcome.html.read_text(encoding="utf-8")
    assert sorted(p.name for p in (tmp_path / "case-tiny-short").iterdir()) == [
        "case.html", "case.png", "cured", "cured.yaml", "sick", "sick.yaml",
    ]  # fmt: skip


def test_what_both_begin_with_is_prepared_once(tmp_path: Path) -> None:
    seen: list[Path] = []

    def prepare(folder: Path, settings: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
        seen.append(folder)
        return {"region.learning_rate": 5e-4}

    outcome = run_case(replace(TINY, prepare=prepare), runs=tmp_path, form="short")
    assert seen == [tmp_path / "case-tiny-short"]
    for arm in (outcome.sick, outcome.cured):
        config = yaml.safe_load((arm.path / "config.yaml").read_text())
        assert config["region"]["learning_rate"] == 5e-4


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
@pytest.mark.parametrize("form", FORMS)
def test_settings_of_every_case_are_good_ones(case: Case, form: str) -> None:
    made = {"demos.path": "demos"} if "demos.coef" in case.settings else {}
    config = sick_config(case, {**case.settings, **case.forms[form], **made, "seed": 0})
    assert config["threads"] == 1
    assert set(case.minutes) == set(FORMS) == set(case.forms)
    assert case.belief.endswith(".")
    assert case.lesson.endswith(".")
    assert (case.repair == {}) == (case.repaired == "")


def test_values_as_text() -> None:
    assert written(0.123456, ".3g") == "0.123"
    assert written(float("-inf"), ".3g") == "−∞"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kl-explosoin"], "did you mean 'kl-explosion'"),
        ([], "which one? `keel case --list`"),
        (["kl-explosion", "--short", "--full"], "--short or --full, not both"),
        (["kl-explosion", "--seed", "-1"], "--seed: expected 0 or more, got -1"),
    ],
)
def test_errors_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["case", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["case", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CASES)
    assert main(["case", "--list", "--json"]) == 0
    assert [row["case"] for row in json.loads(capsys.readouterr().out)] == list(CASES)


def test_the_command_sums_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "tiny", TINY)
    words = ["case", "tiny", "--short", "--runs", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "the author believed: The learning rate" in out
    assert f"page: {tmp_path / 'case-tiny-short' / 'case.html'}" in out.replace("\n", "")
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [found["family"] for found in data["findings"]] == ["consistency"]
    assert data["metrics"]["train/nothing"] == {"before": None, "after": None}
    assert data["changes"] == {"region.gate": True}


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_command_says_how_it_goes_on(
    stop: BaseException,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise stop

    monkeypatch.setattr("keel.cases.running.run_case", interrupted)
    assert main(["case", "kl-explosion", "--short", "--overwrite"]) == status
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("go on with: keel case kl-explosion --short")
