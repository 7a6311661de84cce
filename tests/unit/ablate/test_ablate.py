"""Plans of ablations, what is left of them, and the processes that train them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keel.ablate import (
    Job,
    Plan,
    at_once,
    failure_lines,
    plan_named,
    read_plan,
    run_jobs,
    tasks_of,
)
from keel.ablate.plan import Cell, grid, names
from keel.apps.demonstrations import record_function, save_demos
from keel.apps.demonstrations.experts import lean_away
from keel.cli import main
from keel.cli.ablate import Ablate, _train
from keel.config import Config, Network
from keel.errors import InputError
from keel.tracking.directory import hold_folder

GRID = """
env: CartPole-v1
seeds: [3, 4]
settings: {total_steps: 2048, envs: {num: 16}}
vary: {region.max_log_ratio: [20, 10.0], advantage.normalize: [none, batch]}
"""


def write(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_grid_is_every_combination(tmp_path: Path):
    plan = read_plan(write(tmp_path, GRID))
    assert [cell.name for cell in plan.cells] == [
        "max_log_ratio-20_normalize-none",
        "max_log_ratio-20_normalize-batch",
        "max_log_ratio-10_normalize-none",
        "max_log_ratio-10_normalize-batch",
    ]
    config = plan.cells[2].config(plan.base, 4)
    assert (config.region.max_log_ratio, config.advantage.normalize) == (10.0, "none")
    assert (config.seed, config.envs.num, config.total_steps) == (4, 16, 2048)
    assert config.tag == plan.cells[2].name


def test_variants_have_names_of_their_own(tmp_path: Path):
    text = "env: CartPole-v1\nvariants: {plain: {}, tight: {region.max_kl: 0.01, seed: 0}}\n"
    plan = read_plan(write(tmp_path, text))
    assert [cell.name for cell in plan.cells] == ["plain", "tight"]
    assert plan.seeds == (0, 1, 2)
    assert plan.cells[1].config(plan.base, 7).region.max_kl == 0.01


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vary: {region.max_kl: [1.0]}", "on which env"),
        ("env: CartPole-v1", "either vary or variants"),
        ("env: CartPole-v1\nvarry: {}", "did you mean 'vary'"),
        ("env: CartPole-v1\nvary: {region.max_lk: [0.1]}", "did you mean region.max_kl"),
        ("env: CartPole-v1\nvary: {region.max_kl: 0.1}", "expected a list of values"),
        ("env: CartPole-v1\nvary: {region.max_kl: [0.1, 0.1]}", "max_kl-0.1 stands twice"),
        ("env: CartPole-v1\nvary: {region.max_kl: [-1]}", "max_kl--?1.*above 0"),
        ("env: CartPole-v1\nseeds: 3\nvary: {seed: [1]}", "expected a list of whole numbers"),
        ("env: CartPole-v1\nseeds: [1, 1]\nvary: {seed: [1]}", "expected different ones"),
        ("env: CartPole-v1\nvariants: {a: 3}", "variants.a: expected settings"),
        ("env: CartPole-v1\nvary: {seed: [1]}\nwatch: {metric: {}}", "did you mean 'metrics'"),
        ("env: CartPole-v1\nvary: {seed: [1]}\nwatch: {updates: [1]}", "watch.metrics: expected"),
        (
            "env: CartPole-v1\nvary: {seed: [1]}\nwatch: {metrics: {KL: train/kl_exakt}}",
            "did you mean 'train/kl_exact'",
        ),
        (
            "env: CartPole-v1\nvary: {seed: [1]}\nwatch: {metrics: {KL: train/kl_exact}, "
            "updates: [0]}",
            "expected numbers of updates",
        ),
        (
            "env: CartPole-v1\nvary: {seed: [1]}\nwatch: {metrics: {KL: train/kl_exact}, "
            "expected: {Kl: 3}}",
            "'Kl' is not one of KL",
        ),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(InputError, match=message):
        read_plan(write(tmp_path, text))


@pytest.mark.parametrize("name", names())
def test_every_plan_that_comes_with_keel_can_be_trained(name: str):
    plan = plan_named(name)
    assert plan is not None
    assert plan.about
    assert len(plan.cells) > 1


def test_small_networks_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert at_once(Config(env="CartPole-v1")) == 4
    assert at_once(Config(env="CartPole-v1", threads=2)) == 2
    assert at_once(Config(env="Breakout")) == 1
    assert at_once(Config(env="X-v0", network=Network(kind="cnn"))) == 1


def tiny(total: int = 1024) -> Plan:
    base = Config(env="CartPole-v1", total_steps=total, rollout_steps=128)
    return Plan("tiny", base, grid({"region.max_kl": [0.05, 0.01]}), (0,))


def test_a_cell_is_new_then_finished_and_begun_when_more_is_wanted(tmp_path: Path):
    new = tasks_of(tiny(), tmp_path)
    assert [task.state for task in new] == ["new", "new"]
    subprocess.run(new[0].command(), check=True, capture_output=True)
    assert [task.state for task in tasks_of(tiny(), tmp_path)] == ["finished", "new"]
    (again, _) = tasks_of(tiny(2048), tmp_path)
    assert again.state == "begun"
    assert again.progress() == pytest.approx(0.5)
    assert again.command()[3] == "resume"
    shutil.rmtree(again.path / "checkpoints")
    (again, _) = tasks_of(tiny(2048), tmp_path)
    assert again.state == "begun"  # `keel resume` starts it anew
    assert [place.name for place in again.path.parent.iterdir()] == ["seed-0"]


def test_a_finished_cell_with_demonstrations_is_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A path as the plan has it, and as the run keeps it, are the same path."""
    monkeypatch.chdir(tmp_path)
    save_demos(record_function("CartPole-v1", lean_away, 2, seed=0), Path("shown"))
    base = Config(env="CartPole-v1", total_steps=1024, rollout_steps=128)
    plan = Plan("shown", base, (Cell("demos", {"demos.path": "shown"}),), (0,))
    (task,) = tasks_of(plan, tmp_path)
    subprocess.run(task.command(), check=True, capture_output=True)
    (again,) = tasks_of(plan, tmp_path)
    assert again.state == "finished"


