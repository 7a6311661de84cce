"""Groups of advantages, the KL that stops an update, the clip that follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Advantage, from_dict
from keel.controllers.controllers import AdaptiveClip, Outcome
from keel.envs import make_envs
from keel.envs.faults import BadStepError
from keel.envs.vector import VectorEnvs
from keel.errors import InputError
from keel.experience.rollout import Rollout
from keel.experience.targets import group_of
from keel.training.session import train
from keel.types import HyperParams


class Herd(gymnasium.Env[Any, Any]):
    """Says in its info which of three groups it belongs to, until the next episode."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    kind = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.group, self.age = int(self.np_random.integers(3)), 0
        return self.seen(), {"group": self.group}

    def step(self, action: Any) -> Any:
        self.age += 1
        reward = float(self.np_random.normal(10.0**self.group, self.group + 0.1))
        return self.seen(), reward, self.age == 4, False, {"group": self.group}

    def seen(self) -> np.ndarray:
        return np.array([self.group / 2.0, self.age / 4.0], np.float32)


class Wrong(Herd):
    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        return *rest, {"group": "a"}


gymnasium.register("keel/Herd-v0", Herd)
gymnasium.register("keel/Wrong-v0", Wrong)


def by_first_number(obs: dict[str, np.ndarray]) -> np.ndarray:
    return (2.0 * obs["obs"][..., 0]).round().astype(np.int64)


def by_nonsense(obs: dict[str, np.ndarray]) -> np.ndarray:
    return obs["obs"][..., 0]


def tiny(**more: Any) -> dict[str, Any]:
    base = {"env": "keel/Herd-v0", "total_steps": 256, "rollout_steps": 64, "envs": {"num": 4}}
    return {**base, "region": {"minibatch": 64}, **more}


@pytest.mark.parametrize("backend", ["sync", "async", "vector"])
def test_the_group_of_an_environment_comes_with_what_it_sees(backend: Any):
    envs = (
        VectorEnvs(gymnasium.make_vec("keel/Herd-v0", 3, vectorization_mode="sync"))
        if backend == "vector"
        else make_envs("keel/Herd-v0", 3, backend=backend, seed=0)
    )
    try:
        obs = envs.reset(0)
        for _ in range(10):
            assert obs["group"].dtype == np.int64
            assert (obs["group"] == (2.0 * obs["obs"][:, 0]).round()).all()
            obs = envs.step(np.zeros(3, np.int64)).obs
    finally:
        envs.close()


def test_a_group_that_is_no_number_is_named():
    envs = make_envs("keel/Wrong-v0", 1, backend="sync", seed=0)
    envs.reset(0)
    with pytest.raises(BadStepError, match=r"info\['group'\]: expected a whole number from 0"):
        envs.step(np.zeros(1, np.int64))
    envs.close()


@pytest.mark.parametrize("group", ["", f"{__name__}:by_first_number"])
def test_advantages_are_normalized_within_groups(group: str, monkeypatch: pytest.MonkeyPatch):
    """Rewards of size 1, 10 and 100: over the batch the largest group would drown the others."""
    import keel.training.environments as environments

    seen: list[tuple[Rollout, torch.Tensor]] = []
    real = environments.compute_targets

    def watch(*args: Any) -> Any:
        learned, statistics = real(*args)
        seen.append((args[2], learned.advantage))
        return learned, statistics

    monkeypatch.setattr(environments, "compute_targets", watch)
    for _ in train(from_dict(tiny(advantage={"normalize": "group", "group": group}))):
        pass
    rollout, advantage = seen[0]
    counts = rollout.weight.reshape(-1) > 0
    keys = rollout.obs["group"].reshape(-1)
    for key in range(3):
        own = advantage[(keys == key) & counts]
        assert own.mean().item() == pytest.approx(0.0, abs=1e-4)
        assert own.std().item() == pytest.approx(1.0, abs=1e-3)


