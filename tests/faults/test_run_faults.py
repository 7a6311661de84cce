"""Run directories under attack: full disks, two runs at once, dead locks, damaged metrics."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import run_child

from keel.tracking import (
    MetricsWriter,
    RunDirectory,
    RunError,
    RunWarning,
    list_runs,
    read_config,
    read_metrics,
)
from keel.tracking.files import acquire_lock, holder_of, is_held, release_lock

CONFIG = {"env": "CartPole-v1", "total_steps": 1000, "region": {"max_kl": 0.02}}


def create(root: Path) -> RunDirectory:
    return RunDirectory.create(root, "demo", config=CONFIG)


def in_namespace(mount: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command after `mount`, in a mount namespace of its own."""
    script = f'{mount} && exec "$@"'
    return run_child(["unshare", "-rm", "sh", "-c", script, "sh", *command])


@pytest.fixture
def mountable(tmp_path):
    probe = f"mount -t tmpfs tmpfs {tmp_path}"
    if shutil.which("unshare") is None or in_namespace(probe, "true").returncode:
        pytest.skip("no right to mount")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_in_metrics(tmp_path, monkeypatch, code):
    """Fault 3: one warning, a visible count, no half line, and training goes on."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"a": 1.0})
    write = os.write

    def full(descriptor, data):
        if descriptor != writer._descriptor:
            return write(descriptor, data)
        if len(data) > 10:
            return write(descriptor, bytes(data[:10]))  # some bytes still fit
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.warns(RunWarning, match="the disk is full; metrics are dropped and counted"):
            writer.write(2, {"a": 2.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.write(3, {"a": 3.0})
    assert writer.dropped == 2
    writer.write(4, {"a": 4.0})
    writer.close()
    table = read_metrics(path)
    assert table.step.tolist() == [1, 4]
    assert (table.dropped, table.ignored) == (2, 0)


FILL = """
import sys, warnings
from pathlib import Path
from keel.tracking import MetricsWriter, read_metrics
path = Path(sys.argv[1]) / "metrics.jsonl"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    writer = MetricsWriter(path)
    for step in range(100):
        writer.write(step, {"text": "x" * 1000})
    full = writer.dropped
    writer.truncate_after(20)
    writer.write(200, {"a": 1.0})
    writer.close()
