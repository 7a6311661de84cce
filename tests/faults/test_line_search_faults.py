"""Fault 26: a line search that fails, or curvature that is not positive, in whole runs.

The policy stays bit for bit as it was, the update is reported as rejected and never as a KL of 0,
and the run goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cli import main
from keel.config import Config, from_dict
from keel.distributions.actions import Categorical
from keel.training.session import train

TINY: dict[str, Any] = {
    "env": "CartPole-v1",
    "algo": "trpo",
    "total_steps": 192,
    "rollout_steps": 16,
    "envs": {"num": 4},
    "network": {"hidden": [8]},
    "region": {"minibatch": 32, "epochs": 1},
    "natural": {"accept_ratio": 1000.0, "backtrack_iters": 3},
    "stabilizer": {"ls_fail_threshold": 2},
}


def tiny(**changes: Any) -> Config:
    return from_dict(changes, from_dict(TINY))


def assert_policy_unmoved(config: Config) -> list[dict[str, float]]:
    seen = list(train(config))
    agent = seen[0].session.agent
    for iteration in seen:
        params = iteration.state.opt_state.params
        assert torch.equal(params[:, : agent.critic_from], agent.initial[:, : agent.critic_from])
        assert iteration.report.verdict == "rejected"
    return [iteration.metrics for iteration in seen]


def test_a_failed_search_leaves_the_policy_and_tightens_the_region() -> None:
    told = assert_policy_unmoved(tiny())
    assert [m["train/line_search_success"] for m in told] == [0.0] * 3
    assert [m["train/max_kl"] for m in told] == pytest.approx([0.05, 0.05, 0.04])
    assert [m["train/damping"] for m in told] == pytest.approx([0.1, 0.1, 0.12])
    assert [m["train/rollbacks"] for m in told] == [1.0, 2.0, 3.0]


def test_curvature_that_is_not_positive_leaves_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Categorical.fisher

    def wrong(self: Categorical, params: Any, tangent: Any) -> Any:
        return {key: -x for key, x in true(self, params, tangent).items()}

    monkeypatch.setattr(Categorical, "fisher", wrong)
    by_torch = {"activation": "gelu"}  # compiled loops would not ask the distribution
    told = assert_policy_unmoved(tiny(natural={"damping": 1e-9}, network=by_torch))
    assert all(m["train/curvature_min"] <= 0.0 for m in told)
    assert told[1]["train/damping"] > told[0]["train/damping"]


def test_the_files_and_the_words_say_rejected_and_never_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train CartPole-v1 --algo trpo --total-steps 192 --rollout-steps 16 --envs.num 4 "
    words += "--region.minibatch 32 --natural.accept-ratio 1000 --natural.backtrack-iters 3"
    assert main([*words.split(), "--runs", str(tmp_path), "--name", "sick"]) == 0
    said = capsys.readouterr().out
    assert "LS_OK 0%" in said
    assert "KL nan" in said
    assert "3 of 3 updates rejected" in said
    lines = (tmp_path / "sick/seed-0/metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["train/verdict"] == "rejected"
        assert line["train/reason"] == "too_little_improvement"
        assert line["train/kl_step"] is None  # strict JSON has no NaN
        assert line["train/kl_tried"] > 0.0
    assert (tmp_path / "sick/seed-0/line-search.png").is_file()
