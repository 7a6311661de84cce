"""Probes: what is right in them is known exactly, and each mistake fails its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from tabular import learn

import keel
from keel.errors import InputError
from keel.probes.agents import SameOpposite
from keel.probes.catalogue import DECISIONS, PROBES
from keel.probes.decisions import END, DecisionEnv, Decisions
from keel.probes.run import run_elsewhere, run_probes, select


def test_values_by_hand() -> None:
    assert DECISIONS["discount"].values(0.5).max(axis=1).tolist() == [0.5, 1.0]
    delay = DECISIONS["delay"].values(0.99)
    assert delay[0].tolist() == [0.99, 0.5]
    # to stay for ever: 0.1 / (1 − 0.99) = 10; to leave: 0.5
    assert DECISIONS["truncation"].values(0.99)[0] == pytest.approx([10.0, 0.5])
    assert DECISIONS["termination"].values(0.99)[0] == pytest.approx([0.6, 0.99])


def test_an_illegal_action_is_never_best_though_it_pays_most() -> None:
    mask = DECISIONS["mask"]
    assert mask.legal is not None
    assert not (mask.best(0.99) & ~np.array(mask.legal)).any()
    env = DecisionEnv(mask)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="is illegal in state"):
        env.step(int(np.argmin(env.action_masks())))


@pytest.mark.parametrize("name", DECISIONS)
def test_environments_of_probes_keep_the_contract(name: str) -> None:
    assert keel.check_env(partial(DecisionEnv, name), steps=60) == []


def test_the_environment_of_two_agents_keeps_the_contract() -> None:
    assert keel.check_env(SameOpposite, steps=20) == []


def test_a_right_trainer_passes_every_probe_that_looks_at_actions() -> None:
    outcomes = list(run_elsewhere(learn, select()))
    assert [outcome.probe.name for outcome in outcomes] == [
        name for name, probe in PROBES.items() if probe.judged == "actions"
    ]
    assert [outcome.measured for outcome in outcomes if not outcome.passed] == []


@pytest.mark.parametrize(
    ("mistake", "failing", "passing"),
    [
        ("sign", "action", ()),
        ("pairs", "observation-action", ("action",)),
        ("myopic", "delay", ("action", "observation-action")),
        ("merged", "truncation", ("action", "observation-action", "delay", "termination")),
        ("endless", "termination", ("action", "observation-action", "delay")),
        ("maskless", "mask", ("action", "observation-action", "delay")),
    ],
)
def test_a_mistake_fails_the_probe_that_isolates_it(
    mistake: str, failing: str, passing: tuple[str, ...]
) -> None:
    trainer = partial(learn, mistake=mistake)
    outcomes = {o.probe.name: o for o in run_elsewhere(trainer, select([failing, *passing]))}
    assert not outcomes[failing].passed
    assert all(outcomes[name].passed for name in passing)


def test_a_trainer_that_raises_fails_and_says_how() -> None:
    def broken(make_env: Any, total_steps: int, seed: int) -> Any:
        raise RuntimeError("no device")

    (outcome,) = run_elsewhere(broken, select(["action"]))
    assert not outcome.passed
    assert outcome.error == "RuntimeError: no device"
    assert outcome.as_dict()["failure"] == PROBES["action"].failure


def test_a_trainer_that_returns_nothing_is_bad_input() -> None:
    with pytest.raises(InputError, match=r"must return act\(obs\), and returned NoneType"):
        list(run_elsewhere(lambda *_: None, select(["action"])))  # type: ignore[arg-type, return-value]


def test_unknown_probes_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'action'"):
        select(["actoin"])


def test_keel_passes_and_its_values_are_looked_at() -> None:
    outcomes = list(run_probes(select(["discount", "mask"])))
    assert [outcome.passed for outcome in outcomes] == [True, True], outcomes
    assert "right is 0.750" in outcomes[0].measured


class TimeLimitsAreEnds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The mistake of `done = terminated or truncated`, planted below Keel."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or truncated, False, info


def test_keel_with_merged_time_limits_fails_the_probe_of_truncation() -> None:
    wrappers = [f"{__name__}:TimeLimitsAreEnds"]
    (outcome,) = run_probes(select(["truncation"]), {"envs": {"wrappers": wrappers}})
    assert not outcome.passed
    assert outcome.error == ""
    assert outcome.measured.startswith("in state 0 action 1")


@pytest.mark.slow
def test_keel_passes_all_probes() -> None:
    failed = [o for o in run_probes(select(), seed=1) if not o.passed]
    assert failed == []


def test_ends_are_told_from_time_limits() -> None:
    env = DecisionEnv(Decisions(((0.0,),), ((0.1, 0.5),), ((0, END),), time_limit=2))
    env.reset(seed=0)
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True)
    env.reset()
    assert env.step(1)[2:4] == (True, False)