def test_a_cell_that_was_trained_otherwise_is_refused(tmp_path: Path):
    (task, _) = tasks_of(tiny(), tmp_path)
    subprocess.run(task.command(), check=True, capture_output=True)
    plan = tiny()
    base = Config(env="CartPole-v1", total_steps=1024, rollout_steps=256)
    changed = Plan(plan.name, base, plan.cells, (0,))
    with pytest.raises(InputError, match=r"was trained otherwise \(rollout_steps: 128 → 256"):
        tasks_of(changed, tmp_path)


def test_jobs_run_side_by_side_and_report_how_they_ended():
    seen: dict[str, Job] = {}
    most = 0

    def tick(running: list[str]) -> None:
        nonlocal most
        most = max(most, len(running))

    text = "print('x' * 200_000)"  # more than a pipe holds
    bad = "import sys; print('first\\nwhat went wrong', file=sys.stderr); sys.exit(3)"
    scripts = {"a": text, "b": bad, "c": "print(1)"}
    commands = [(key, lambda s=s: [sys.executable, "-c", s]) for key, s in scripts.items()]
    run_jobs(commands, 2, lambda key, job: seen.__setitem__(key, job), tick)
    assert most == 2
    assert len(seen["a"].out) == 200_001
    assert (seen["b"].status, seen["b"].reason) == (3, "what went wrong")
    assert seen["c"] == Job(0, "1\n", "")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always imports from there")
