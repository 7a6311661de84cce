"""`keel probe`: probes of a training function, measures of an environment, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from keel.cli import main
from keel.probes.environment import probe_environment


def best(make_env: Any, total_steps: int, seed: int) -> Any:
    """Return the best actions, which are known."""
    return lambda obs: int(obs[0] > 0.0)


def stubborn(make_env: Any, total_steps: int, seed: int) -> Any:
    """Return action 0, whatever is seen; as SB3's predict does, beside a state."""
    return lambda obs: (np.array(0), None)


class Deaf(gymnasium.Env[np.ndarray, int]):
    """Whatever is done, the same comes of it; one dimension never changes, one is huge."""

    observation_space = spaces.Box(-1e6, 1e6, (3,), np.float32)
    action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self.time += 1
        return self._seen(), -1.0, self.time == 400, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([0.5, 1e4 * self.np_random.standard_normal(), self.time / 400], np.float32)


def test_probes_of_a_training_function(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe", "--trainer", f"{__name__}:best", "--probes", "observation-action"]
    assert main(words) == 0
    assert "all passed" in capsys.readouterr().out
    words = ["probe", "--trainer", f"{__name__}:stubborn", "--probes", "action", "delay"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "action              FAILS in state 0 action 0" in out
    assert "means: the policy does not follow the advantage" in out
    assert "1 failed: action" in out


def test_probes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--trainer", f"{__name__}:stubborn", "--probes", "action", "--json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out)["probes"]
    assert outcome["probe"] == "action"
    assert outcome["passed"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--probes", "actoin"], "did you mean 'action'"),
        (["--trainer", "json:nothing"], "has no attribute 'nothing'"),
        (["--trainer", f"{__name__}:best", "--probes", "tokens"], "none of tokens can be run"),
        (["--write", "x.yaml"], "--write needs ENV"),
        (["CartPole-v9"], "CartPole-v1"),
    ],
)
def test_errors_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_an_environment_in_which_nothing_can_be_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deaf.yaml"
    words = ["probe", f"{__name__}:Deaf", "--seconds", "1", "--write", str(file)]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert out.startswith("sick: ")
    assert "the action has no effect" in out
    assert "1 of 3 dimensions have a standard deviation below 0.001 under random actions: 0" in out
    assert "always negative, and episodes can end" in out or "all episodes pay the same" in out
    written = yaml.safe_load(file.read_text())
    assert written["envs"] == {"normalize_obs": True}
    assert main(["train", "--config", str(file), "--print-config", "--trust-code"]) == 0


def test_measures_of_cartpole_are_those_known() -> None:
    report = probe_environment("CartPole-v1", seconds=3.0)
    assert report.verdict == "good"
    mean, _, episodes = report.baselines["random"]
    assert episodes > 20
    assert 18.0 < mean < 27.0  # 22 is what everybody finds
    idle, *_ = report.baselines["no-op"]
    assert 8.0 < idle < 11.0
    assert any("one action changes the rewards" in remark.text for remark in report.remarks)
