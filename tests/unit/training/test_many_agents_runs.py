"""Whole runs of several agents: the bound for each, metrics of each, and faults that are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cli import main
from keel.config import Config, from_dict
from keel.errors import InputError
from keel.tracking.metrics import metric
from keel.tracking.reader import read_metrics
from keel.training.checkpoint import load
from keel.training.policy import evaluate_policy, open_policy
from keel.training.runner import start
from keel.training.session import train
from keel.trust_region.gate import ConsistencyError

WHO = ("industry", "education", "council")


def small(**changes: Any) -> Config:
    """Six iterations of the small game."""
    base = from_dict(
        {
            "env": "land",
            "total_steps": 1440,
            "rollout_steps": 30,
            "compile": "off",
            "envs": {"num": 8, "options": "variant=small"},
            "network": {"kind": "items", "hidden": [16]},
            "advantage": {"gamma": 1 / 1.008, "normalize": "group"},
            "region": {"minibatch": 60, "epochs": 4, "learning_rate": 0.01},
            "evaluation": {"episodes": 4},
        }
    )
    return from_dict(changes, base)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"agents": {"sharing": "all"}},
        {"agents": {"critic": "own"}},
        {"agents": {"order": "sequential"}},
        {"algo": "trpo"},
        {"algo": "trpo", "agents": {"sharing": "all", "critic": "own"}},
        {"critic": {"kind": "quantile"}, "region": {"early_stop": "minibatch", "target_kl": 0.01}},
    ],
    ids=str,
)
def test_the_bound_holds_for_every_agent_and_update(changes: dict[str, Any]) -> None:
    walked = 0.0
    region = changes.pop("region", {}) | {"max_kl": 0.01}
    for iteration in train(small(**changes, region=region)):
        own = [iteration.metrics[f"train/kl_exact/{name}"] for name in WHO]
        assert all(0.0 <= kl <= 0.01 for kl in own)
        assert iteration.metrics["train/kl_exact"] == pytest.approx(max(own), rel=1e-9)
        assert iteration.metrics["train/gate_log_ratio"] < 1e-3
        walked = iteration.metrics["train/rollbacks"]
    if not changes:  # the bound had work to do
        assert walked > 0.0


def test_agents_have_metrics_that_the_registry_knows(tmp_path: Path) -> None:
    *_, last = start(small(), tmp_path, "run")
    names = {
        "train": ("kl_exact", "clip_fraction", "entropy", "value_loss", "explained_variance"),
        "rollout": ("return_mean",),
        "eval": ("return_mean",),
    }
    written = read_metrics(last.path).columns
    for group, inner in names.items():
        for name in inner:
            for who in WHO:
                key = f"{group}/{name}/{who}"
                assert metric(key).name == f"{group}/{name}"
                assert key in written
    returns = [last.metrics[f"eval/return_mean/{who}"] for who in WHO]
    assert sum(returns) == pytest.approx(last.metrics["eval/return_mean"])


def test_weights_are_kept_for_every_agent_and_opened_again(tmp_path: Path) -> None:
    *_, last = start(small(), tmp_path, "run")
    weights = load(last.path).weights
    assert {name.split(".")[0] for name in weights} == set(WHO)
    policy = open_policy(last.path, "last")
    assert torch.equal(policy.params, last.iteration.state.opt_state.params)
    score = evaluate_policy(policy, episodes=3)
    assert len(score.returns) == 3
    assert set(score.agents) == set(WHO)


FAULTS = {
    "wrong_actor": {"wrong_actor": True},
    "mask_drift": {"mask_drift": True},
    "epsilon_greedy": {"epsilon_greedy": 0.1},
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_gate_stops_faults_of_replay_at_the_first_update(name: str) -> None:
    with pytest.raises(ConsistencyError, match=f"Cause: {name}: "):
        next(train(small(faults=FAULTS[name])))


def test_the_gate_sees_that_updates_know_fewer_actions() -> None:
    """To it, that is another mask than the one that was sampled under."""
    with pytest.raises(ConsistencyError, match=r"Cause: mask_drift: .* other actions are legal"):
        next(train(small(faults={"first_actions": 2})))


def test_a_network_of_items_is_not_compiled() -> None:
    with pytest.raises(
        InputError, match="compile: the shapes inside of this network are not fixed"
    ):
        next(train(small(compile="on")))


def test_the_command_plays_a_run_beside_the_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, last = start(small(), tmp_path, "mine")
    assert main(["land", str(last.path), "--maps", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [report["policy"] for report in told["reports"]] == [
        "mine",
        "wait",
        "random",
        "greedy-npv",
        "greedy-roi",
    ]
    assert told["reports"][0]["maps"] == [1_000_000, 1_000_001, 1_000_002]
    assert main(["land", str(last.path), "--maps", "2", "--baselines", "wait"]) == 0
    assert "mean of 2 held-out maps" in capsys.readouterr().out
    assert main(["land", "--baselines", "greedy"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_an_infinite_kl_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`mask_drift` rules out what was sampled: without gate and bound the KL has no end."""
    settings = tmp_path / "sick.yaml"
    settings.write_text(
        "faults: {mask_drift: true}\nregion: {gate: false, certify: false, minibatch: 60}\n"
        "envs: {num: 8}\nevaluation: {episodes: 2}\n"
    )
    words = ["train", "land", "--config", str(settings), "--total-steps", "480", "--json"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    assert json.loads(capsys.readouterr().out)["kl_exact_max"] is None
