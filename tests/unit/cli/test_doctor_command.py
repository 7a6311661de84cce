"""`keel doctor`, as a user meets it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import keel
import keel.doctor.rules
from keel import cli
from keel.cli.doctor_fix import write_fix
from keel.doctor.examine import Diagnosis
from keel.doctor.finding import Change, Finding, Fix, evidence
from keel.doctor.rule import RULES, rule
from keel.doctor.run_log import RunLog

assert keel.doctor.rules
SMALL = ["--total-steps", "512", "--rollout-steps", "64", "--envs.num", "2",
         "--region.minibatch", "64"]  # fmt: skip


@pytest.fixture(autouse=True)
def _two_rules() -> Iterator[None]:
    """One rule that fires at large learning rates stands for all of the trust region."""
    saved = dict(RULES)
    RULES.clear()
    rule("fast", "trust region", needs=("train/kl_exact",), source="a test")(_fast)
    rule("earns", "reward", needs=("rollout/return_mean",), source="a test")(lambda _: None)
    rule("horizon", "reward", needs=("setting:facts.horizon",), source="a test")(lambda _: None)
    yield
    RULES.clear()
    RULES.update(saved)


def _fast(log: RunLog) -> Finding | None:
    rate = log.setting("region.learning_rate")
    if rate is not None and rate < 0.1:
        return None
    fix = Fix("Lower the learning rate.", (Change("region.learning_rate", times=0.001),))
    kl = log["train/kl_exact"]
    return Finding("the learning rate is too high", "sick", (evidence(kl, "too far"),), fix)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a sick run and a healthy one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a_good", "0.001"), ("b_hot", "0.5")):
        words = ["--name", name, "--region.learning-rate", rate, "--no-doctor", "--quiet"]
        assert cli.main(["train", "CartPole-v1", "--runs", str(folder), *SMALL, *words]) == 0
    return folder


def answer(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main(["doctor", *map(str, args)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_text(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = answer(capsys, runs / "b_hot")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "sick: the learning rate is too high"
    assert "- region.learning_rate: 0.5\n     + region.learning_rate: 0.0005" in out
    assert "1 rule could not speak" in out
    assert "\x1b" not in out
    _, out, _ = answer(capsys, runs / "a_good")
    assert out.splitlines()[0].startswith("healthy: ")


def test_several_runs_are_a_table_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, runs)
    lines = out.splitlines()
    assert lines[0].split() == ["verdict", "run", "cause"]
    verdicts = [line.split(":")[0] for line in lines if line.startswith(("sick:", "healthy:"))]
    assert verdicts == ["sick", "healthy"]


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, runs / "b_hot", "--json", "--set", "facts.horizon=500")
    data = json.loads(out)
    assert (data["verdict"], data["skipped"]) == ("sick", [])
    assert [finding["rule"] for finding in data["findings"]] == ["fast"]
    _, out, _ = answer(capsys, runs, "--json")
    assert [d["verdict"] for d in json.loads(out)] == ["healthy", "sick"]


def test_html(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    status, out, _ = answer(capsys, runs, "--html", page)
    assert (status, out.splitlines()[-1]) == (0, f"page: {page}")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert html.count("<svg") == 1


@pytest.mark.parametrize(
    ("run", "level", "status"),
    [("b_hot", "sick", 1), ("b_hot", "watch", 1), ("b_hot", "never", 0), ("a_good", "watch", 0)],
)
def test_fail_on(
    run: str, level: str, status: int, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, runs / run, "--fail-on", level)[0] == status


def test_facts_and_ignored_rules(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, runs / "b_hot", "--set", "learning_rate=1e-4")
    assert out.startswith("healthy: ")
    _, out, _ = answer(capsys, runs / "b_hot", "--ignore", "fast")
    assert out.startswith("cannot tell: ")
    _, out, _ = answer(capsys, runs / "b_hot", "--all")
    assert "   horizon: facts.horizon" in out


def test_the_standard_input(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = (runs / "b_hot" / "seed-0" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(log)))
    _, out, _ = answer(capsys, "-")
    assert out.splitlines()[0] == "sick: the learning rate is too high"
    assert "0.001 × its value" in out  # a log alone has no settings
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO()))
    assert answer(capsys, "-", "--fix")[0] == 2


def test_rules(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "--rules", "--json")
    assert json.loads(out)[0] == {
        "rule": "fast", "family": "trust region", "reads": "train/kl_exact", "source": "a test"
    }  # fmt: skip
    _, out, _ = answer(capsys, "--rules")
    assert "facts.horizon" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "of what?"),
        (("nowhere",), "nowhere"),
        (("RUN", "--jsn"), "did you mean --json?"),
        (("RUN", "--fail-on", "ill"), "--fail-on"),
        (("RUN", "--set", "advantage.gama=1"), "did you mean 'advantage.gamma'?"),
        (("RUN", "--set", "gamma"), "expected SETTING=VALUE"),
        (("RUN", "--map", "step"), "expected METRIC=COLUMN"),
        (("RUN", "--ignore", "fats"), "did you mean 'fast'?"),
        (("RUN", "--framework", "sb4"), "did you mean 'sb3'?"),
        (("RUNS", "--fix"), "of one run at a time"),
        (("GOOD", "--fix"), "nothing to fix"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], part: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"RUN": runs / "b_hot", "RUNS": runs, "GOOD": runs / "a_good"}
    status, _, err = answer(capsys, *(paths.get(word, word) for word in words))
    assert status == 2
    assert err.startswith("keel: ")
    assert err.count("\n") == 1
    assert part in err


def test_fix_writes_settings_that_train(
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, _ = answer(capsys, runs / "b_hot", "--fix")
    assert out.splitlines()[-1] == "keel train CartPole-v1 --config fixed.yaml"
    written = yaml.safe_load(Path("fixed.yaml").read_text(encoding="utf-8"))
    before = yaml.safe_load((runs / "b_hot" / "seed-0" / "config.yaml").read_text("utf-8"))
    assert written["region"].pop("learning_rate") == 0.0005
    assert before["region"].pop("learning_rate") == 0.5
    assert written == before
    command = ["train", "CartPole-v1", "--config", "fixed.yaml", "--quiet", "--name", "cured"]
    assert cli.main(command) == 0
    _, out, _ = answer(capsys, "runs/cured")
    assert out.startswith("healthy: ")


def test_fix_does_not_write_over_files_of_others(
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fixed.yaml").write_text("mine: 1\n", encoding="utf-8")
    assert "name a file" in answer(capsys, runs / "b_hot", "--fix")[2]
    assert Path("fixed.yaml").read_text(encoding="utf-8") == "mine: 1\n"
    assert answer(capsys, runs / "b_hot", "--fix", "other.yaml")[0] == 0
    assert answer(capsys, runs / "b_hot", "--fix", "other.yaml")[0] == 0  # its own
    assert Path("other.yaml").is_file()


def test_fix_of_another_framework_is_a_snippet(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = keel.diagnose(runs / "b_hot")
    assert isinstance(found, Diagnosis)
    foreign = replace(found, log=replace(found.log, framework="sb3"))
    write_fix(foreign, None, quiet=False)
    assert "PPO(learning_rate=0.0005, …)\n" in capsys.readouterr().out
    write_fix(foreign, tmp_path / "fix.py", quiet=True)
    assert (tmp_path / "fix.py").read_text("utf-8") == "PPO(learning_rate=0.0005, …)\n"
    assert capsys.readouterr().out == ""


def test_a_log_alone_has_no_configuration_to_patch(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(runs / "b_hot" / "seed-0" / "metrics.jsonl", tmp_path)
    status, _, err = answer(capsys, tmp_path / "metrics.jsonl", "--fix")
    assert status == 2
    assert "config.yaml" in err


def test_the_end_of_a_run_has_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "CartPole-v1", "--runs", str(tmp_path), *SMALL]
    assert cli.main([*words, "--name", "hot", "--region.learning-rate", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "doctor: sick: the learning rate is too high\n" in out
    assert f"evidence and fix: keel doctor {tmp_path}/hot/seed-0\n" in out
    assert cli.main([*words, "--name", "off", "--no-doctor"]) == 0
    assert "doctor" not in capsys.readouterr().out
    assert cli.main([*words, "--name", "machine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["doctor"]["verdict"] == "healthy"
