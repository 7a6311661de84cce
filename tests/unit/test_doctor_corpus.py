"""The calibration corpus: its tables, packing of logs, and counting of what was said."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.doctor_corpus import judging, keeping, making, page
from benchmarks.doctor_corpus.beside import TRAINERS
from benchmarks.doctor_corpus.judging import Judged, shares
from benchmarks.doctor_corpus.table import HALVES, HERE, faults, jobs, setups
from benchmarks.doctor_corpus.wrappers import INSIDE, OUTSIDE
from keel.doctor.api import all_rules


def test_faults_name_rules_that_exist() -> None:
    known = {entry.id for entry in all_rules()}
    for fault in faults().values():
        assert set(fault.rules) <= known, fault.name


def test_there_are_forty_kinds_of_faults_in_each_half_and_more_to_be_judged_on() -> None:
    kinds = {half: {f.name for f in faults().values() if half in f.only} for half in HALVES}
    assert len(kinds["writing"]) >= 40
    assert len(kinds["judged"] - kinds["writing"]) >= 8
    assert not set(HALVES["writing"]) & set(HALVES["judged"])


def test_healthy_runs_are_of_four_trainers() -> None:
    envs: dict[str, set[str]] = {}
    for setup in setups().values():
        envs.setdefault(setup.trainer, set()).add(setup.env)
    assert len(envs["keel"]) >= 6
    assert len(envs["sb3"]) >= 5
    assert len(envs["cleanrl"]) >= 6
    assert len(envs["trl"]) >= 2


def test_every_run_has_a_folder_of_its_own() -> None:
    for half in HALVES:
        paths = [job.path for job in jobs(half)]
        assert len(paths) == len(set(paths))


def test_what_is_injected_is_known_to_the_trainer() -> None:
    wrappers = {*INSIDE, *OUTSIDE}
    for job in jobs("judged"):
        words = wrappers | _texts(HERE / f"{job.setup.trainer}_runs.py")
        for name, _ in job.setup.inject:
            assert name in words, f"{job.path}: {name}"


def _texts(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_other_tools_name_faults_that_exist() -> None:
    table = yaml.safe_load((HERE / "others.yaml").read_text())
    assert set(table) == set(TRAINERS)
    for findings in table.values():
        for kinds in findings.values():
            assert set(kinds) <= set(faults())


def judged(kind: str, *findings: tuple[str, str], rules: tuple[str, ...] = ("b",)) -> Judged:
    verdict = findings[0][1] if findings else "healthy"
    return Judged(kind, "s", "keel", 0, "log", verdict, "…", findings, rules, "c")


def test_shares_count_alarms_and_places() -> None:
    row = shares(
        [
            judged("healthy", rules=()),
            judged("healthy", ("x", "watch"), rules=()),
            judged("healthy", ("x", "watch"), ("y", "sick"), rules=()),
            judged("one", ("b", "sick")),
            judged("one", ("a", "sick"), ("a", "watch"), ("b", "watch")),
            judged("two", ("a", "sick"), ("a", "sick"), ("a", "sick"), ("b", "sick")),
            judged("two"),
        ]
    )
    assert (row["healthy"], row["false_sick"], row["false_watch"]) == (3, 1, 1)
    assert (row["faults"], row["kinds"], row["first"], row["among_three"]) == (4, 2, 1, 2)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keeping, "BUILD", tmp_path / "build")
    monkeypatch.setattr(keeping, "CORPUS", tmp_path / "corpus")
    return tmp_path / "build" / "writing" / "cleanrl" / "kl-negative" / "cleanrl-fast" / "seed-0"


def test_a_packed_log_is_judged_as_it_was_written(corpus: Path) -> None:
    corpus.mkdir(parents=True)
    rows = [
        {"global_step": 512 * i, "losses/approx_kl": -0.0123456789123, "losses/clipfrac": 0.1}
        for i in range(1, 20)
    ]
    (corpus / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (corpus / "settings.json").write_text(json.dumps({"gamma": 0.98, "env_id": "CartPole-v1"}))
    (corpus / "output.txt").write_text("what nobody needs")
    job = {"kind": "kl-negative", "setup": "cleanrl-fast", "trainer": "cleanrl", "seed": 0}
    (corpus / making.RESULT).write_text(json.dumps(job | {"commit": "abc", "status": 0}))
    first = keeping.pack("writing").read_bytes()
    assert keeping.pack("writing").read_bytes() == first  # equal runs make equal files
    with keeping.unpacked("writing") as (folder,):
        assert not (folder / "output.txt").exists()
        assert "-0.01234568" in (folder / "log.jsonl").read_text()
    assert judging.judge("writing")[0] == []  # that kind is for the other half
    job["kind"] = "kl-summed"
    (corpus / making.RESULT).write_text(json.dumps(job | {"commit": "abc", "status": 0}))
    keeping.pack("writing")
    (one,), _ = judging.judge("writing")
    assert one.findings[0][0] == "kl-negative"
    assert one.place == 0


def test_what_failed_or_was_made_otherwise_is_made_again(tmp_path: Path) -> None:
    job = next(iter(jobs("writing")))
    assert not making.is_made(job, tmp_path)
    for status, steps, made in ((0, 0, True), (1, 0, False), (0, 512, False)):
        told = job.as_dict() | {"status": status, "steps": job.setup.steps + steps}
        (tmp_path / making.RESULT).write_text(json.dumps(told))
        assert making.is_made(job, tmp_path) is made


def test_the_page_shows_shares_and_misses() -> None:
    runs: list[Any] = [judged("rate-tiny", ("a", "sick")), judged("healthy", rules=())]
    data = {"rules": "0123456789abcdef", "seconds": 1.0, "shares": page.table_of(runs)}
    data["runs"] = [one.as_dict() for one in runs]
    text = "\n".join(page.lines({"writing": data}))
    assert "rules of commit `0123456789ab`" in text
    assert "| Keel | 1 | 0 (0 %) | 0 (0 %) | 1 | 1 | 0 (0 %) | 0 (0 %) |" in text
    assert "rate-tiny: the learning rate is a thousand times too low" in text