@pytest.mark.parametrize("imports_from_here", [True, False])
def test_a_job_imports_from_the_working_directory_only_if_its_parent_does(
    imports_from_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "shadow.py").write_text("print('imported')")
    monkeypatch.chdir(tmp_path)
    elsewhere = [place for place in sys.path if place]
    monkeypatch.setattr(sys, "path", [*([""] if imports_from_here else []), *elsewhere])
    jobs: list[Job] = []
    command = [sys.executable, "-c", "import shadow"]
    run_jobs([("a", lambda: command)], 1, lambda _, job: jobs.append(job))
    assert (jobs[0].out == "imported\n") == imports_from_here


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_processes(tmp_path: Path, number: signal.Signals):
    told = tmp_path / "pid"
    script = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)"
    )

    def interrupt(running: list[str]) -> None:
        deadline = time.monotonic() + 20.0
        while not (told.is_file() and told.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        signal.raise_signal(number)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run_jobs([("a", lambda: [sys.executable, "-c", script])], 1, lambda *_: None, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), signal.SIGCONT)


def test_the_command_trains_compares_and_does_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["ablate", "CartPole-v1", "--vary", "region.max-kl=0.05,0.01", "--seeds", "0", "1"]
    words += ["--total-steps", "1024", "--rollout-steps", "64", "--runs", str(tmp_path)]
    words += ["--evaluation.episodes", "2"]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("new") == 4
    assert not list(tmp_path.iterdir())
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["groups"]) == ["max_kl-0.05", "max_kl-0.01"]
    assert found["verdict"] == "not distinguishable"
    folder = tmp_path / "ablate-CartPole-v1"
    assert {"compare.json", "compare.png", "compare.html"} <= {p.name for p in folder.iterdir()}
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    assert len(before) == 4
    assert main(words) == 0
    assert "0 of 4 runs to go" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}


