"""What the critic said, against what came true."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import keel
from keel.cli import main
from keel.errors import InputError
from keel.training.calibration import Calibration, Record, _returns, measure_calibration
from keel.training.policy import open_policy


def columns(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def flags(*values: int) -> np.ndarray:
    return np.array(values, dtype=bool)[:, None]


def test_returns_by_hand():
    """γ = ½. Rows 0 and 1 end: 1 + ½·2 = 2 and 2. Row 2 is an autoreset row. Rows 3 and 4 are cut
    off: a sample of 10 stands for row 4, and half of it for row 3: 3 + ½·10 = 8. Row 5 and what
    the record does not show: 5 + ½·20."""
    record = Record(
        reward=columns(1, 2, 99, 3, 4, 5),
        ended=flags(0, 1, 0, 0, 0, 0),
        cut=flags(0, 0, 0, 0, 1, 0),
        ignored=flags(0, 0, 1, 0, 0, 0),
    )
    total, known, first = _returns(record, columns(7, 7, 7, 7, 10, 20), 0.5)
    assert total[[0, 1, 3, 4, 5], 0].tolist() == [2.0, 2.0, 8.0, 10.0, 15.0]
    assert known[:, 0].tolist() == [True, True, False, True, False, True]
    assert first[:, 0].tolist() == [True, False, False, True, False, True]


def test_shares_and_coverage_by_hand():
    """Quantiles at 10, 50 and 90 % of 0, 1, 2: returns −1, 0.5, 1.5 and 3."""
    predicted = np.tile([0.0, 1.0, 2.0], (4, 1))
    found = Calibration(
        np.array([-1.0, 0.5, 1.5, 3.0]), predicted, np.array([0.1, 0.5, 0.9]), np.ones(4, bool)
    )
    assert found.shares.tolist() == [0.25, 0.5, 0.75]
    assert found.coverage == 0.5


def test_the_picture_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = {"critic": {"kind": "hl_gauss"}, "total_steps": 2048, "evaluation": {"episodes": 2}}
    last = keel.train("CartPole-v1", runs=tmp_path, **settings)
    found = measure_calibration(open_policy(last.path), steps=200)
    assert found.predicted.shape == (len(found.realised), 32)
    picture = tmp_path / "forecast.png"
    assert main(["evaluate", str(last.path), "--episodes", "2", "--calibration", str(picture)]) == 0
    assert "of returns inside the predicted 80 %" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_scalar_critic_has_no_forecast(tmp_path: Path):
    settings = {"total_steps": 2048, "evaluation": {"episodes": 2}}
    last = keel.train("CartPole-v1", runs=tmp_path, **settings)
    with pytest.raises(InputError, match="knows the mean only"):
        measure_calibration(open_policy(last.path))
