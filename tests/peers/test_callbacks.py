"""The doctor beside real trainings of Stable-Baselines3, TRL and a PPO like CleanRL's."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import keel

ROOT = Path(__file__).parents[2]
PPO = {"n_envs": 4, "n_steps": 64, "batch_size": 64, "n_epochs": 4}
Train = Callable[..., Path]


def rules(folder: Path) -> list[str]:
    data = json.loads((folder / "doctor.json").read_text())
    return [finding["rule"] for finding in data["findings"]]


def lines(folder: Path) -> list[str]:
    output = (folder / "output.txt").read_text().splitlines()
    return [line for line in output if line.startswith("keel doctor, step ")]


def test_ppo_of_sb3_is_watched(train: Train) -> None:
    folder = train("sb3", "CartPole-v1", 4096, PPO)
    assert json.loads((folder / "doctor.json").read_text())["verdict"] in ("healthy", "watch")
    assert len(lines(folder)) == len(set(lines(folder))) >= 1
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["facts.actions"] == 2
    assert settings["region.epochs"] == 4


@pytest.mark.parametrize(
    ("fault", "value", "rule"),
    [
        ("dropout", 0.3, "replay-differs"),
        ("misaligned", 1, "replay-differs"),
        ("temperature", 3.0, "replay-differs"),
        ("stale", 8, "replay-differs"),
        ("optimizer_elsewhere", 1, "optimizer-empty"),
        ("actor_frozen", 1, "optimizer-empty"),
    ],
)
def test_faults_in_ppo_of_sb3_are_named_first(
    train: Train, fault: str, value: float, rule: str
) -> None:
    folder = train("sb3", "CartPole-v1", 4096, PPO, **{fault: value})
    assert rules(folder)[0] == rule


def test_a2c_is_watched_too(train: Train) -> None:
    settings = {"algo": "a2c", "n_envs": 4, "n_steps": 16}
    assert "replay-differs" not in rules(train("sb3", "CartPole-v1", 2048, settings))


def test_grpo_of_trl_is_watched(train: Train) -> None:
    folder = train("trl", "letter", 20)
    assert rules(folder) == []
    assert len(lines(folder)) == 1


def test_an_optimizer_that_trl_does_not_train_with_is_found(train: Train) -> None:
    assert rules(train("trl", "letter", 20, optimizer_elsewhere=1))[0] == "optimizer-empty"


def test_the_log_of_cleanrls_ppo_is_read(train: Train) -> None:
    diagnosis: Any = keel.diagnose(train("cleanrl", "CartPole-v1", 8192) / "log.jsonl")
    assert diagnosis.log.framework == "cleanrl"
    assert diagnosis.verdict in ("healthy", "watch")


SCRIPT = """
import sys
from stable_baselines3 import PPO
from keel.integrations.sb3 import DoctorCallback
model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=3, device="cpu")
model.policy.mlp_extractor.policy_net.append(__import__("torch").nn.Dropout(0.2))
model.learn(512, callback=DoctorCallback(say=lambda _: None) if sys.argv[1] == "yes" else None)
print(sum(float(p.double().sum()) for p in model.policy.parameters()))
"""


def test_the_callback_changes_nothing_of_a_training(peers: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    sums = [
        subprocess.run(
            [peers, "-c", SCRIPT, word], env=env, capture_output=True, text=True, check=True
        ).stdout
        for word in ("yes", "no")
    ]
    assert sums[0] == sums[1] != ""
