"""Environments that raise, hang, die or lie: each is named, and nothing is left behind.

Rows 18 to 22 and 31 of the list of faults. Processes are real; failures are injected by the
environments themselves, at a known step, so that no test sleeps for longer than it must.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from children import is_alive, run_child
from gymnasium import spaces

from keel.envs import (
    BadStepError,
    ClosedEnvError,
    EnvError,
    EnvHungError,
    EnvMakeError,
    EnvRaisedError,
    Envs,
    WorkerDiedError,
    env_seeds,
    make_envs,
)
from keel.envs.workers import AsyncEnvs
from keel.errors import InputError


class Faulty(gymnasium.Env[Any, Any]):
    """Counts its steps, and fails in the way it was told to.

    `fault` happens in step `at` of the environment whose first draw is the one that `victim`
    names: seeds differ, so exactly one of several is struck. After a restart the seeds are new and
    the fault does not come again.
    """

    observation_space = spaces.Box(-1.0, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault: str = "", victim: int = -1, at: int = 3) -> None:
        self.fault, self.victim, self.at, self.struck = fault, victim, at, False
        if fault == "make":
            raise RuntimeError("no licence found")
        if fault == "make in worker" and multiprocessing.parent_process() is not None:
            raise RuntimeError("one licence, one process")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.struck = seed == self.victim
        self.count = 0
        if self.struck and self.fault == "reset":
            raise KeyError("no such level")
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward: Any = 1.0
        obs = self.seen()
        if self.struck and self.count == self.at:
            if self.fault == "raise":
                raise ZeroDivisionError("the physics exploded")
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "exit":
                os._exit(7)
            obs = {"nan": obs * np.nan, "shape": np.zeros(3, np.float32)}.get(self.fault, obs)
            reward = {"reward": np.inf}.get(self.fault, 1.0)
        return obs, reward, False, self.count >= 5, {}

    def seen(self) -> np.ndarray:
        return np.array([self.count], dtype=np.float32)


if "keel/Faulty-v0" not in gymnasium.registry:
    gymnasium.register("keel/Faulty-v0", Faulty)  # type: ignore[arg-type]

VICTIM = 2


def faulty(fault: str, backend: Any = "async", at: int = 3, **options: Any) -> Envs:
    seeds = env_seeds(0, 4)
    kwargs = {"fault": fault, "victim": seeds[VICTIM], "at": at}
    options = {"threads": 2, "timeout": 30.0, **options}
    return make_envs("keel/Faulty-v0", 4, backend=backend, seed=0, env_kwargs=kwargs, **options)


def run(envs: Envs, steps: int = 5) -> None:
    envs.reset(0)
    for _ in range(steps):
        envs.step(np.zeros(4, dtype=np.int64))


def workers_of(envs: Any) -> list[int]:
    return [worker.process.pid for worker in getattr(envs, "envs", envs)._workers]


def all_end(pids: list[int], within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- 18: an environment raises ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_exception_in_step_comes_with_its_traceback_and_its_place(backend: Any) -> None:
    envs = faulty("raise", backend)
    pids = workers_of(envs) if backend == "async" else []
    with pytest.raises(EnvRaisedError) as caught:
        run(envs)
    error = caught.value
    assert (error.index, error.seed, error.step) == (VICTIM, env_seeds(0, 4)[VICTIM], 3)
    assert str(error).startswith(f"environment 2 raised in step (seed {error.seed}, step 3)")
    assert "Traceback" in str(error)
    assert "ZeroDivisionError: the physics exploded" in str(error)
    assert all_end(pids), "the siblings are closed"
    with pytest.raises(ClosedEnvError, match="step after close"):
        envs.step(np.zeros(4, dtype=np.int64))


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_exception_in_reset_is_told_the_same_way(backend: Any) -> None:
    envs = faulty("reset", backend)
    pids = workers_of(envs) if backend == "async" else []
    with pytest.raises(EnvRaisedError, match=r"environment 2 raised in reset \(seed \d+, step 0\)"):
        run(envs)
    assert all_end(pids)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_an_exception_in_the_constructor_is_one_line_that_names_the_environment(
    backend: Any,
) -> None:
    with pytest.raises(EnvMakeError) as caught:
        faulty("make", backend)
    assert re.fullmatch(
        r"keel/Faulty-v0: cannot be made: RuntimeError: no licence found.* "
        r"\(.*\.py, line \d+\)",
        str(caught.value),
    )


def test_an_exception_in_a_workers_constructor_alone_names_the_environment() -> None:
    with pytest.raises(EnvMakeError) as caught:
        faulty("make in worker")
    assert str(caught.value) == (
        "keel/Faulty-v0: cannot be made in a worker process: RuntimeError: one licence, one process"
    )


def test_an_option_that_the_constructor_does_not_know_names_the_environment() -> None:
    with pytest.raises(InputError, match=r"keel/Faulty-v0: .*unexpected keyword argument 'size'"):
        make_envs("keel/Faulty-v0", 2, seed=0, env_kwargs={"size": 3})


def test_without_the_guard_the_siblings_are_closed_as_well() -> None:
    envs = faulty("raise", guard=False)
    pids = workers_of(envs)
    with pytest.raises(EnvRaisedError):
        run(envs)
    assert all_end(pids)
    with pytest.raises(ClosedEnvError, match="worker processes are closed"):
        envs.step(np.zeros(4, dtype=np.int64))


# --- 19: an environment hangs -------------------------------------------------------------------


def test_a_hang_is_named_and_its_worker_killed() -> None:
    envs = faulty("hang", timeout=1.0)
    pids = workers_of(envs)
    with pytest.raises(EnvHungError, match="gave no answer for 1 s; its worker was killed") as e:
        run(envs)
    assert (e.value.index, e.value.seed, e.value.step) == (VICTIM, env_seeds(0, 4)[VICTIM], 3)
    assert all_end(pids)


# --- 20: a worker is killed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "how"), [("kill", "was killed by SIGKILL"), ("exit", "exited with code 7")]
)
def test_a_dead_worker_is_named_with_its_signal(fault: str, how: str) -> None:
    envs = faulty(fault)
    pids = workers_of(envs)
    with pytest.raises(WorkerDiedError, match=rf"environment 2 lost its worker: .*{how}") as caught:
        run(envs)
    assert (caught.value.index, caught.value.step) == (VICTIM, 3)
    assert all_end(pids)


def test_a_worker_killed_between_two_steps_is_noticed() -> None:
    envs = faulty("")
    envs.reset(0)
    pids = workers_of(envs)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        run(envs)
    assert all_end(pids)


def test_workers_leave_signals_to_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From their first moment on, while they still import what they need."""
    await_start = AsyncEnvs._await_start

    def signalled(self: AsyncEnvs, worker: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(worker.process.pid, number)
        await_start(self, worker)

    monkeypatch.setattr(AsyncEnvs, "_await_start", signalled)
    envs = faulty("", timeout=120.0)
    run(envs, 2)
    for pid in workers_of(envs):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    run(envs, 2)
    envs.close()


@pytest.mark.parametrize(("fault", "timeout"), [("kill", 30.0), ("hang", 1.0)])
def test_a_restart_marks_the_lost_rows_counts_itself_and_goes_on(
    fault: str, timeout: float
) -> None:
    envs: Any = faulty(fault, restart_workers=1, timeout=timeout)
    envs.reset(0)
    lost = np.array([False, False, True, True])  # the lanes of the worker that died
    for number in range(1, 9):
        step = envs.step(np.zeros(4, dtype=np.int64))
        if number == 3:
            assert (step.ignored == lost).all()
            assert (step.truncated == lost).all()
            assert not step.terminated.any()
            assert step.reward.tolist() == [1.0, 1.0, 0.0, 0.0]
            assert step.obs["obs"][:, 0].tolist() == [3.0, 3.0, 0.0, 0.0], "new episodes began"
            assert step.episode_index.size == 0, "a lost episode is no result"
        if number == 5:
            assert step.episode_index.tolist() == [0, 1]
        if number == 8:
            assert step.episode_index.tolist() == [2, 3]
            assert step.episode_return.tolist() == [5.0, 5.0]
    assert envs.restarts == 1
    envs.close()


def test_restarts_are_capped() -> None:
    envs: Any = faulty("", restart_workers=1)
    envs.reset(0)
    os.kill(workers_of(envs)[0], signal.SIGKILL)
    envs.step(np.zeros(4, dtype=np.int64))
    pids = workers_of(envs)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        envs.step(np.zeros(4, dtype=np.int64))
    assert all_end(pids)


def test_a_worker_that_dies_before_its_first_reset_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs: Any = faulty("", restart_workers=1)
    envs.reset(0)

    def start_and_kill(self: Any, worker: Any) -> None:
        worker.process.kill()
        worker.process.join()

    monkeypatch.setattr("keel.envs.workers.AsyncEnvs._await_start", start_and_kill)
    os.kill(workers_of(envs)[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        envs.step(np.zeros(4, dtype=np.int64))


def test_after_a_restart_the_seeds_are_new() -> None:
    envs: Any = faulty("", restart_workers=1)
    envs.reset(0)
    before = list(envs.envs._seeds)
    os.kill(workers_of(envs)[0], signal.SIGKILL)
    envs.step(np.zeros(4, dtype=np.int64))
    after = envs.envs._seeds
    assert not set(before[:2]) & set(after[:2])
    assert before[2:] == after[2:]
    envs.close()


# --- 21: the parent is killed -------------------------------------------------------------------

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
PARENT = """
    import sys, time
    sys.path[:0] = {folders!r}
    import test_env_faults as faults

    if __name__ == "__main__":
        envs = faults.faulty({fault!r}, at=1, timeout=600.0)
        envs.reset(0)
        print(*faults.workers_of(envs), flush=True)
        envs.step(faults.np.zeros(4, dtype=faults.np.int64))
        time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("fault", ["", "hang"])
def test_a_killed_parent_leaves_neither_orphans_nor_shared_memory(
    tmp_path: Path, fault: str, child: Any
) -> None:
    script = tmp_path / "parent.py"
    source = PARENT.format(folders=FOLDERS, fault=fault)
    script.write_text(textwrap.dedent(source))
    parent = child([sys.executable, str(script)], stderr=None)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all_end(pids), "no orphans, whether idle or in the middle of a step"
    left = [file.name for file in Path("/dev/shm").iterdir() if f"-{parent.pid}-" in file.name]
    assert left == []


def test_a_normal_end_leaves_nothing_either(tmp_path: Path) -> None:
    """No close, no `with`: the script simply ends."""
    script = tmp_path / "script.py"
    source = PARENT.format(folders=FOLDERS, fault="")
    script.write_text(textwrap.dedent(source).replace("time.sleep(600)", "pass"))
    done = run_child([sys.executable, str(script)], check=True)
    assert all_end([int(pid) for pid in done.stdout.split()])
    assert done.stderr == ""


def test_forgotten_environments_are_closed_with_their_last_reference() -> None:
    envs = faulty("", guard=False)
    pids = workers_of(envs)
    del envs
    assert all_end(pids)


def test_workers_outlive_the_thread_that_started_them() -> None:
    """The kernel's parent-death signal follows threads; an application may well have some."""
    with ThreadPoolExecutor(1) as pool:
        envs = pool.submit(faulty, "").result()
    run(envs)
    envs.close()


PLAIN_SCRIPT = """
import gymnasium, numpy as np
from keel.envs import make_envs

print("the script runs")

class Inner(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), float(action), False, False, {}

class Outer(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("Inner-v0"))

gymnasium.register("Inner-v0", "__main__:Inner")
gymnasium.register("Outer-v0", Outer)
for name in ("Inner-v0", "Outer-v0"):
    envs = make_envs(name, 2, backend="async", seed=0, threads=1)
    envs.reset(0)
    print(name, envs.step(np.array([0, 1])).reward.tolist())
"""


def test_a_script_without_a_main_guard_runs_once_and_its_own_classes_reach_the_workers(
    tmp_path: Path,
) -> None:
    """Workers do not import the script: neither by file, nor what it has registered by name."""
    script = tmp_path / "script.py"
    script.write_text(PLAIN_SCRIPT)
    done = run_child([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the script runs",
        "Inner-v0 [0.0, 1.0]",
        "Outer-v0 [0.0, 1.0]",
    ]


def test_what_cannot_be_sent_to_a_worker_is_told_in_one_line() -> None:
    kwargs = {"fault": threading.Lock()}
    with pytest.raises(
        EnvError, match=r"cannot be sent to a worker process .*use envs\.backend sync"
    ):
        make_envs("keel/Faulty-v0", 2, backend="async", seed=0, env_kwargs=kwargs)


# --- 22 and 31: what environments give is looked at ---------------------------------------------


@pytest.mark.parametrize(
    ("fault", "backend", "message"),
    [
        ("nan", "sync", r"environment 2, step 3: obs is nan at \[0\]"),
        ("reward", "async", "environment 2, step 3: reward is inf"),
        ("shape", "sync", r"environment 2, step 3: obs: expected shape \[1\], got \[3\]"),
        ("shape", "async", r"environment 2, step 3: obs: expected shape \[1\], got \[3\]"),
    ],
)
def test_lies_are_refused_before_they_are_stored(fault: str, backend: Any, message: str) -> None:
    envs = faulty(fault, backend)
    with pytest.raises(BadStepError, match=message):
        run(envs)
    envs.close()


def test_an_interrupted_step_cannot_be_mistaken_for_a_finished_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import keel.envs.workers

    envs = faulty("", guard=False)
    envs.reset(0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(keel.envs.workers, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(4, dtype=np.int64))
    with pytest.raises(ClosedEnvError, match="a step was interrupted"):
        envs.step(np.zeros(4, dtype=np.int64))
    envs.close()
