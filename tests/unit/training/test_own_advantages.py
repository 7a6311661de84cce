"""Estimators of advantages of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_toys import TINY, finish, forget, imported, train_by_command, write_module

import keel
from keel.config import from_dict
from keel.errors import InputError
from keel.tracking.record import read_config
from keel.training.api import iterate
from keel.training.checkpoint import load
from keel.training.runner import resume
from keel.trust import UntrustedCodeError

SOURCE = """
import torch
from keel.functional import gae

SEEN = {}

def same(reward, value, last_value, terminated, truncated, final_value, weight, gamma, lam):
    return gae(reward, value, last_value, terminated, truncated, final_value,
               gamma=gamma, lam=lam, weight=weight)

def ones(**given):
    SEEN.update(given)
    return torch.ones_like(given["reward"]), given["reward"]

def sums(reward, weight):
    return (reward * weight).sum(), reward

def wants(reward, horizon):
    return reward, reward
"""
GIVEN = {**TINY, "region": {"minibatch": 32, "epochs": 1}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_module(tmp_path, monkeypatch, SOURCE)
    return tmp_path


def learn(here: Path, estimator: Any, name: str = "mine", **changes: Any) -> Any:
    given = {**GIVEN, **changes, "advantage": {"estimator": estimator}}
    return finish(iterate("CartPole-v1", runs=here / "runs", name=name, **given))


def test_gae_by_another_name_is_the_same_run(here: Path) -> None:
    learn(here, "gae", "whole")
    learn(here, imported().same)
    one, other = (load(here / "runs" / name / "seed-0").tensors for name in ("whole", "mine"))
    assert torch.equal(one["opt_state/params"], other["opt_state/params"])
    stored = read_config(here / "runs" / "mine" / "seed-0")
    assert stored["advantage"]["estimator"] == "own_parts:same"


def test_it_gets_what_it_names_and_decides(here: Path) -> None:
    last = learn(here, imported().ones)
    seen = imported().SEEN
    assert seen["reward"].shape == seen["value"].shape == seen["final_value"].shape == (16, 4)
    assert seen["last_value"].shape == (4,)
    assert (seen["gamma"], seen["lam"]) == (0.98, 0.9)  # the preset
    assert last.metrics["train/advantage_raw_mean"] == 1.0
    assert last.metrics["train/target_mean"] == pytest.approx(1.0)  # CartPole pays 1 a step


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sums", r"own_parts:sums: expected \(advantage, target\), two tensors \[16, 4\]"),
        ("wants", r"own_parts:wants: missing a required argument: 'horizon'"),
    ],
)
def test_what_is_no_estimator_is_told(here: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        learn(here, f"own_parts:{name}")


def test_every_way_to_name_it(here: Path) -> None:
    keel.register_advantage("of_mine")(imported().same)
    assert from_dict({"advantage": "of_mine"}).advantage.estimator == "own_parts:same"
    assert train_by_command("--advantage.estimator", "own_parts:same") == 0
    (here / "mine.yaml").write_text("env: CartPole-v1\nadvantage: {estimator: own_parts:ones}\n")
    with pytest.raises(UntrustedCodeError, match=r"advantage\.estimator own_parts:ones"):
        iterate(config="mine.yaml", runs=here / "runs")
    finish(iterate(config="mine.yaml", trust_code=True, runs=here / "runs", **GIVEN))


def test_a_lambda_trains_and_is_not_resumed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(here, lambda reward, value: (reward - value, reward))
    forget(monkeypatch)
    with pytest.raises(InputError, match=r"advantage\.estimator object:lambda_.*no import path"):
        resume(here / "runs" / "mine")


def test_samples_of_the_return_belong_to_gae() -> None:
    with pytest.raises(InputError, match=r"use critic\.targets mean"):
        from_dict({"advantage": "a:b", "critic": {"kind": "quantile"}})
    with pytest.raises(InputError, match=r"advantage\.estimator: 'gea' is not one of gae, .*'gae'"):
        from_dict({"advantage": {"estimator": "gea"}})
