"""Rewards: sums by hand, and functions that raise, lie, hang and die."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import run_child
from hypothesis import given
from hypothesis import strategies as st

from keel.apps.language import rewards as module
from keel.apps.language.rewards import Overlong, RewardError, Rewards, Scores
from keel.apps.language.tasks import Example, held_out, task_named
from keel.errors import InputError, KeelError

EXAMPLE = Example("2+2=", "4", {"number": 4})


def batch(size: int) -> list[Example]:
    return [EXAMPLE] * size


def length(example: Example, completion: str) -> float:
    return float(len(completion))


def right(example: Example, completion: str) -> bool:
    return completion == example.answer


BOTH = pytest.mark.parametrize("timeout", [None, 10.0], ids=["here", "in a process"])


@BOTH
def test_rewards_are_weighted_sums_and_parts_are_kept(timeout: float | None):
    """2·length + 0.5·right: "4" gives 2.5, "22" gives 4."""
    rewards = Rewards(
        {"length": length, "right": right}, {"right": 0.5, "length": 2}, timeout=timeout
    )
    found = rewards(batch(2), ["4", "22"])
    assert found.score.tolist() == [2.5, 4.0]
    assert found.valid.tolist() == [True, True]
    assert found.parts["length"].tolist() == [1.0, 2.0]
    assert found.parts["right"].tolist() == [1.0, 0.0]
    assert found.failures == {}
    assert found.means() == {"length": 1.5, "right": 0.5}


@BOTH
def test_a_weight_of_0_only_measures(timeout: float | None):
    task = task_named("sort-flawed")
    examples = held_out(task, 3)
    functions: dict[str, Any] = {"verify": task.verify, "truth": task.truth}  # type: ignore[attr-defined]
    found = Rewards(functions, {"verify": 1, "truth": 0}, timeout=timeout)(examples, ["0" * 16] * 3)
    assert found.score.tolist() == [1.0] * 3
    assert found.means() == {"verify": 1.0, "truth": 0.0}


def test_verifiers_one_trusts_pay_for_no_process(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any) -> None:
        raise AssertionError("a process")

    monkeypatch.setattr(multiprocessing, "get_context", refuse)
    here = threading.get_ident()
    found = Rewards({"x": lambda example, text: threading.get_ident() == here})(batch(1), [""])
    assert found.score.tolist() == [1.0]


def raise_system_exit(example: Example, completion: str) -> float:
    raise SystemExit(3)


BAD: list[tuple[Callable[[Example, str], Any], str]] = [
    (lambda example, text: 1 / 0, "raised"),
    (raise_system_exit, "raised"),
    (lambda example, text: math.nan, "not finite"),
    (lambda example, text: -math.inf, "not finite"),
    (lambda example, text: np.float32("nan"), "not finite"),
    (lambda example, text: 10**400, "not finite"),
    (lambda example, text: None, "not a number"),
    (lambda example, text: "0.5", "not a number"),
    (lambda example, text: 1j, "not a number"),
    (lambda example, text: np.ones(2), "not a number"),
]


@BOTH
@pytest.mark.parametrize(("bad", "kind"), BAD)
def test_what_fails_is_masked_and_counted(
    bad: Callable[[Example, str], Any], kind: str, timeout: float | None
):
    def sometimes(example: Example, text: str) -> Any:
        return bad(example, text) if text == "bad" else 7

    rewards = Rewards({"length": length, "some": sometimes}, timeout=timeout, max_failures=0.5)
    found = rewards(batch(4), ["a", "bad", "ab", "bad"])
    assert found.valid.tolist() == [True, False, True, False]
    assert np.array_equal(found.score, [8.0, math.nan, 9.0, math.nan], equal_nan=True)
    assert found.parts["length"].tolist() == [1.0, 3.0, 2.0, 3.0]
    assert np.array_equal(np.isnan(found.parts["some"]), ~found.valid)
    assert found.failures == {kind: 2}
    assert found.means() == {"length": 1.5, "some": 7.0}


@pytest.mark.parametrize("number", [1, True, np.float32(1), np.array(1.0), np.int64(1)])
def test_numbers_of_all_kinds_are_numbers(number: Any):
    assert Rewards({"x": lambda example, text: number})(batch(1), [""]).score.tolist() == [1.0]


@BOTH
def test_too_large_a_share_stops_the_run(timeout: float | None):
    rewards = Rewards({"inverse": lambda example, text: 1 / len(text)}, timeout=timeout)
    fine = rewards(batch(10), ["", "", *["a"] * 8])  # a fifth, as allowed
    assert fine.failures == {"raised": 2}
    said = re.escape(
        "rewards: failed on 3 of the first 4 of 10 completions (3 raised), more than max_failures "
        "= 0.2 of the batch; the first was 'inverse' on completion 1: ZeroDivisionError: float "
        "division by zero; mend the function, or raise max_failures"
    ).replace("float\\ ", "(float )?")
    with pytest.raises(RewardError, match=said):
        rewards(batch(10), ["a", "", "", "", *["a"] * 6])
    assert issubclass(RewardError, KeelError)


def test_a_sample_that_fails_twice_is_one_sample():
    def bad(example: Example, text: str) -> float:
        return math.nan if text == "" else 1.0

    found = Rewards({"a": bad, "b": bad}, max_failures=0.5)(batch(2), ["", "x"])
    assert found.failures == {"not finite": 2}
    assert found.valid.tolist() == [False, True]


def test_when_nothing_is_valid_means_are_nan():
    rewards = Rewards({"x": lambda example, text: math.nan}, max_failures=1.0)
    assert math.isnan(rewards(batch(2), ["", ""]).means()["x"])
    assert rewards([], []).score.shape == (0,)


def sleep(example: Example, text: str) -> float:
    time.sleep(60.0)
    return 1.0


def spin(example: Example, text: str) -> float:
    while True:
        pass


def backtrack(example: Example, text: str) -> float:
    """Runs in C for years, with Python's lock held: no thread and no signal handler ends it."""
    return float(re.match(r"(a+)+$", "a" * 60 + "b") is None)


