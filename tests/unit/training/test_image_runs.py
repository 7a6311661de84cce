"""Whole runs on images of any size, on images beside other things, and of agents that see them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_toys
import pytest
import torch

from keel.config import Config, from_dict
from keel.envs import EnvWarning, names
from keel.tracking.record import read_choices
from keel.training.export import export_onnx
from keel.training.policy import evaluate_policy, open_policy
from keel.training.runner import Progress, resume, start
from keel.training.session import train


@pytest.fixture(autouse=True)
def _signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.NATIVE, "signs", "image_toys:signs_env")


def tiny(**changes: Any) -> Config:
    base = from_dict(
        {
            "env": "signs",
            "total_steps": 64,
            "threads": 1,
            "rollout_steps": 16,
            "envs": {"num": 2, "normalize_obs": True},
            "network": {"features": 8, "hidden": [8]},
            "region": {"minibatch": 16, "epochs": 2, "max_kl": 0.01, "learning_rate": 0.01},
            "evaluation": {"episodes": 1},
            "checkpoints": {"every": 32},
        }
    )
    return from_dict(changes, base)


def finish(run: Iterator[Progress]) -> Progress:
    *_, last = run
    return last


CHANGES: list[dict[str, Any]] = [
    {"algo": "trpo"},
    {"network": {"share": False, "cnn": "small"}, "critic": {"kind": "quantile"}},
    {"network": {"memory": "both", "memory_size": 4}, "region": {"minibatch": 2}},
]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [*((layout, {}) for layout in image_toys.LAYOUTS), *(("nested", x) for x in CHANGES)],
    ids=str,
)
def test_the_bound_holds_on_every_layout(layout: str, changes: dict[str, Any]) -> None:
    """The gate has replayed every rollout: sampling and learning see the same numbers."""
    options = {"num": 2, "backend": "sync", "options": {"layout": layout}}
    config = tiny(env="keel/Drawn-v0", envs=options, **changes)
    updates = list(train(config))
    assert len(updates) == 2
    for update in updates:
        assert 0.0 < update.metrics["train/kl_exact"] <= 0.01


@pytest.mark.parametrize(
    "network", [{}, {"share": False}, {"memory": "both", "memory_size": 4}], ids=str
)
def test_a_resumed_run_on_images_is_bit_equal(network: dict[str, Any], tmp_path: Path) -> None:
    size = {"region": {"minibatch": 2}} if "memory" in network else {}
    config = tiny(network=network, total_steps=128, **size)
    whole = finish(start(config, tmp_path, "whole"))
    broken = start(config, tmp_path, "broken")
    next(broken)
    broken.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = finish(resume(tmp_path / "broken" / "seed-0"))
    for mine, other in zip(
        whole.iteration.state.opt_state, again.iteration.state.opt_state, strict=True
    ):
        assert torch.equal(mine, other)


def test_an_image_beside_other_things_is_learned_from() -> None:
    """Only the image tells what to do: 8 of 8 right, 4 by chance."""
    config = tiny(
        total_steps=3072,
        envs={"num": 16},
        network={"features": 16, "hidden": [16]},
        region={"minibatch": 64, "epochs": 4, "max_kl": 0.05, "schedule": "constant"},
    )
    returns = [update.metrics["rollout/return_mean"] for update in train(config)]
    assert returns[0] < 5.0
    assert max(returns) > 6.5


def test_a_run_on_images_says_what_it_takes_for_what_and_is_evaluated_and_exported(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxruntime")
    path = finish(start(tiny(), tmp_path, "run")).path
    assert read_choices(path)["observation"] == (
        "image: image 8×8, 3 channels, scaled by 0.003922; inner/kind: one-hot of 3; "
        "noise: 2 numbers"
    )
    policy = open_policy(path)
    assert list(policy.normalizer.moments) == ["noise"]  # type: ignore[union-attr]
    assert len(evaluate_policy(policy, episodes=2).returns) == 2
    exported = export_onnx(policy, tmp_path / "policy.onnx", rows=4)
    assert exported.inputs == ("image", "inner/kind", "noise")
    assert exported.difference < 1e-5


@pytest.mark.parametrize("agents", [{}, {"sharing": "all"}, {"critic": "own"}], ids=str)
@pytest.mark.parametrize("changes", [{}, {"algo": "trpo"}], ids=str)
def test_several_agents_see_images(agents: dict[str, str], changes: dict[str, Any]) -> None:
    options = {"num": 2, "options": {"stated": True}, "normalize_obs": True}
    config = tiny(env="image_toys:Pair", envs=options, agents=agents, **changes)
    for update in train(config):
        for name in ("left", "right"):
            assert 0.0 < update.metrics[f"train/kl_exact/{name}"] <= 0.01


def test_agents_that_learn_in_turn_see_images_and_central_critics_may_lack_a_state() -> None:
    config = tiny(env="image_toys:Pair", envs={"num": 2}, agents={"order": "sequential"})
    with pytest.warns(EnvWarning, match=r"no state\(\), and images are not joined"):
        updates = list(train(config))
    assert all(update.metrics["train/kl_exact"] <= 0.01 for update in updates)