def test_the_bar_of_all_runs_counts_those_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    completed: list[float] = []

    def run(commands: Any, limit: int, done: Any, tick: Any) -> None:
        for number, (task, _) in enumerate(commands):
            done(task, Job(number % 2, '{"return_mean": 1.0}', ""))
            tick([])

    monkeypatch.setattr("keel.ablate.run_jobs", run)
    monkeypatch.setattr(
        "rich.progress.Progress.update", lambda *_, **fields: completed.append(fields["completed"])
    )
    plan = tiny()
    tasks = tasks_of(plan, tmp_path)
    assert _train(plan, tasks, Ablate(plan.name, runs=tmp_path))
    assert completed == list(range(1, len(tasks) + 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["CartPole-v1"], "say what to vary"),
        (["CartPole-v1", "--vary", "region.max_kl"], "expected FIELD=VALUE,VALUE"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["CartPole-v1", "--vary", "seed=1,2", "--at-once", "0"], "--at-once: expected 1"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["ablate", *words]) == 2
    assert message in capsys.readouterr().err


SMALL = ["--vary", "region.max-kl=0.05,0.01", "--total-steps", "1024", "--rollout-steps", "64"]


def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of an ablation that cannot begin and leaves nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    assert main(["ablate", *words, *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("keel: ")
    assert sorted(tmp_path.rglob("*")) == before
    return error


def test_an_environment_that_does_not_exist_is_told_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    error = fails(tmp_path, capsys, "CartPol-v1", "--runs", str(tmp_path / "runs"))
    assert "CartPole-v1" in error
    assert error.count("\n") == 1


def test_cells_that_all_fail_say_why_once_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In the processes that would train them; the second seed is not tried any more."""
    words = ["CartPole-v1", "--runs", str(tmp_path / "runs"), "--device", "nonsense"]
    error = fails(tmp_path, capsys, *words, "--seeds", "0", "1", "--at-once", "1")
    assert error.count("device: 'nonsense' cannot be used") == 1
    assert "seed 1" not in error


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A file stands where the folder would be: root may write everywhere else."""
    (tmp_path / "runs").write_text("")
    error = fails(tmp_path, capsys, "CartPole-v1", "--runs", str(tmp_path / "runs"))
    assert "cannot be written (Not a directory); choose a writable --runs directory" in error
    assert error.count("\n") == 1


def test_two_ablations_of_one_name_do_not_disturb_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with hold_folder(tmp_path / "both"):
        error = fails(tmp_path, capsys, "CartPole-v1", "--runs", str(tmp_path), "--name", "both")
    assert f"in use by process {os.getpid()}" in error
    assert not (tmp_path / "both").exists()


def test_every_reason_is_given_once():
    assert failure_lines([("a", "why"), ("b", "why")], 2) == ["why"]
    assert failure_lines([("a", "why"), ("b", "why")], 3) == ["why (a; b)"]
    assert failure_lines([("a", "why"), ("b", "else")], 2) == ["why (a)", "else (b)"]
    assert failure_lines([], 2) == []


def test_a_job_has_a_result_only_if_it_succeeded_and_printed_one():
    assert Job(0, 'words\n{"a": 1}\n', "").result == {"a": 1}
    assert Job(1, '{"a": 1}\n', "keel: why\n").result is None
    assert Job(0, "", "").result is Job(0, "words", "").result is None
    assert Job(1, "", "keel: why\n").reason == "why"
    assert Job(-9, "", "").reason == "ended with status -9"


def test_seeds_end_with_where_they_are_and_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["train", "CartPole-v1", "--seeds", "0", "1", "--runs", str(tmp_path), "--name", "two"]
    words += ["--total-steps", "1024", "--rollout-steps", "64", "--evaluation.episodes", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "two"
    assert "2 seeds: IQM" in out
    assert f"runs: {folder}\n" in out
    assert f"picture: {folder / 'seeds.png'}\n" in out
    assert f"keel compare {folder} " in out
    assert (folder / "seeds.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--seeds=0", "1"], ["--seeds", "5", "6", "--seeds", "0", "1"]])
@pytest.mark.parametrize("what", [["CartPole-v1"], ["language", "--task", "lookup"]])
def test_the_process_of_a_seed_starts_no_others(
    words: list[str], what: list[str], monkeypatch: pytest.MonkeyPatch
):
    commands: list[list[str]] = []
    monkeypatch.setattr(
        "keel.cli.seeds.run_jobs", lambda jobs, *_: commands.extend(make() for _, make in jobs)
    )
    main(["train", *what, *words, "--name", "two"])
    assert len(commands) == 2
    for seed, command in enumerate(commands):
        assert not any(word.startswith("--seeds") for word in command)
        assert command[-3:] == ["--seed", str(seed), "--json"]


WATCHING = """
env: land
seeds: [0]
settings:
  total_steps: 120
  rollout_steps: 15
  envs: {num: 4, options: "variant=small"}
  network: {hidden: [8]}
  region: {minibatch: 30, epochs: 1}
  evaluation: {episodes: 2}
variants: {plain: {}}
stops:
  wrong: {faults.wrong_actor: true}
  right: {}
watch:
  metrics: {KL: train/kl_exact, L: env/share_L}
  updates: [1, 2, -1, 9]
  expected: {KL: 0.3}
  expected_at: 2
"""


def test_a_plan_shows_what_it_watches_and_what_stops_its_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write(tmp_path, WATCHING)
    assert main(["ablate", str(path), "--runs", str(tmp_path / "runs"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second, last, never = told["watched"]
    kept = [
        json.loads(line)
        for line in (tmp_path / "runs/mine/plain/seed-0/metrics.jsonl").read_text().splitlines()
    ]
    assert len(kept) == 2
    for table, record in ((first, kept[0]), (second, kept[1]), (last, kept[1])):
        assert table["titles"] == ["KL", "L"]
        assert table["rows"]["plain"][0] == record["train/kl_exact"]
    assert first["rows"]["plain"][1] is None  # a game has thirty months, a rollout fifteen
    assert second["rows"]["plain"][1] == kept[1]["env/share_L"]
    assert never["rows"]["plain"] == [None, None]
    assert [table["expected"] for table in told["watched"]] == [[], ["0.3", ""], [], []]
    assert "wrong_actor" in told["stopped"]["wrong"]
    assert told["stopped"]["right"] == "nothing: its first update was taken"
    page = (tmp_path / "runs/mine/compare.html").read_text()
    assert "After update 2" in page
    assert "wrong_actor" in page
    assert main(["ablate", str(path), "--runs", str(tmp_path / "runs")]) == 0
    assert "After the last update" in capsys.readouterr().out