def shrug_off(example: Example, text: str) -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return sleep(example, text)


@pytest.mark.parametrize("hang", [sleep, spin, backtrack, shrug_off])
def test_what_hangs_is_killed_and_the_rest_goes_on(hang: Callable[[Example, str], float]):
    def some(example: Example, text: str) -> float:
        return hang(example, text) if text == "hang" else float(text)

    begun = time.monotonic()
    found = Rewards({"some": some}, timeout=0.5, max_failures=0.5)(
        batch(4), ["1", "hang", "3", "4"]
    )
    assert time.monotonic() - begun < 20.0
    assert np.array_equal(found.score, [1.0, math.nan, 3.0, 4.0], equal_nan=True)
    assert found.failures == {"timed out": 1}
    assert not multiprocessing.active_children()


def test_the_deadline_is_for_each_call_and_not_for_the_batch():
    def slow(example: Example, text: str) -> float:
        time.sleep(0.1)
        return 1.0

    found = Rewards({"slow": slow}, timeout=1.0)(batch(12), ["x"] * 12)
    assert found.valid.all()


def test_hanging_stops_at_the_share_and_not_at_the_end():
    begun = time.monotonic()
    said = (
        r"failed on 3 of the first 3 of 10 completions \(3 timed out\).*no answer for 0.2 s and was"
    )
    with pytest.raises(RewardError, match=said):
        Rewards({"sleep": sleep}, timeout=0.2)(batch(10), ["x"] * 10)
    assert 0.6 <= time.monotonic() - begun < 20.0
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("die", "code"),
    [
        (lambda: os._exit(3), "3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "-9"),
    ],
)
def test_what_dies_takes_nothing_along(die: Callable[[], None], code: str):
    def some(example: Example, text: str) -> float:
        if text == "die":
            die()
        return 1.0

    rewards = Rewards({"some": some}, timeout=10.0, max_failures=0.4)
    found = rewards(batch(3), ["x", "die", "x"])
    assert found.valid.tolist() == [True, False, True]
    assert found.failures == {"died": 1}
    with pytest.raises(RewardError, match=f"its process ended with code {code};"):
        rewards(batch(2), ["die", "x"])


def test_closures_and_data_of_any_kind_reach_the_process():
    lock = threading.Lock()
    example = Example("", "", {"lock": lock})
    found = Rewards({"x": lambda x, text: x.data["lock"] is lock}, timeout=10.0)([example], [""])
    assert found.score.tolist() == [1.0]


def test_torch_works_in_the_process_of_a_parent_with_many_threads():
    def multiply(example: Example, text: str) -> float:
        return float((torch.ones(400, 400) @ torch.ones(400, 400)).mean())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        multiply(EXAMPLE, "")  # starts them
        found = Rewards({"multiply": multiply}, timeout=5.0, max_failures=1.0)(batch(2), ["", ""])
    finally:
        torch.set_num_threads(before)
    assert found.score.tolist() == [400.0, 400.0]


