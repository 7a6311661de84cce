"""`doctor.json` at the end of runs, and the verdict while they go on: never in their way."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.config import Config
from keel.doctor import watching
from keel.doctor.examine import examine
from keel.doctor.reading import read_logs
from keel.doctor.watching import MEMORY, Watching, read_verdict, write_diagnosis
from keel.errors import RunWarning
from keel.printing import printable
from keel.tracking.directory import DOCTOR

pytestmark = pytest.mark.usefixtures("two_rules")
SMALL: dict[str, Any] = {"num": 2, "rollout_steps": 64, "minibatch": 64, "total_steps": 256}


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("the doctor is ill")


def test_every_run_ends_with_a_diagnosis(tmp_path: Path) -> None:
    run = keel.train("CartPole-v1", runs=tmp_path, **SMALL, learning_rate=0.5, progress=False)
    data = json.loads((run.path / DOCTOR).read_text(encoding="utf-8"))
    assert data["verdict"] == "sick"
    assert data["rows"] == 2
    assert data["findings"][0]["fix"]["patch"][0]["new"] == 0.005
    assert read_verdict(run.path) == ("sick", printable(data["sentence"]))
    assert str(keel.diagnose(run)).splitlines()[0] == ": ".join(read_verdict(run.path) or ())


def test_what_is_read_says_the_same_as_the_whole_file(tmp_path: Path) -> None:
    run = keel.train("CartPole-v1", runs=tmp_path, **SMALL, learning_rate=0.5, progress=False)
    (whole,) = read_logs(run.path)
    data = json.loads((run.path / DOCTOR).read_bytes())
    findings = examine(whole).as_dict()["findings"]
    assert [finding["rule"] for finding in data["findings"]] == [f["rule"] for f in findings]


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    run = keel.train("CartPole-v1", runs=tmp_path, **SMALL, doctor=False, progress=False)
    assert not (run.path / DOCTOR).exists()
    assert read_verdict(run.path) is None


def test_a_stopped_run_has_one_and_a_resumed_one_another(tmp_path: Path) -> None:
    loop = keel.iterate("CartPole-v1", runs=tmp_path, **SMALL)
    iteration = next(loop)
    loop.close()
    assert json.loads((iteration.path / DOCTOR).read_bytes())["rows"] == 1
    keel.resume(iteration.path, progress=False)
    assert json.loads((iteration.path / DOCTOR).read_bytes())["rows"] == 2


def test_a_failed_run_has_one(tmp_path: Path) -> None:
    def fail(iteration: Any) -> None:
        if iteration.done:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        keel.train("CartPole-v1", runs=tmp_path, **SMALL, on_iteration=fail, progress=False)
    (file,) = tmp_path.rglob(DOCTOR)
    assert json.loads(file.read_bytes())["rows"] == 2


@pytest.mark.parametrize("as_errors", [False, True])
def test_a_doctor_that_fails_never_fails_a_run(
    as_errors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "examine", broken)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("error" if as_errors else "always", RunWarning)
        run = keel.train("CartPole-v1", runs=tmp_path, **SMALL, progress=False)
    said = [str(w.message) for w in heard if w.category is RunWarning]
    text = f"{run.path}: was not diagnosed: RuntimeError: the doctor is ill"
    assert said == ([] if as_errors else [text])
    assert run.metrics.step.tolist() == [128, 256]
    assert not (run.path / DOCTOR).exists()


def test_a_run_without_metrics_has_no_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    write_diagnosis(tmp_path)
    assert not (tmp_path / DOCTOR).exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"verdict": 1}', "[" * 10_000])
def test_a_damaged_diagnosis_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / DOCTOR).write_text(content, encoding="utf-8")
    assert read_verdict(tmp_path) is None


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def metrics(kl: float = 0.5) -> Mapping[str, float]:
    return {"train/kl_exact": kl, "rollout/return_mean": 1.0}


def test_looks_take_a_small_share_of_the_time() -> None:
    """A look that takes 1 second is followed by none for 250."""
    clock = Clock()
    looks = []
    watch = Watching(Config(), clock)

    def look() -> str:
        looks.append(clock.now)
        clock.now += 1.0
        return "healthy: yes"

    watch._look = look  # type: ignore[method-assign]
    for _ in range(1_000):
        watch(0, metrics())
        clock.now += 1.0
    assert looks[0] == watching.FIRST_SECONDS
    assert len(looks) / 1_000 <= 0.005


def test_the_live_verdict_is_that_of_the_newest_iterations() -> None:
    clock = Clock()
    watch = Watching(Config(), clock)
    for step in range(MEMORY + 10):
        assert watch(step, metrics()) == ""
    assert len(watch.diagnose().log["train/kl_exact"]) == MEMORY
    clock.now = 6.0
    assert watch(2_000, metrics()) == "healthy: 2 rules looked, none found anything"


def test_a_live_doctor_that_fails_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = Watching(Config(), clock)
    calls = []
    monkeypatch.setattr(watching, "examine", lambda *_: calls.append(1) or broken())
    for _ in range(3):
        clock.now += 1e6
        assert watch(0, metrics()) == "none: RuntimeError: the doctor is ill"
    assert len(calls) == 1
