"""Surrogates of one's own: from Python, from a file, from the command line, and stored by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_toys import TINY, finish, forget, imported, train_by_command, write_module

import keel
from keel.cli import main
from keel.config import Network, from_dict, nested
from keel.config.common import LOSSES
from keel.errors import InputError, ShapeError
from keel.experience.batch import Batch, Tree
from keel.functional.surrogate import Surrogate
from keel.losses.ppo import Objective
from keel.losses.token import TokenObjective
from keel.networks.accelerate import step_obstacle
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.tracking.reader import read_metrics
from keel.tracking.record import read_config
from keel.training.api import iterate
from keel.training.builder import build_objective, initial_hparams
from keel.training.runner import resume
from keel.training.session import open_session
from keel.trust import UntrustedCodeError

SOURCE = """
import torch

CALLS = []

def squared(ratio, advantage, hparams):
    CALLS.append(float(hparams.clip_high))
    return -ratio * advantage + (ratio - 1.0) ** 2

def averaged(ratio, advantage, hparams):
    return -(ratio * advantage).mean()

def make():
    return lambda ratio, advantage, hparams: -ratio * advantage
"""
SMALL = {**TINY, "region": {"minibatch": 32, "epochs": 2}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_module(tmp_path, monkeypatch, SOURCE)
    return tmp_path


def with_loss(loss: Any) -> dict[str, Any]:
    return {**SMALL, "region": {**SMALL["region"], "loss": loss}}


def stored(folder: Path) -> Any:
    return read_config(folder / "runs" / "mine" / "seed-0")["region"]["loss"]


def agent_and_batch() -> tuple[Agent, Batch]:
    from gymnasium import spaces

    agent = build_agent(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), Network(hidden=(8,)), seed=0)
    generator = torch.Generator().manual_seed(1)
    obs: Tree = {"obs": torch.randn(6, 3, generator=generator)}
    with torch.no_grad():
        behavior = agent.policy(agent.initial, obs)
    action = torch.tensor([0, 1, 0, 1, 1, 0])
    log_prob = agent.dist.log_prob(behavior, action) - torch.linspace(-0.5, 0.5, 6)
    zeros = torch.zeros(6)
    advantage = torch.randn(6, generator=generator)
    batch = Batch(
        obs,
        behavior,
        action,
        log_prob,
        weight=torch.ones(6),
        advantage=advantage,
        target=zeros,
        old_value=zeros[:, None],
    )
    return agent, batch


def policy_loss(objective: Objective) -> float:
    agent, batch = agent_and_batch()
    hparams = initial_hparams(from_dict({})).tensor()
    return objective(agent, agent.initial, batch, hparams)[1].policy_loss.item()


def test_a_function_is_what_is_averaged(here: Path) -> None:
    """At ratios e^±½ … of six actions: mean of −r·A + (r − 1)², written out."""
    _, batch = agent_and_batch()
    ratio = torch.linspace(-0.5, 0.5, 6).exp()
    expected = (-ratio * batch.advantage + (ratio - 1.0) ** 2).mean().item()
    assert policy_loss(Objective(surrogate=imported().squared)) == pytest.approx(expected, abs=1e-6)
    assert policy_loss(Objective(surrogate="own_parts:squared")) == pytest.approx(
        expected, abs=1e-6
    )


def test_the_names_of_keel_are_these_and_a_typo_is_told() -> None:
    assert LOSSES.names()[:5] == ("clip", "symmetric", "unclipped", "cispo", "sequence")
    with pytest.raises(
        InputError, match=r"region\.loss: 'klip' is not one of clip, .*did you mean"
    ):
        from_dict({"region": {"loss": "klip"}})
    with pytest.raises(InputError, match="expected a name, module:attribute or a function, got 3"):
        from_dict({"region": {"loss": 3}})


def test_named_surrogates_are_those_that_settings_switch_on() -> None:
    pairs = {
        "unclipped": {"clip": None},
        "symmetric": {"symmetric": True},
    }
    for name, settings in pairs.items():
        agent = agent_and_batch()[0]
        by_name, by_switch = (
            build_objective(from_dict({"region": x})) for x in ({"loss": name}, settings)
        )
        assert policy_loss(by_name) == policy_loss(by_switch), name
        assert step_obstacle(agent, by_name)


def test_a_name_of_keel_cannot_be_taken() -> None:
    with pytest.raises(InputError, match="'clip' is Keel's own"):
        keel.register_loss("clip")
    with pytest.raises(InputError, match="cannot register 'a:b'"):
        keel.register_loss("a:b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"region": {"loss": "a:b", "symmetric": True}}, "symmetric: belongs to region.loss clip"),
        ({"region": {"loss": "a:b", "dual_clip": 3.0}}, "dual_clip: belongs to region.loss clip"),
        ({"region": {"loss": "sequence"}}, "sequence is of runs on tokens"),
        ({"algo": "trpo", "region": {"loss": "a:b"}}, "region.loss: belongs to --algo ppo"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_dict(settings)


def test_a_loss_that_averages_is_told_what_to_give(here: Path) -> None:
    with pytest.raises(
        ShapeError,
        match=r"region.loss averaged: expected a loss per element, a tensor \[32\], "
        r"got \[\]; averaging is Keel's",
    ):
        finish(iterate("CartPole-v1", runs=here / "runs", **with_loss(imported().averaged)))


def test_from_python_it_takes_torchs_way_and_is_stored_by_path(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(from_dict(with_loss(imported().squared)))
    session.source.close()
    assert step_obstacle(session.agent, session.algorithm.objective)
    assert session.choices["optimizer_step"] == "torch (the surrogate is own_parts:squared)"
    finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **with_loss(imported().squared)))
    assert stored(here) == "own_parts:squared"
    assert imported().CALLS[0] == pytest.approx(0.2)
    forget(monkeypatch)
    run = here / "runs" / "mine"
    longer = from_dict({"total_steps": 192}, from_dict(read_config(run / "seed-0")))
    finish(resume(run, longer))  # this user has trained with it: no flag is needed
    assert imported().CALLS


def test_a_registered_name_is_stored_by_path(here: Path) -> None:
    keel.register_loss("of_mine")(imported().squared)
    finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **with_loss("of_mine")))
    assert stored(here) == "own_parts:squared"


def test_from_a_file_it_needs_trust(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "settings.yaml").write_text("env: CartPole-v1\nregion:\n  loss: own_parts:squared\n")
    with pytest.raises(UntrustedCodeError, match=r"region\.loss own_parts:squared"):
        iterate(config="settings.yaml", runs=here / "runs")
    passed = {**SMALL, "trust_code": True, "runs": here / "runs", "name": "mine"}
    finish(iterate(config="settings.yaml", **passed))
    assert stored(here) == "own_parts:squared"


def test_from_the_command_line_it_is_typed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_by_command("--region.loss", "own_parts:squared") == 0
    assert stored(here) == "own_parts:squared"
    assert read_metrics(here / "runs" / "mine" / "seed-0")
    forget(monkeypatch)
    assert main(["resume", "runs/mine", "--total-steps", "192", "--quiet"]) == 0
    forget(monkeypatch)
    monkeypatch.setenv("KEEL_STATE_DIR", str(here / "somebody else"))
    assert main(["resume", "runs/mine", "--total-steps", "256", "--quiet"]) == 2
    assert "region.loss own_parts:squared" in capsys.readouterr().err
    assert main(["evaluate", "runs/mine", "--episodes", "1", "--json"]) == 0  # needs no loss


def test_a_missing_function_is_told_with_its_setting(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_by_command("--region.loss", "own_parts:sqared") == 2
    assert "region.loss: own_parts:sqared: cannot be imported" in capsys.readouterr().err
    assert not (here / "runs").exists()


@pytest.mark.parametrize("kind", ["lambda", "local"])
def test_what_has_no_import_path_trains_and_is_not_resumed(
    here: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def local(ratio: torch.Tensor, advantage: torch.Tensor, hparams: Any) -> Surrogate:
        return Surrogate(-ratio * advantage, torch.zeros_like(ratio, dtype=torch.bool))

    loss = imported().make() if kind == "lambda" else local
    finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **with_loss(loss)))
    assert stored(here).startswith(f"object:{kind}_")
    forget(monkeypatch)
    with pytest.raises(InputError, match=rf"region.loss object:{kind}_.*no import path.*top level"):
        resume(here / "runs" / "mine")


def test_by_its_last_name_it_is_the_loss_of_the_region(here: Path) -> None:
    assert nested({"loss": "unclipped"}) == {"region": {"loss": "unclipped"}}
    with pytest.raises(InputError, match=r"^kind: may be network\.kind, critic\.kind"):
        nested({"kind": "mlp"})


def test_help_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--region.loss clip|symmetric|unclipped|cispo|sequence|module:attribute" in text


def test_tokens_take_the_same_functions(here: Path) -> None:
    assert TokenObjective(surrogate="own_parts:squared")._function is imported().squared