table = read_metrics(path)
print(len(caught), full, table.ignored, table.step[-2:].tolist(), table.dropped == full)
"""


@pytest.mark.usefixtures("mountable")
def test_a_disk_that_is_really_full(tmp_path):
    """Fault 3: the same on a real file system of 64 KiB, which later has space again."""
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path}"
    done = in_namespace(mount, sys.executable, "-c", FILL, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=2)[0] == "1"
    assert done.stdout.endswith(" 0 [20, 200] True\n")


def test_resume_under_a_changed_config(tmp_path):
    """Fault 11: the difference is shown, and refused unless the field may change."""
    run = create(tmp_path)
    run.close()
    changed = {**CONFIG, "total_steps": 2000, "region": {"max_kl": 0.05}}
    with pytest.raises(RunError) as caught:
        RunDirectory.resume(run.path, config=changed, may_change={"total_steps"})
    assert "region.max_kl: 0.02 → 0.05" in str(caught.value)
    assert "total_steps: " not in str(caught.value)
    assert "may change: total_steps" in str(caught.value)
    assert read_config(run.path) == CONFIG
    assert not (run.path / "lock").exists()
    longer = {**CONFIG, "total_steps": 2000}
    RunDirectory.resume(run.path, config=longer, may_change={"total_steps"}).close()
    assert read_config(run.path) == longer


def test_a_second_run_is_refused(tmp_path):
    """Fault 13: from another process; it names process and host, and changes nothing."""
    with create(tmp_path) as run:
        script = (
            "import sys; from keel.tracking import RunDirectory, RunError\n"
            "try: RunDirectory.resume(sys.argv[1])\n"
            "except RunError as error: sys.exit(str(error))\n"
        )
        command = [sys.executable, "-c", script, str(run.path)]
        done = run_child(command)
        assert done.returncode == 1
        assert f"in use by process {os.getpid()} on {socket.gethostname()}" in done.stderr
        with pytest.raises(RunError, match="in use by process"):
            RunDirectory.resume(run.path)  # nor this process a second time
        assert holder_of(run.path).startswith(f"process {os.getpid()} on ")
        assert list_runs(tmp_path)[0].status == "running"
    RunDirectory.resume(run.path).close()


def test_the_list_names_damaged_and_missing_metrics(tmp_path):
    """Of a run that goes on, the last line may just be half written."""
    with create(tmp_path) as run:
        metrics = run.path / "metrics.jsonl"
        metrics.write_bytes(b'{"step":1,"rollout/return_mean":3.0}\n{"step":2,"rollo')
        assert (list_runs(tmp_path)[0].step, list_runs(tmp_path)[0].problem) == (1, "")
    (info,) = list_runs(tmp_path)
    assert (info.status, info.step, info.return_mean) == ("finished", 1, 3.0)
    assert info.problem == "metrics.jsonl: 1 damaged line near its end"
    metrics.unlink()
    assert list_runs(tmp_path)[0].problem == "metrics.jsonl: no such file"


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_line_of_metrics_that_is_gone_is_missed(tmp_path, line):
    with create(tmp_path) as run, MetricsWriter(run.metrics) as writer:
        for step in range(3):
            writer.write(step, {"a": 1.0})
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    assert read_metrics(run.path).damage == ()
    run.metrics.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    gone = "1 line is missing since the run ended"
    for names in (None, ["a"]):
        table = read_metrics(run.path, names)
        assert (table.missing, table.damage, len(table)) == (1, (gone,), 2)
    assert list_runs(tmp_path)[0].problem == f"metrics.jsonl: {gone}"
    with pytest.warns(RunWarning, match=gone):
        RunDirectory.resume(run.path).close()
    assert read_metrics(run.path).damage == ()  # said once, then it goes on from there


def kill_a_run(root: Path) -> Path:
    """A run whose process was killed, and has been waited for."""
    script = (
        "import os, signal, sys; from keel.tracking import RunDirectory\n"
        "RunDirectory.create(sys.argv[1], 'demo', config={})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run_child([sys.executable, "-c", script, str(root)])
    assert done.returncode == -9
    return root / "demo" / "seed-0"


def test_the_stale_lock_of_a_dead_process_is_taken_over(tmp_path, caplog):
    """Fault 14: taken over and logged."""
    path = kill_a_run(tmp_path)
    dead = holder_of(path)
    assert dead.startswith("process ")
    assert list_runs(tmp_path)[0].status == "crashed"
    with caplog.at_level(logging.WARNING, "keel.tracking"), RunDirectory.resume(path):
        assert holder_of(path).startswith(f"process {os.getpid()} on ")
    assert f"took over the lock of {dead}, which is dead" in caplog.text
    assert not (path / "lock").exists()


@pytest.mark.parametrize(
    "left",
    [
        "",  # its process died before it wrote its name
        "process 1 on elsewhere (2025-01-01)",  # the id of a process that runs here, too
        '{"pid": 1, "host": "elsewhere", "since": "2025-01-01", "started": "boot/17"}',  # Keel 0.1
        "\x1b[31m\xff" * 10_000,
    ],
)
def test_what_a_lock_says_does_not_decide_who_holds_it(tmp_path, left, caplog):
    """Fault 14: a file that nobody keeps locked is free, whatever stands in it."""
    run = create(tmp_path)
    run.close()
    (run.path / "lock").write_text(left)
    assert not is_held(run.path)
    RunDirectory.resume(run.path).close()
    assert "\x1b" not in caplog.text


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path):
    run = create(tmp_path)
    run.close()
    (tmp_path / "precious").write_text("mine")
    (run.path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="cannot be written"):
        RunDirectory.resume(run.path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_zombie_holds_no_lock(tmp_path, child):
    """Fault 14: a killed process that its parent has not waited for is dead."""
    with create(tmp_path) as run:
        pass
    script = (
        "import sys; from keel.tracking import RunDirectory\n"
        "RunDirectory.resume(sys.argv[1]); print(flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(run.path)]
    process = child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert is_held(run.path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and left as a zombie
    assert not is_held(run.path)


def test_a_fork_that_outlives_its_process_holds_no_lock(tmp_path):
    """Fault 14: `flock` alone would last as long as any process that inherited the file."""
    script = (
        "import os, signal, sys, time; from keel.tracking import RunDirectory\n"
        "RunDirectory.create(sys.argv[1], 'demo', config={})\n"
        "child = os.fork()\n"
        "if not child: os.setsid(), os.close(1), os.close(2), time.sleep(60), os._exit(0)\n"
        "print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run_child([sys.executable, "-c", script, str(tmp_path)])
    try:
        assert list_runs(tmp_path)[0].status == "crashed"
        RunDirectory.resume(tmp_path / "demo" / "seed-0").close()
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def test_of_many_that_find_a_stale_lock_one_takes_over(tmp_path):
    """Fault 14: at once, and beside others that only look."""
    path = kill_a_run(tmp_path)
    start = threading.Barrier(6)

    def attempt(number):
        start.wait()
        if number >= 4:
            return [is_held(path) for _ in range(50)] and None
        try:
            return acquire_lock(path)
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(attempt, range(6)))[:4]
    assert outcomes.count(None) == 1
    assert all("in use by process" in x for x in outcomes if x is not None)
    release_lock(path)
    assert not is_held(path)


def test_a_forked_child_does_not_release_the_lock(tmp_path):
    """Fault 13: workers inherit the object; the run is still its parent's."""
    with create(tmp_path) as run:
        child = os.fork()
        if child == 0:
            release_lock(run.path)
            os._exit(0)
        os.waitpid(child, 0)
        assert (run.path / "lock").exists()


