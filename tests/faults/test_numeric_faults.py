"""Faults 23 to 32 on whole runs: what is not finite never reaches the parameters, and is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

from keel import resources
from keel.algorithms.optimizer import Minibatch, StepResult, initial_opt_state, make_step
from keel.algorithms.ppo import PPO
from keel.config import Advantage, Config, from_dict
from keel.envs import BadStepError, make_envs
from keel.errors import InputError
from keel.experience.batch import Batch, Experience, Targets, minibatches
from keel.experience.targets import compute_targets
from keel.functional import aggregate, gae, normalize
from keel.losses.ppo import Objective
from keel.training.environments import EnvironmentSource
from keel.training.persist import FAULT
from keel.training.runner import start
from keel.training.session import Session, initial_state, open_session, train
from keel.trust_region.certify import Certified
from keel.trust_region.gate import BAD_STEPS, NumericError, check_replay
from keel.types import AlgorithmState, OptimizerState


class Numbers(gymnasium.Env[Any, Any]):
    """Rewards and observations of a chosen size from step `at` on."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reward: float = 1.0, scale: float = 1.0, at: int = 100) -> None:
        self.reward, self.scale, self.at, self.count = reward, scale, at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.age = 0
        return self.seen(1.0), {}

    def seen(self, scale: float) -> np.ndarray:
        return (self.np_random.standard_normal(2) * scale).astype(np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count, self.age = self.count + 1, self.age + 1
        late = self.count >= self.at
        scale, reward = (self.scale, self.reward) if late else (1.0, 1.0)
        return self.seen(scale), reward, self.age >= 8, False, {}


if "keel/HugeRewards-v0" not in gymnasium.registry:
    gymnasium.register("keel/HugeRewards-v0", Numbers, kwargs={"reward": 1e38})  # type: ignore[arg-type]


def tiny(env: str = "keel/HugeRewards-v0", **more: Any) -> Config:
    base = {
        "env": env,
        "total_steps": 4096,
        "rollout_steps": 32,
        "envs": {"num": 4, "backend": "sync"},
        "region": {"minibatch": 64, "epochs": 2},
        "network": {"hidden": [8]},
        "evaluation": {"episodes": 2},
    }
    return from_dict(more, from_dict(base))


def source_of(session: Session) -> EnvironmentSource:
    assert isinstance(session.source, EnvironmentSource)
    return session.source


@pytest.mark.parametrize("activation", ["tanh", "gelu"])  # the compiled step, and autograd's
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_batch(
    activation: str, tmp_path: Path
) -> None:
    """Fault 23: the step is skipped, the minibatch dumped, and the stop has a type."""
    config = tiny(network={"activation": activation, "hidden": [8]}, checkpoints={"every": 128})
    with pytest.raises(NumericError, match="the loss is not finite") as caught:
        for _ in start(config, tmp_path, "run"):
            pass
    run = tmp_path / "run" / "seed-0"
    assert str(run / FAULT) in str(caught.value)
    kept = load_file(run / FAULT)
    assert not torch.isfinite(kept["target"]).all()
    assert torch.isfinite(kept["params"]).all()
    assert kept["obs.obs"].shape == (64, 2)
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert list((run / "checkpoints").iterdir()), "what was good before is still there"


def test_outputs_that_are_not_finite_are_told_as_such() -> None:
    """Fault 23: NaN logits are named before they can be mistaken for another policy."""
    session = open_session(tiny("CartPole-v1"))
    try:
        state = initial_state(session)
        params = state.opt_state.params.clone()
        params[:, session.agent.policy_columns] *= 1e30
        rollout = source_of(session).collector.collect(params, 1.0, None)
        params[0, session.agent.layout.slice_of("actor.layers.1.bias")] = torch.nan
        with pytest.raises(NumericError, match="the policy's output is not finite"):
            check_replay(session.agent, params, rollout.batch(), 1.0, enforce=True)
    finally:
        session.source.close()


def test_gradients_that_are_not_finite_are_skipped_counted_and_then_stop() -> None:
    """Fault 24: below the limit training goes on with what is good; at the limit it stops."""
    session = open_session(tiny("CartPole-v1", region={"epochs": 8}))
    try:
        state = initial_state(session)
        certified = session.algorithm
        assert isinstance(certified, Certified)
        assert isinstance(certified.algorithm, PPO)
        whole_step = certified.algorithm.step
        rollout = source_of(session).collector.collect(state.opt_state.params, 1.0, None)

        def targets(params: torch.Tensor) -> Targets:
            return compute_targets(session.agent, params, rollout, Advantage())[0]

        learned = targets(state.opt_state.params)
        batch = rollout.batch()._replace(
            advantage=learned.advantage, target=learned.target, old_value=learned.raw
        )

        def broken_every(n: int) -> Any:
            taken = 0

            def step(opt_state: OptimizerState, *rest: Any) -> StepResult:
                nonlocal taken
                taken += 1
                result = whole_step(opt_state, *rest)
                if taken % n:
                    return result
                bad = torch.full((1,), math.nan)
                return result._replace(opt_state=opt_state, gradient_norm=bad, applied=bad > 0)

            return step

        def update(n: int) -> Any:
            before = AlgorithmState(state.opt_state, torch.Generator().manual_seed(0))
            algorithm = PPO(session.agent, broken_every(n), epochs=8, minibatch=64)
            return algorithm.update(before, Experience(batch, targets), state.hparams)

        after, report = update(2)
        assert report.metrics["train/non_finite_gradients"] == 8.0
        assert torch.isfinite(after.opt_state.params).all()
        with pytest.raises(NumericError, match=f"none applied: {BAD_STEPS}"):
            update(1)
    finally:
        session.source.close()


def test_a_log_ratio_that_overflows_is_bounded_and_reported() -> None:
    """Fault 25: e^200 is no number; the loss stays finite and the run says what happened."""
    config = tiny("CartPole-v1", region={"learning_rate": 3.0, "certify": False, "epochs": 8})
    seen: list[dict[str, float]] = []
    for iteration in train(config):
        seen.append(iteration.metrics)
        if len(seen) == 6:
            break
    assert all(math.isfinite(m["train/loss"]) for m in seen)
    assert any(m["warn/large_log_ratio"] > 5.0 for m in seen)


def test_advantages_without_variance_and_a_batch_of_one() -> None:
    """Fault 27."""
    for rows in (1, 5):
        scaled = normalize(torch.full((rows, 1), 3.0), "batch").advantage
        assert torch.equal(scaled, torch.zeros(rows, 1))


def test_rows_that_are_masked_altogether() -> None:
    """Fault 28: no weight, no loss, no NaN; an environment that forbids everything is named."""
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = aggregate(x, torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(2, 3))  # type: ignore[arg-type]

    class Closed(Numbers):
        def reset(self, **given: Any) -> Any:
            return super().reset(**given)[0], {"action_mask": np.ones(2, bool)}

        def step(self, action: Any) -> Any:
            obs, reward, over, cut, _ = super().step(action)
            return obs, reward, over, cut, {"action_mask": np.zeros(2, bool)}

    gymnasium.register("keel/Closed-v0", Closed)  # type: ignore[arg-type]
    envs = make_envs("keel/Closed-v0", 2, backend="sync", seed=0)
    envs.reset(0)
    with pytest.raises(BadStepError, match=r"environment 0.*forbids every action"):
        envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"envs": {"num": 0}}, "envs.num"),
        ({"total_steps": 0}, "total_steps"),
        ({"rollout_steps": 0}, "rollout_steps"),
        ({"region": {"minibatch": 4096}}, "region.minibatch"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    """Fault 29."""
    with pytest.raises(InputError, match=name):
        tiny(**changes)


def test_the_remainder_is_used() -> None:
    """Fault 29: 10 rows in minibatches of 4 are 4, 4 and 2, each row once."""
    real = [index[mask > 0] for index, mask in minibatches(10, 4, torch.Generator().manual_seed(0))]
    assert [len(part) for part in real] == [4, 4, 2]
    assert sorted(torch.cat(real).tolist()) == list(range(10))


def test_a_rollout_larger_than_memory_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 30."""
    monkeypatch.setattr(resources, "free_bytes", lambda: 2**30)
    config = tiny("CartPole-v1", rollout_steps=10_000_000, total_steps=10**9)
    with pytest.raises(InputError, match=r"a rollout of 10000000 steps × 4.*GiB are free"):
        start(config, tmp_path, "run")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"num_envs: 10000000 environments.*use fewer"):
        make_envs("CartPole-v1", 10_000_000, seed=0)


def test_only_a_truncated_episode_is_bootstrapped() -> None:
    """Fault 32: r + γV(final) where time ran out, r alone where the episode ended."""
    reward, value = torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    final = torch.tensor([[4.0, 4.0]])
    found = gae(
        reward,
        value,
        torch.tensor([9.0, 9.0]),
        torch.tensor([[True, False]]),
        torch.tensor([[False, True]]),
        final,
        gamma=0.5,
        lam=1.0,
    )
    assert found.target.tolist() == [[1.0, 3.0]]


def test_the_eager_step_skips_what_is_not_finite_as_well() -> None:
    """Fault 24, for what is not stepped by compiled loops."""
    session = open_session(tiny("CartPole-v1"))
    session.source.close()
    agent = session.agent
    step = make_step(agent, Objective(), max_grad_norm=0.5)

    rows = Batch(
        obs={"obs": torch.randn(4, 4)},
        behavior={"logits": torch.zeros(4, 2)},
        action=torch.zeros(4, dtype=torch.long),
        log_prob=torch.full((4,), -math.log(2.0)),
        advantage=torch.ones(4),
        target=torch.full((4,), 1e30),
        old_value=torch.zeros(4, 1),
        weight=torch.ones(4),
    )
    before = initial_opt_state(agent.initial)
    active = torch.ones(1, dtype=torch.bool)
    hparams = initial_state(session).hparams.tensor()
    result = step(before, Minibatch(rows, torch.arange(4), torch.ones(4), hparams, active))
    assert not result.applied.item()
    assert torch.equal(result.opt_state.params, before.params)
