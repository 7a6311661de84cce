"""Runs on tokens by `keel.train`, `keel.iterate` and `keel.resume`, as all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import keel
from keel.errors import InputError

SMALL: dict[str, Any] = {
    "task": "reverse",
    "model": {"hidden": 32, "layers": 1, "heads": 2},
    "sample": {"prompts": 2, "group": 4},
    "region": {"minibatch": 8},
    "warmup": {"examples": 8, "epochs": 1, "minibatch": 4},
    "evaluation": {"prompts": 4},
    "control": False,
    "threads": 1,
}


def test_a_run_on_tokens_trains_and_goes_on(tmp_path: Path) -> None:
    run = keel.train("language", runs=tmp_path, name="mine", total_steps=8, **SMALL)
    assert run.metrics.step.tolist() == [8]
    assert run.metrics["train/kl_exact"][0] <= 0.05
    assert keel.resume(run, total_steps=16).metrics.step.tolist() == [8, 16]


def test_settings_are_those_of_tokens(tmp_path: Path) -> None:
    loop = keel.iterate("language", runs=tmp_path, total_steps=16, max_new_tokens=4, **SMALL)
    for iteration in loop:
        assert iteration.metrics["rollout/length_mean"] <= 4.0
        iteration.set(learning_rate=1e-5)
    assert iteration.metrics["train/learning_rate"] == 1e-5
    with pytest.raises(InputError, match=r"^unknown setting max_new_token; did you mean sample\."):
        keel.iterate("language", max_new_token=4)


def test_its_policy_is_a_model_of_another_library(tmp_path: Path) -> None:
    run = keel.train("language", runs=tmp_path, name="mine", total_steps=8, **SMALL)
    with pytest.raises(InputError, match=r"AutoModelForCausalLM\.from_pretrained reads the folder"):
        keel.load(run.path)
    with pytest.raises(InputError, match=r"^start_from: a run on tokens begins with a model"):
        keel.train("language", runs=tmp_path, start_from=run.path, **SMALL)
