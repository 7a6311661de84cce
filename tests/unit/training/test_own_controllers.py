"""Controllers of one's own: objects, classes and functions, whose state is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_toys import TINY, finish, forget, imported, train_by_command, write_module

import keel
from keel.config import from_dict
from keel.controllers.controllers import Outcome, State
from keel.errors import InputError
from keel.tracking.reader import read_metrics
from keel.tracking.record import read_config
from keel.training.api import iterate
from keel.training.checkpoint import load
from keel.training.runner import resume
from keel.trust import UntrustedCodeError
from keel.types import HyperParams

SOURCE = """
from dataclasses import dataclass, replace

@dataclass(frozen=True)
class Steps:
    rate: float = 1e-3
    def init(self):
        return {"updates": 0.0}
    def __call__(self, state, outcome, hparams):
        updates = state["updates"] + 1.0
        return {"updates": updates}, replace(hparams, entropy_coef=self.rate * updates)

ready = Steps(0.5)
other = Steps(0.1)

def made():
    return Steps(0.25)

def needs(config):
    return Steps()

def nothing():
    return 3

@dataclass(frozen=True)
class Stateless(Steps):
    def init(self):
        return None
"""
GIVEN = {**TINY, "region": {"minibatch": 32, "epochs": 1}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_module(tmp_path, monkeypatch, SOURCE)
    return tmp_path


def learn(here: Path, *controllers: Any, **changes: Any) -> Any:
    given = {**GIVEN, **changes, "controllers": list(controllers)}
    return finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **given))


def stored(here: Path) -> Any:
    return read_config(here / "runs" / "mine" / "seed-0")["controllers"]


@pytest.mark.parametrize(("name", "rate"), [("Steps", 1e-3), ("ready", 0.5), ("made", 0.25)])
def test_a_class_an_object_and_a_function_do_the_same(here: Path, name: str, rate: float) -> None:
    last = learn(here, f"own_parts:{name}")
    assert last.iteration.state.hparams.entropy_coef == pytest.approx(2 * rate)
    assert last.iteration.state.controllers == ({"updates": 2.0},)
    assert stored(here) == [f"own_parts:{name}"]


def test_its_state_is_saved_and_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(here, imported().Steps)
    assert load(here / "runs" / "mine" / "seed-0").data["controllers"] == [{"updates": 2.0}]
    forget(monkeypatch)
    config = from_dict(read_config(here / "runs" / "mine" / "seed-0"))
    last = finish(resume(here / "runs" / "mine", from_dict({"total_steps": 256}, config)))
    assert last.iteration.state.controllers == ({"updates": 4.0},)
    assert last.iteration.state.hparams.entropy_coef == pytest.approx(4e-3)


def test_it_comes_after_those_that_settings_switch_on(here: Path) -> None:
    last = learn(here, imported().made, explore={"entropy_coef": 0.1, "entropy_decay": 0.5})
    assert last.iteration.state.controllers == ({}, {"updates": 2.0})
    assert last.iteration.state.hparams.entropy_coef == pytest.approx(0.5)


def test_from_the_command_line_and_a_file(here: Path) -> None:
    keel.register_controller("steps_of_mine")(imported().Steps)
    assert train_by_command("--controllers", "steps_of_mine,own_parts:made", "own_parts:ready") == 0
    names = ["own_parts:Steps", "own_parts:made", "own_parts:ready"]
    assert stored(here) == names
    lines = read_metrics(here / "runs" / "mine" / "seed-0")
    assert lines["train/entropy_coef"][-1] == pytest.approx(0.5)
    (here / "mine.yaml").write_text("env: CartPole-v1\ncontrollers: [own_parts:other]\n")
    with pytest.raises(UntrustedCodeError, match="controllers own_parts:other"):
        iterate(config="mine.yaml", runs=here / "runs")
    given = {**GIVEN, "trust_code": True, "runs": here / "runs"}
    assert finish(iterate(config="mine.yaml", **given)).iteration.state.controllers


def test_an_object_without_a_path_trains_and_is_not_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local:
        def init(self) -> State:
            return {}

        def __call__(
            self, state: State, outcome: Outcome, hparams: HyperParams
        ) -> tuple[State, HyperParams]:
            return state, replace(hparams, entropy_coef=0.125)

    last = learn(here, Local())
    assert last.iteration.state.hparams.entropy_coef == 0.125
    forget(monkeypatch)
    with pytest.raises(InputError, match=r"controllers object:Local_\w+: was passed from Python"):
        resume(here / "runs" / "mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", r"needs: expected a controller, or what makes one without arguments"),
        ("nothing", r"nothing: expected init\(\) and __call__\(state, outcome, hparams\), got int"),
        ("Stateless", r"Stateless: init\(\) must give numbers by name, got NoneType"),
        ("gone", r"controllers: own_parts:gone: cannot be imported"),
    ],
)
def test_what_is_no_controller_is_told(here: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        learn(here, f"own_parts:{name}")


def test_names_of_keel_are_switched_on_by_their_settings() -> None:
    with pytest.raises(InputError, match=r"pulses is switched on by explore\.pulses"):
        from_dict({"controllers": ["pulses"]})
    with pytest.raises(InputError, match=r"controllers: 'pulse' is not one of .*'pulses'\?"):
        from_dict({"controllers": "pulse"})