def test_groups_of_a_robust_normalization_need_a_function():
    rollout = Rollout(*[torch.zeros(1)] * 3, {}, *[torch.zeros(1)] * 4, {})
    assert group_of(rollout, Advantage(normalize="robust")) is None
    assert group_of(rollout, Advantage(normalize="batch")) is None


@pytest.mark.parametrize(
    ("env", "group", "message"),
    [
        ("CartPole-v1", "", "the environment names no group"),
        ("keel/Herd-v0", "nowhere_at_all:f", "cannot be imported"),
        ("keel/Herd-v0", f"{__name__}:nothing", "cannot be imported"),
        ("keel/Herd-v0", f"{__name__}:__name__", "is no function"),
        ("keel/Herd-v0", f"{__name__}:by_nonsense", r"expected whole numbers from 0, \[64, 4\]"),
    ],
)
def test_what_is_wrong_with_groups_is_named(env: str, group: str, message: str):
    settings = tiny(env=env, advantage={"normalize": "group", "group": group})
    with pytest.raises(InputError, match=message):
        next(train(from_dict(settings)))


def test_a_group_function_needs_a_module():
    with pytest.raises(InputError, match=r"advantage.group: 'f' is not one of module:attribute"):
        from_dict({"advantage": {"normalize": "group", "group": "f"}})


@pytest.mark.parametrize("measure", ["exact", "k1", "k3"])
def test_an_update_is_stopped_by_the_kl_that_was_asked_for(measure: str):
    """With a tiny target every measure stops the update; the exact KL is certified all the same."""
    region = {
        "minibatch": 64,
        "learning_rate": 0.02,
        "target_kl": 1e-4,
        "early_stop": "epoch",
        "kl_measure": measure,
        "epochs": 10,
    }
    *_, last = train(from_dict(tiny(env="CartPole-v1", region=region)))
    assert last.metrics["train/epochs"] < 10
    assert last.metrics["train/early_stop_kl"] > 1.5e-4
    assert last.metrics["train/kl_exact"] <= 0.05
    assert last.metrics["train/kl_error"] >= 0.0


def test_the_clip_follows_the_kl_down_and_no_further_up_than_it_began():
    controller = AdaptiveClip(target=0.01, widest=0.3)
    hparams = HyperParams(clip_low=0.2, clip_high=0.3)
    _, tight = controller({}, Outcome(kl=0.05, return_mean=0.0), hparams)
    assert (tight.clip_low, tight.clip_high) == pytest.approx((0.2 / 1.5, 0.2))
    _, same = controller({}, Outcome(kl=0.01, return_mean=0.0), tight)
    assert same == tight
    _, back = controller({}, Outcome(kl=0.001, return_mean=0.0), tight)
    assert (back.clip_low, back.clip_high) == pytest.approx((0.2, 0.3))
    _, still = controller({}, Outcome(kl=0.001, return_mean=0.0), replace(back))
    assert still.clip_high == pytest.approx(0.3)
    for _ in range(20):
        _, tight = controller({}, Outcome(kl=1.0, return_mean=0.0), tight)
    assert tight.clip_high == pytest.approx(0.02)


def test_an_adaptive_clip_in_a_run():
    region = {"minibatch": 64, "learning_rate": 0.05, "target_kl": 1e-4, "adaptive_clip": True}
    found = [
        it.metrics["train/clip_range"]
        for it in train(from_dict(tiny(env="CartPole-v1", total_steps=1024, region=region)))
    ]
    assert found[0] == 0.2
    assert found[-1] < 0.2


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ({"adaptive_clip": True}, "region.adaptive_clip: needs region.target_kl"),
        ({"adaptive_clip": True, "clip": None, "target_kl": 0.01}, "needs region.clip"),
    ],
)
def test_an_adaptive_clip_needs_a_target_and_a_clip(region: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        from_dict({"region": region})