def gone(pid: int) -> bool:
    """Whether a process ended, waiting a while for it; a zombie has ended."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@linux
def test_processes_that_a_function_starts_end_with_it(tmp_path: Path):
    note = tmp_path / "pid"

    def start(example: Example, text: str) -> float:
        child = subprocess.Popen(["sleep", "60"])
        note.write_text(str(child.pid))
        return float(child.wait())

    found = Rewards({"start": start}, timeout=1.5, max_failures=1.0)(batch(1), [""])
    assert found.failures == {"timed out": 1}
    assert gone(int(note.read_text()))


ORPHAN = """
import os, signal, sys, time
from pathlib import Path
from keel.apps.language import rewards
from keel.apps.language.tasks import Example

rewards.GRACE = 0.0

def hang(example, text):
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        pass

rewards.Rewards({"hang": hang}, timeout=0.5)([Example("", "", {})], [""])
"""


@linux
def test_a_worker_ends_itself_when_nobody_is_left_to_end_it(tmp_path: Path):
    note = tmp_path / "pid"
    done = run_child([sys.executable, "-c", ORPHAN, str(note)])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert gone(int(note.read_text()))


def test_a_worker_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch):
    rewards = Rewards({"right": right}, timeout=1.0)
    monkeypatch.setattr(module, "START_TIMEOUT", 0.1)
    monkeypatch.setattr(module, "_serve", lambda *args: time.sleep(60.0))
    with pytest.raises(RewardError, match=r"process to run them in was not there after 0.1 s"):
        rewards(batch(1), [""])
    monkeypatch.setattr(module, "START_TIMEOUT", 60.0)
    monkeypatch.setattr(module, "_serve", lambda *args: os._exit(5))
    with pytest.raises(RewardError, match="process to run them in ended with code 5"):
        rewards(batch(1), [""])
    assert not multiprocessing.active_children()


def test_overlong_is_linear_from_soft_to_hard():
    """DAPO, equation 13, with L_max = 12 and L_cache = 4."""
    overlong = Overlong(soft=8, hard=12, weight=0.5)
    lengths = [0, 8, 9, 10, 12, 20]
    assert overlong.penalty(lengths).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    found = Rewards({"right": right}, overlong=overlong)(batch(6), ["4"] * 6, lengths)
    assert found.score.tolist() == [1.0, 1.0, 0.875, 0.75, 0.5, 0.5]
    assert found.means() == {"right": 1.0, "overlong": pytest.approx(-2.75 / 6)}


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(0, 40), st.integers(1, 40))
def test_overlong_never_rewards_and_never_rises(lengths: list[int], soft: int, cache: int):
    penalty = Overlong(soft, soft + cache).penalty(sorted(lengths))
    assert ((penalty >= -1.0) & (penalty <= 0.0)).all()
    assert (np.diff(penalty) <= 0.0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": {}}, "rewards: expected at least one function"),
        ({"weights": {"rihgt": 1.0}}, "weight of reward: 'rihgt' .*; did you mean 'right'"),
        ({"weights": {}}, "weights: none for reward 'right'"),
        ({"weights": {"right": math.nan}}, "weight of reward 'right': expected a finite number"),
        ({"timeout": 0.0}, "timeout: expected seconds above 0, or None, got 0.0"),
        ({"timeout": math.inf}, "timeout: expected seconds above 0, or None, got inf"),
        ({"max_failures": -0.1}, "max_failures: expected a share from 0 to 1, got -0.1"),
        (
            {"functions": {"overlong": right}, "overlong": Overlong(1, 2)},
            "rewards: the name 'overlong' is that of the length penalty",
        ),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Rewards(**{"functions": {"right": right}, **options})


def test_a_system_without_fork_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(InputError, match="this system cannot fork processes; use timeout=None"):
        Rewards({"right": right}, timeout=1.0)
    assert isinstance(Rewards({"right": right})(batch(1), [""]), Scores)


def test_bad_batches_and_penalties_are_named():
    with pytest.raises(InputError, match="rewards: 2 examples, but 1 completions"):
        Rewards({"right": right})(batch(2), ["4"])
    rewards = Rewards({"right": right}, overlong=Overlong(1, 2))
    with pytest.raises(InputError, match="overlong needs 1 lengths in tokens, got none"):
        rewards(batch(1), ["4"])
    with pytest.raises(InputError, match="overlong needs 1 lengths in tokens, got 2"):
        rewards(batch(1), ["4"], [1, 2])
    with pytest.raises(InputError, match="overlong: expected 0 <= soft < hard, got 2, 2"):
        Overlong(2, 2)
    with pytest.raises(InputError, match=r"overlong\.weight: expected at least 0, got -1"):
        Overlong(1, 2, -1.0)
