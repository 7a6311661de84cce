"""The doctor beside a trainer of Hugging Face; tests/peers has TRL's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
from keel.integrations.trl import DoctorCallback

ARGUMENTS = SimpleNamespace(learning_rate=1e-3, beta=0.1, num_generations=8, seed=3, world_size=1)


def trained(doctor: DoctorCallback, rows: list[dict[str, Any]], is_first: bool = True) -> None:
    state = SimpleNamespace(global_step=0, max_steps=len(rows), is_world_process_zero=is_first)
    doctor.on_train_begin(ARGUMENTS, state, None)
    for row in rows:
        state.global_step += 1
        doctor.on_log(ARGUMENTS, state, None, logs=row)
    doctor.on_log(ARGUMENTS, state, None, logs={"train_runtime": 3.0, "train_loss": 0.0})
    doctor.on_train_end(ARGUMENTS, state, None)


def rows(count: int, **changes: float) -> list[dict[str, Any]]:
    usual = {"loss": 0.01, "grad_norm": 1.0, "clip_ratio/region_mean": 0.01}
    return [usual | {"reward": 0.01 * i, "entropy": 2 - 0.01 * i} | changes for i in range(count)]


def test_what_the_trainer_logs_is_diagnosed_and_written(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = DoctorCallback(path=tmp_path, rows=tmp_path / "rows.jsonl", say=said.append)
    trained(doctor, rows(30, learning_rate=0.0))
    data = json.loads((tmp_path / "doctor.json").read_text())
    assert data["framework"] == "trl"
    assert data["findings"][0]["rule"] == "learning-rate-zero"
    assert any("learning rate" in line for line in said)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 30


def test_settings_come_from_the_arguments(tmp_path: Path) -> None:
    doctor = DoctorCallback(say=lambda _: None)
    trained(doctor, rows(5))
    settings = doctor.speaker.settings
    assert settings["region.learning_rate"] == 1e-3
    assert settings["kl.coef"] == 0.1
    assert settings["sample.group"] == 8
    assert settings["total_steps"] == 5
    assert list(tmp_path.iterdir()) == []


def test_frozen_parameters_show() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.requires_grad_(False)
    doctor = DoctorCallback(say=lambda _: None)
    state = SimpleNamespace(global_step=0, max_steps=9, is_world_process_zero=True)
    doctor.on_train_begin(ARGUMENTS, state, None, model=model, optimizer=optimizer)
    model.bias.data *= 1.25
    doctor.on_log(ARGUMENTS, state, None, logs={"reward": 1.0})
    (row,) = doctor.speaker.rows
    assert row.values["train/parameters_trained"] == 0.25
    assert row.values["train/gradient_effect"] == pytest.approx(0.25)


def test_only_the_first_process_speaks() -> None:
    doctor = DoctorCallback(say=lambda _: pytest.fail("it spoke"))
    trained(doctor, rows(30), is_first=False)
    assert doctor.speaker.rows == []


class Model(torch.nn.Module):
    """A language model with the same two logits at every place."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=2))

    def forward(self, input_ids: Any, **_: Any) -> Any:
        logits = torch.tensor([0.0, math.log(3.0)]).expand(*input_ids.shape, 2)
        return SimpleNamespace(logits=logits)


def test_samples_are_held_against_the_entropy_of_the_policy() -> None:
    """π = (¼, ¾): the entropy is 0.562, and a row of its likeliest tokens has 0.288 nats each."""
    doctor = DoctorCallback(say=lambda _: None)
    ones = torch.ones(2, 3, dtype=torch.long)
    generation = [dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ones)]
    generation[0]["completion_mask"] = ones
    trainer = SimpleNamespace(_buffered_inputs=generation)
    state = SimpleNamespace(global_step=1, max_steps=9, is_world_process_zero=True)
    arguments = SimpleNamespace(**vars(ARGUMENTS), temperature=1.0)
    doctor.watch(trainer)
    doctor.on_pre_optimizer_step(arguments, state, None, model=Model())
    doctor.on_log(arguments, state, None, logs={"reward": 1.0})
    (row,) = doctor.speaker.rows
    assert row.values["train/surprise_gap"] == pytest.approx(0.28768 - 0.56234, abs=1e-4)
