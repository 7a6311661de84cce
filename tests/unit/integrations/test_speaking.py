"""The doctor beside a foreign trainer: what it collects, when it speaks, and what it stops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from keel.errors import RunWarning
from keel.integrations.speaking import Speaker, log_of, plain_settings
from keel.tracking.logs.log import Row


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of Stable-Baselines3 in which nothing is wrong."""
    values = {
        "rollout/ep_rew_mean": 20.0 + step,
        "rollout/ep_len_mean": 20.0 + step,
        "train/approx_kl": 0.01 + 0.001 * (step % 3),
        "train/clip_fraction": 0.1,
        "train/entropy_loss": -0.6 + 0.001 * step,
    }
    return values | changes


def speaker(said: list[str], **options: Any) -> Speaker:
    return Speaker("sb3", say=said.append, **options)


def test_a_line_is_said_when_the_verdict_changes_and_never_twice() -> None:
    said: list[str] = []
    doctor = speaker(said, every=5)
    for step in range(10):
        doctor.add(step, row(step))
    assert len(said) == 1
    assert said[0].startswith("keel doctor, step 4: healthy: ")
    for step in range(10, 40):
        doctor.add(step, row(step, **{"train/approx_kl": 3.0}))
    assert len(said) == len(set(said)) > 1
    assert ": sick: " in said[1]


def test_names_are_those_of_the_framework_and_of_keel() -> None:
    rows = [Row(3, {"train/value_loss": 4.0, "train/gate_log_ratio": 0.5, "own/thing": 1.0})]
    log = log_of(rows, "sb3", {"advantage.gamma": 0.9})
    assert log["train/value_loss"].last == 2.0  # SB3 has no factor of one half
    assert log["train/gate_log_ratio"].last == 0.5
    assert log.unmatched == ("own/thing",)
    assert log.setting("advantage.gamma") == 0.9


def test_what_the_log_says_is_nan_is_known_as_such() -> None:
    log = log_of([Row(1, {"train/loss": math.nan}), Row(2, {"train/loss": 1.0})], "sb3", {})
    assert log.nans["train/loss"].tolist() == [1]


def test_rows_at_one_step_are_one() -> None:
    doctor = speaker([])
    doctor.add(7, {"train/loss": 1.0, "note": "text"})
    doctor.add(7, {"train/approx_kl": 0.1})
    assert doctor.rows == [Row(7, {"train/loss": 1.0, "train/approx_kl": 0.1})]


def test_the_last_diagnosis_is_written(tmp_path: Path) -> None:
    doctor = speaker([], path=tmp_path / "new")
    for step in range(12):
        doctor.add(step, row(step, **{"train/clip_fraction": 1.5}))
    doctor.close()
    data = json.loads((tmp_path / "new" / "doctor.json").read_text())
    assert data["verdict"] == "sick"
    assert data["findings"][0]["rule"] == "share-outside-0-1"
    assert data["framework"] == "sb3"


def test_ignored_rules_are_silent() -> None:
    doctor = speaker([], ignore=("share-outside-0-1",))
    for step in range(12):
        doctor.add(step, row(step, **{"train/clip_fraction": 1.5}))
    assert "share-outside-0-1" not in [finding.rule for finding in doctor.diagnose().findings]


def test_a_training_without_rows_has_nothing_to_say(tmp_path: Path) -> None:
    said: list[str] = []
    speaker(said, path=tmp_path).close()
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_a_doctor_that_fails_is_one_warning_and_then_silent(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def broken(line: str) -> None:
        raise ValueError("the terminal is gone")

    doctor = Speaker("sb3", every=2, say=broken)
    for step in range(20):
        doctor.add(step, row(step))
    doctor.close()
    (warning,) = recwarn
    assert warning.category is RunWarning
    assert "training goes on: ValueError: the terminal is gone" in str(warning.message)


@pytest.mark.filterwarnings("error")
def test_a_doctor_that_fails_stops_nothing_where_warnings_are_errors() -> None:
    doctor = speaker([])
    doctor.guarded(lambda: 1 / 0)
    doctor.add(1, row(1))
    assert doctor.rows == []


def test_settings_are_plain() -> None:
    given = {"seed": 3, "env": "CartPole-v1", "region.clip": None, "network": object()}
    assert plain_settings(given) == {"seed": 3, "env": "CartPole-v1"}