def test_damaged_metrics_are_read_as_far_as_they_go(tmp_path):
    """Fault 35: half a line, NaN tokens, duplicate steps, and lines that are no records."""
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"step":1,"a":1.0}',
        b'{"step":2,"a":NaN,"b":-Infinity}',
        b'{"step":3,"a":',
        b'{"step":4,"a":4.0}{"step":5}',
        b"[1,2]",
        b'{"a":1}',
        b'{"step":-1}',
        b'{"step":true}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"step":6,"a":6.0}',
        b'{"step":1,"a":10.0}',
        b'{"step":7,"a":7.',
    ]
    path.write_bytes(b"\n".join(lines))
    table = read_metrics(path)
    assert table.step.tolist() == [1, 2, 6]
    assert table["a"].tolist()[::2] == [10.0, 6.0]  # the last write wins
    assert str(table["a"][1]) == "nan"
    assert (table.ignored, table.duplicates, table.nonstandard) == (9, 1, 2)


def test_a_writer_does_not_continue_half_a_line(tmp_path):
    """Fault 35: the next record stands on a line of its own."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"a":1.0}\n{"step":2,"a"')
    with MetricsWriter(path) as writer:
        writer.write(3, {"a": 3.0})
    first, second = path.read_bytes().splitlines()
    assert (first, json.loads(second)["step"]) == (b'{"step":1,"a":1.0}', 3)


@pytest.mark.usefixtures("mountable")
def test_a_read_only_disk_fails_at_the_start(tmp_path):
    """Fault 36: on a real read-only file system, for a new run and a resumed one."""
    script = (
        "import sys; from keel.tracking import RunDirectory, RunError\n"
        "for make in (lambda: RunDirectory.create(sys.argv[1], 'new', config={}),\n"
        "             lambda: RunDirectory.resume(sys.argv[1] + '/demo/seed-0')):\n"
        "    try: make()\n"
        "    except RunError as error: print(error)\n"
    )
    create(tmp_path).close()
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    done = in_namespace(mount, sys.executable, "-c", script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("cannot be written (Read-only file system)" in line for line in lines)
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


def test_a_root_that_is_a_file_fails_at_the_start(tmp_path):
    """Fault 36: typed, with what to do."""
    (tmp_path / "runs").touch()
    with pytest.raises(RunError, match=r"Not a directory.*choose a writable --runs directory"):
        create(tmp_path / "runs")


def test_a_vanished_directory_stops_the_run(tmp_path):
    """Fault 36: writing into a deleted file succeeds, and would be noticed by nobody."""
    run = create(tmp_path)
    writer = MetricsWriter(run.metrics)
    writer.write(1, {"a": 1.0})
    shutil.rmtree(tmp_path / "demo")
    with pytest.raises(RunError, match=r"metrics cannot be written: .*deleted"):
        writer.write(2, {"a": 2.0})
    writer.close()
    run.close()
    assert not (tmp_path / "demo").exists()
    with pytest.raises(RunError, match="metrics cannot be written: No such file"):
        MetricsWriter(run.metrics)
