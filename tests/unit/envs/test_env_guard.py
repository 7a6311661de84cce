"""The gate: what is broken is refused before it is kept, and the message says where it was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from keel.envs import BadStepError, ClosedEnvError, EnvWarning, Guarded, Step, make_envs
from keel.envs.guard import BOUNDS_EVERY

NONE = np.zeros(0, dtype=np.int64)


class Scripted:
    """Environments that give whatever a test puts into them."""

    num_envs, agents, backend = 3, (), "scripted"
    autoreset: Any = "next_step"

    def __init__(self, action_space: Any = None) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = action_space or spaces.Discrete(4)
        self.obs: Any = {"obs": np.zeros((3, 2), np.float32)}
        self.reward = np.zeros(3, np.float32)
        self.final: Any = None
        self.closed = 0
        self.received: Any = None

    def reset(self, seed: int) -> Any:
        return self.obs

    def step(self, action: np.ndarray) -> Step:
        self.received = action
        flags = [np.zeros(3, dtype=bool) for _ in range(3)]
        return Step(self.obs, self.reward, *flags, self.final, NONE, NONE, NONE)

    def close(self) -> None:
        self.closed += 1

    def save(self) -> Any:
        return {}, {}

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None: ...


def started(action_space: Any = None) -> tuple[Scripted, Guarded]:
    inner = Scripted(action_space)
    guard = Guarded(inner)
    guard.reset(0)
    return inner, guard


ACT = np.zeros(3, dtype=np.int64)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_observation_is_named_by_environment_step_and_field(value: float) -> None:
    inner, guard = started()
    guard.step(ACT)
    inner.obs["obs"][2, 1] = value
    with pytest.raises(BadStepError, match=rf"environment 2, step 2: obs is {value} at \[1\]"):
        guard.step(ACT)


def test_infinities_that_cancel_are_found() -> None:
    inner, guard = started()
    inner.obs["obs"][0] = [np.inf, -np.inf]
    with pytest.raises(BadStepError, match=r"environment 0, step 1: obs is inf at \[0\]"):
        guard.step(ACT)


def test_a_broken_reward_is_named() -> None:
    inner, guard = started()
    inner.reward[1] = np.nan
    with pytest.raises(BadStepError, match="environment 1, step 1: reward is nan"):
        guard.step(ACT)


def test_a_broken_reset_and_a_broken_final_observation_are_found() -> None:
    inner = Scripted()
    inner.obs["obs"][1, 0] = np.nan
    with pytest.raises(BadStepError, match="environment 1, step 0: obs is nan"):
        Guarded(inner).reset(0)
    inner, guard = started()
    inner.final = np.array([2]), {"obs": np.full((1, 2), np.nan, np.float32)}
    with pytest.raises(BadStepError, match="environment 2, step 1: obs is nan"):
        guard.step(ACT)


def test_large_but_finite_numbers_pass_without_a_sound() -> None:
    inner, guard = started()
    inner.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    guard = Guarded(inner)
    guard.reset(0)
    inner.obs["obs"][:] = 3e38
    inner.reward[:] = -3e38
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.step(ACT)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 3), np.float32), r"obs: expected shape \[3, 2\], got \[3, 3\]"),
        (np.zeros((2, 2), np.float32), r"obs: expected shape \[3, 2\], got \[2, 2\]"),
        (np.zeros((3, 2), np.float64), "obs: expected dtype float32, got float64"),
    ],
)
def test_shapes_and_dtypes(array: np.ndarray, message: str) -> None:
    inner, guard = started()
    inner.obs = {"obs": array}
    with pytest.raises(BadStepError, match=message):
        guard.step(ACT)


def test_leaving_the_bounds_warns_once() -> None:
    inner, guard = started()
    inner.obs["obs"][1, 0] = 1.5
    with pytest.warns(EnvWarning, match=r"environment 1, step 1: obs at \[0\] is 1.5, outside"):
        guard.step(ACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * BOUNDS_EVERY):
            guard.step(ACT)


def test_leaving_the_bounds_late_is_noticed_too() -> None:
    inner, guard = started()
    for _ in range(BOUNDS_EVERY + 1):
        guard.step(ACT)
    inner.obs["obs"][0, 1] = -2.0
    for _ in range(BOUNDS_EVERY - 2):
        guard.step(ACT)  # not looked at in every step
    with pytest.warns(EnvWarning, match="outside the bounds"):
        guard.step(ACT)


def test_a_row_without_a_legal_action_is_named() -> None:
    inner, guard = started()
    inner.obs["action_mask"] = np.ones((3, 4), dtype=bool)
    guard.reset(0)
    guard.step(ACT)
    inner.obs["action_mask"][1] = False
    with pytest.raises(BadStepError, match="environment 1, step 2: action_mask forbids every"):
        guard.step(ACT)


def test_a_choice_of_which_nothing_is_left_is_named() -> None:
    """Two choices of 2 and 3: a mask may not close one of them, whatever it leaves of the other."""
    inner = Scripted(spaces.MultiDiscrete([2, 3]))
    guard = Guarded(inner)
    inner.obs["action_mask"] = np.ones((3, 5), dtype=bool)
    guard.reset(0)
    action = np.zeros((3, 2), np.int64)
    inner.obs["action_mask"][2] = [True, True, False, False, True]
    guard.step(action)
    inner.obs["action_mask"][2] = [True, True, False, False, False]
    with pytest.raises(
        BadStepError, match="environment 2, step 2: action_mask forbids everything of one choice"
    ):
        guard.step(action)


def test_a_mask_that_comes_and_goes_is_refused() -> None:
    inner, guard = started()
    inner.obs["action_mask"] = np.ones((3, 4), dtype=bool)
    with pytest.raises(BadStepError, match="action_mask came with step only"):
        guard.step(ACT)
    inner, guard = started()
    inner.obs["action_mask"] = np.ones((3, 4), dtype=bool)
    guard.reset(0)
    del inner.obs["action_mask"]
    with pytest.raises(BadStepError, match="action_mask came with reset only"):
        guard.step(ACT)


def test_a_mask_of_another_width_is_refused() -> None:
    inner, guard = started()
    inner.obs["action_mask"] = np.ones((3, 4), dtype=bool)
    guard.reset(0)
    inner.obs["action_mask"] = np.ones((3, 5), dtype=bool)
    with pytest.raises(
        BadStepError, match=r"action_mask: expected bool \[3, 4\], got bool \[3, 5\]"
    ):
        guard.step(ACT)


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (spaces.Discrete(4), np.array([0, 4, 0]), "environment 1, step 1: action is 4"),
        (spaces.Discrete(4), np.array([0, 0, -1]), "environment 2, step 1: action is -1"),
        (spaces.Discrete(4), np.array([0, 0, -1], np.int32), "environment 2, .*is -1"),
        (spaces.Discrete(4), np.zeros(3), "action: expected integers, got float64"),
        (spaces.Discrete(4), np.zeros((3, 1), int), r"shape \[3\], got \[3, 1\]"),
        (spaces.Discrete(4), [0, 0, 0], r"shape \[3\], got list"),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 2], [1, 3], [0, 0]]), "environment 1.*is 3"),
        (spaces.MultiBinary(2), np.array([[0, 1], [1, 2], [0, 0]]), "environment 1.*is 2"),
        (spaces.Box(-1, 1, (1,)), np.array([[0], [0], [np.nan]], np.float32), "environment 2"),
    ],
)
def test_an_action_that_is_none_is_refused_before_it_does_harm(
    space: Any, action: Any, message: str
) -> None:
    inner, guard = started(space)
    with pytest.raises(BadStepError, match=message):
        guard.step(action)
    assert inner.received is None


def test_legal_actions_pass_whatever_their_width() -> None:
    for dtype in (np.int64, np.int32, np.int8, np.uint8):
        _, guard = started()
        guard.step(np.array([0, 3, 1], dtype))
    _, guard = started(spaces.Box(-1, 1, (1,)))
    guard.step(np.full((3, 1), 50.0, np.float32))  # unclipped is welcome
    _, guard = started(spaces.MultiBinary(2))
    guard.step(np.ones((3, 2), dtype=bool))


def test_the_order_of_calls_is_enforced() -> None:
    inner = Scripted()
    guard = Guarded(inner)
    with pytest.raises(ClosedEnvError, match="step before reset"):
        guard.step(ACT)
    guard.reset(0)
    guard.close()
    guard.close()
    assert inner.closed == 1
    with pytest.raises(ClosedEnvError, match="step after close"):
        guard.step(ACT)
    with pytest.raises(ClosedEnvError, match="reset after close"):
        guard.reset(0)


def test_the_guard_is_on_by_default_and_can_be_left_out() -> None:
    assert isinstance(make_envs("CartPole-v1", 1, seed=0), Guarded)
    assert not isinstance(make_envs("CartPole-v1", 1, seed=0, guard=False), Guarded)
