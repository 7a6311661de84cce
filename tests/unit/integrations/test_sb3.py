"""The doctor beside Stable-Baselines3, with a made-up model; tests/peers has a real one."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keel.errors import InputError

STEPS, ENVS = 16, 2


class BaseCallback:
    """What a callback of Stable-Baselines3 is given."""

    model: Any
    locals: dict[str, Any]

    @property
    def logger(self) -> Any:
        return self.model.logger


@pytest.fixture
def sb3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as it is where Stable-Baselines3 is installed."""
    for name in ("stable_baselines3", "stable_baselines3.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    callbacks, logger = ModuleType("callbacks"), ModuleType("logger")
    callbacks.BaseCallback = BaseCallback  # type: ignore[attr-defined]
    logger.KVWriter = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.callbacks", callbacks)
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.logger", logger)
    module = importlib.import_module("keel.integrations.sb3")
    yield importlib.reload(module)
    monkeypatch.undo()
    importlib.reload(module)


class Policy(nn.Module):
    """Two actions by one layer, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(dropout))
        self.value_net = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def set_training_mode(self, mode: bool) -> None:
        self.train(mode)

    def evaluate_actions(self, obs: torch.Tensor, action: torch.Tensor) -> tuple[Any, ...]:
        dist = torch.distributions.Categorical(logits=self.net(obs))
        return None, dist.log_prob(action), dist.entropy()


def model_of(policy: Policy) -> SimpleNamespace:
    torch.manual_seed(0)
    obs = torch.randn(STEPS, ENVS, 3)
    obs[..., 2] = 0.0
    action = torch.randint(2, (STEPS, ENVS))
    policy.eval()
    with torch.no_grad():
        log_prob = policy.evaluate_actions(obs, action)[1]
    buffer = SimpleNamespace(
        observations=obs.numpy(),
        actions=action[..., None].numpy(),
        log_probs=log_prob.numpy(),
        returns=np.full((STEPS, ENVS), 5.0),
        values=np.full((STEPS, ENVS), 4.0),
        advantages=np.tile([1.0, -1.0], (STEPS, 1)),
    )
    env = SimpleNamespace(
        envs=[SimpleNamespace(spec=SimpleNamespace(id="Own", max_episode_steps=9))]
    )
    return SimpleNamespace(
        policy=policy,
        rollout_buffer=buffer,
        action_space=SimpleNamespace(n=2),
        device="cpu",
        ep_info_buffer=[{"r": 1.0}, {"r": 3.0}],
        logger=SimpleNamespace(output_formats=[]),
        get_env=lambda: env,
        seed=1,
        _total_timesteps=1000,
        n_steps=STEPS,
        n_envs=ENVS,
        gamma=0.9,
        learning_rate=lambda left: 0.001 * left,
        clip_range=lambda _: 0.2,
    )


def begun(sb3: ModuleType, policy: Policy, **options: Any) -> Any:
    doctor = sb3.DoctorCallback(say=lambda _: None, **options)
    doctor.model = model_of(policy)
    doctor._on_training_start()
    return doctor


def collected(doctor: Any, truncated: bool = True) -> dict[str, float]:
    """One rollout, and the row that the model logs after it."""
    for step in range(STEPS):
        info = {"episode": {"l": 9, "r": 2.0}, "TimeLimit.truncated": truncated}
        done = np.array([step == 9, False])
        doctor.locals = {"rewards": np.ones(ENVS), "infos": [info, {}], "dones": done}
        assert doctor._on_step() is True
    doctor._on_rollout_end()
    (listener,) = doctor.model.logger.output_formats
    listener.write({"train/approx_kl": 0.01}, {}, 32)
    (row,) = doctor.speaker.rows
    return dict(row.values)


def test_it_says_what_is_missing() -> None:
    module = importlib.import_module("keel.integrations.sb3")
    if module.BaseCallback is not None:
        pytest.skip("Stable-Baselines3 is installed here")
    with pytest.raises(InputError, match="pip install stable-baselines3"):
        module.DoctorCallback()


def test_settings_are_read_from_the_model(sb3: ModuleType) -> None:
    settings = begun(sb3, Policy()).speaker.settings
    assert settings["env"] == "Own"
    assert settings["facts.horizon"] == 9
    assert settings["facts.actions"] == 2
    assert settings["advantage.gamma"] == 0.9
    assert settings["region.learning_rate"] == 0.001
    assert settings["region.clip"] == 0.2
    assert "region.target_kl" not in settings


def test_a_rollout_is_measured(sb3: ModuleType) -> None:
    row = collected(begun(sb3, Policy()))
    assert row["train/gate_log_ratio"] < 1e-6
    assert row["train/target_mean"] == 5.0
    assert row["train/value_mean"] == 4.0
    assert row["train/advantage_raw_std"] == 1.0
    assert row["rollout/obs_dead_dims"] == pytest.approx(1 / 3)
    assert row["rollout/reward_mean"] == 1.0
    assert row["rollout/reward_zero_share"] == 0.0
    assert row["rollout/return_std"] == 1.0
    assert row["rollout/bootstrap_error"] == 0.0
    assert row["train/approx_kl"] == 0.01


def test_dropout_in_the_update_shows_before_it_is_made(sb3: ModuleType) -> None:
    policy = Policy(dropout=0.5)
    state = torch.random.get_rng_state()
    doctor = begun(sb3, policy)
    torch.random.set_rng_state(state)
    row = collected(doctor)
    assert row["train/gate_log_ratio"] > 0.1
    assert torch.equal(torch.random.get_rng_state(), state)  # the training draws what it would have
    assert policy.training is False


def test_time_limits_that_are_taken_for_ends_are_counted(sb3: ModuleType) -> None:
    assert collected(begun(sb3, Policy()), truncated=False)["rollout/bootstrap_error"] == 1.0


def test_what_learns_and_how_far_is_counted_for_the_actor(sb3: ModuleType) -> None:
    policy = Policy()
    policy.net.requires_grad_(False)
    doctor = begun(sb3, policy)
    assert collected(doctor)["train/parameters_trained"] == 0.0
    policy.net.requires_grad_(True)
    policy.value_net.weight.data += 1.0
    assert doctor._learning() == {"train/parameters_trained": 1.0, "train/gradient_effect": 0.0}
    for parameter in policy.net.parameters():
        parameter.data *= 1.5
    assert doctor._learning()["train/gradient_effect"] == pytest.approx(0.5)


def test_units_that_never_answer_are_counted(sb3: ModuleType) -> None:
    policy = Policy()
    policy.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    policy.net[0].bias.data = torch.tensor([-100.0, 0.0, 0.0, -100.0])
    assert collected(begun(sb3, policy))["train/dead_units"] == 0.5
    assert not policy.net[1]._forward_hooks


def test_an_optimizer_of_a_copy_trains_nothing(sb3: ModuleType) -> None:
    policy = Policy()
    policy.optimizer = torch.optim.SGD(Policy().parameters(), lr=0.1)
    assert collected(begun(sb3, policy))["train/parameters_trained"] == 0.0


def test_rows_and_diagnosis_are_written(sb3: ModuleType, tmp_path: Path) -> None:
    doctor = begun(sb3, Policy(), path=tmp_path, rows=tmp_path / "rows.jsonl")
    collected(doctor)
    doctor._on_training_end()
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 32
    assert "verdict" in json.loads((tmp_path / "doctor.json").read_text())


def test_a_model_that_cannot_be_measured_is_still_listened_to(sb3: ModuleType) -> None:
    doctor = begun(sb3, Policy())
    doctor.model.rollout_buffer = None
    assert collected(doctor) == {"train/approx_kl": 0.01}


@pytest.mark.filterwarnings("ignore:the doctor gave up")
def test_a_measurement_that_fails_stops_no_training(sb3: ModuleType) -> None:
    doctor = begun(sb3, Policy())
    doctor.model.rollout_buffer.log_probs = "broken"
    doctor.locals = {"rewards": np.ones(ENVS), "infos": [], "dones": []}
    assert doctor._on_step() is True
    doctor._on_rollout_end()
    doctor._on_training_end()
