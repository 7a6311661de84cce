"""Minibatch updates: masks, stops, faults, and the compiled step beside the eager one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from keel.algorithms.optimizer import Minibatch, StepResult, make_step
from keel.algorithms.ppo import PPO
from keel.experience.batch import Batch, Experience, Targets, minibatches
from keel.losses.ppo import Objective
from keel.trust_region.gate import NumericError
from keel.types import HyperParams, OptimizerState

from .conftest import Setting, build, small


def improvement(setting: Setting, params: torch.Tensor) -> float:
    """Change of the mean ratio-weighted advantage."""
    rows = setting.batch
    with torch.no_grad():
        policy = setting.agent.policy(params, rows.obs)
        ratio = (setting.agent.dist.log_prob(policy, rows.action) - rows.log_prob).exp()
    return ((ratio - 1.0) * rows.advantage * rows.weight).sum().item()


def test_an_update_improves_the_surrogate(setting: Setting) -> None:
    after, report = setting.update(small(setting.agent), HyperParams(learning_rate=1e-2))
    assert improvement(setting, after.params) > 0.0
    assert report.metrics["train/epochs"] == 3.0


def test_the_gate_measures_the_first_minibatch_before_any_step(setting: Setting) -> None:
    """Later ones are replayed by a policy that has moved."""
    _, report = setting.update(small(setting.agent), HyperParams(learning_rate=1e-2))
    assert report.metrics["train/gate_log_ratio"] < 1e-5


def test_the_largest_log_ratio_of_every_agent(agents: Setting) -> None:
    """Stored log-probs are off by 0.1, 0.2 and 0.3, one row of the second agent by 0.7."""
    rows = agents.batch
    shift = torch.tensor([0.1, 0.2, 0.3]).expand(96, 3).clone()
    shift[17, 1] = -0.7
    batch = rows._replace(log_prob=rows.log_prob + shift, weight=torch.ones(96, 3))
    _, statistics = Objective()(
        agents.agent, agents.opt_state.params, batch, HyperParams().tensor()
    )
    torch.testing.assert_close(
        statistics.log_ratio_max, torch.tensor([0.1, 0.7, 0.3]), rtol=0, atol=1e-5
    )


def test_rows_of_weight_0_change_nothing_whatever_they_hold(setting: Setting) -> None:
    batch = setting.batch
    dead = batch.weight == 0
    sick = setting.of(
        advantage=torch.where(dead, torch.nan, batch.advantage),
        target=torch.where(dead, torch.nan, batch.target),
        old_value=torch.where(dead[..., None], torch.nan, batch.old_value),
        log_prob=torch.where(dead, torch.inf, batch.log_prob),
        obs={"obs": torch.where(dead[..., None], torch.nan, batch.obs["obs"])},
    )
    algorithm = small(setting.agent)
    healthy, _ = setting.update(algorithm, HyperParams())
    after, report = sick.update(algorithm, HyperParams())
    assert torch.equal(healthy.params, after.params)
    assert report.metrics["error/non_finite_ratio_count"] == 0.0


def test_a_non_finite_log_prob_is_quarantined_and_counted(steps: Setting) -> None:
    log_prob = steps.batch.log_prob.clone()
    bad = int(torch.nonzero(steps.batch.weight)[0])
    log_prob[bad] = torch.nan
    sick = steps.of(log_prob=log_prob)
    algorithm = small(steps.agent)
    for seed in range(8):  # in whichever minibatch it falls, the first and its gate included
        after, report = sick.update(algorithm, HyperParams(), seed=seed)
        assert torch.isfinite(after.params).all()
        assert report.metrics["error/non_finite_ratio_count"] == algorithm.epochs


def test_a_non_finite_gradient_is_never_applied(steps: Setting) -> None:
    """Faults 23 and 24: an infinite target makes the loss infinite; nothing moves, and it stops."""
    sick = steps.of(target=torch.full_like(steps.batch.target, torch.inf))
    before = [x.clone() for x in steps.opt_state]
    with pytest.raises(NumericError, match=r"the loss is not finite.*minibatch: target"):
        sick.update(small(steps.agent), HyperParams())
    assert all(torch.equal(old, new) for old, new in zip(before, steps.opt_state, strict=True))


@pytest.mark.parametrize("granularity", ["minibatch", "epoch"])
def test_early_stop_ends_an_update(granularity: str, setting: Setting) -> None:
    algorithm = small(setting.agent, epochs=50, early_stop=granularity, target_kl=0.01)
    _, report = setting.update(algorithm, HyperParams(learning_rate=0.02))
    assert report.metrics["train/epochs"] < 50
    whole = report.metrics["train/early_stop_epoch"] + (granularity == "epoch")
    assert report.metrics["train/epochs"] == whole, "of epochs that were gone through to the end"
    assert report.metrics["train/early_stop_kl"] > 0.015


def test_a_stopped_agent_does_not_move_with_its_momentum(agents: Setting) -> None:
    """Agent 1 alone has a signal: it stops early, frozen, while the critics of others go on."""
    setting = agents.of(advantage=agents.batch.advantage * torch.tensor([0.0, 1.0, 0.0]))
    algorithm = small(agents.agent, epochs=30, minibatch=96, early_stop="minibatch", target_kl=0.01)
    short = replace(algorithm, epochs=29)
    hparams = HyperParams(learning_rate=0.01)
    longer, _ = setting.update(algorithm, hparams)
    before, _ = setting.update(short, hparams)
    moved = (longer.params != before.params).any(1)
    assert not moved[1]
    assert moved[0]


def test_agents_learn_as_if_they_were_alone(agents: Setting) -> None:
    """Row by row, three stacked agents take the steps that each would take by itself."""
    from keel.algorithms.optimizer import initial_opt_state
    from keel.networks.agent import Agent

    together, _ = agents.update(small(agents.agent), HyperParams(learning_rate=1e-2))
    for index in range(3):
        alone = replace(
            agents,
            agent=Agent(agents.agent.network, agents.agent.dist),
            batch=Batch(
                obs={"obs": agents.batch.obs["obs"][:, index]},
                behavior={"logits": agents.batch.behavior["logits"][:, index]},
                action=agents.batch.action[:, index],
                log_prob=agents.batch.log_prob[:, index],
                weight=agents.batch.weight[:, index],
                advantage=agents.batch.advantage[:, index],
                target=agents.batch.target[:, index],
                old_value=agents.batch.old_value[:, index],
            ),
            opt_state=initial_opt_state(agents.opt_state.params[index : index + 1]),
        )
        single, _ = alone.update(small(alone.agent), HyperParams(learning_rate=1e-2))
        torch.testing.assert_close(single.params[0], together.params[index], rtol=1e-4, atol=1e-6)


def test_a_kl_penalty_holds_the_policy_back(setting: Setting) -> None:
    penalized = Objective(surrogate="unclipped", penalize=True)
    algorithm = small(setting.agent, objective=penalized)
    free, held = (
        setting.update(algorithm, HyperParams(learning_rate=1e-2, kl_coef=coef))[0]
        for coef in (0.0, 20.0)
    )
    from keel.trust_region.measure import exact_kl

    kl = [exact_kl(setting.agent, x.params, setting.batch, 1.0) for x in (free, held)]
    assert (kl[1] < kl[0]).all()


def test_an_entropy_floor_pushes_the_entropy_up(steps: Setting) -> None:
    """A penalty of `entropy.item()` has no gradient; this one does."""
    setting = steps.of(advantage=torch.zeros_like(steps.batch.advantage))
    floor = Objective(entropy_floor=5.0, entropy_floor_coef=1.0, value_coef=0.0)
    algorithm = small(steps.agent, objective=floor)
    after, _ = setting.update(algorithm, HyperParams(learning_rate=1e-2))
    with torch.no_grad():
        entropy = [
            setting.agent.dist.entropy(setting.agent.policy(p, setting.batch.obs)).mean()
            for p in (setting.opt_state.params, after.params)
        ]
    assert entropy[1] > entropy[0]


@pytest.mark.compiler
@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(Objective(), marks=pytest.mark.slow),
        pytest.param(Objective(dual_clip=3.0, value_clip=0.2), marks=pytest.mark.slow),
        Objective(surrogate="symmetric", penalize=True, entropy_floor=0.5),
    ],
    ids=["clip", "dual and value clip", "symmetric, penalty and floor"],
)
def test_the_compiled_step_equals_the_eager_one(objective: Objective, steps: Setting) -> None:
    hparams = HyperParams(learning_rate=1e-2, entropy_coef=0.01, kl_coef=0.5)
    eager, eager_report = steps.update(small(steps.agent, objective=objective), hparams)
    by_inductor = small(steps.agent, objective=objective, compiled=True)
    compiled, report = steps.update(by_inductor, hparams)
    torch.testing.assert_close(eager.params, compiled.params, rtol=1e-4, atol=1e-5)
    for name, value in eager_report.metrics.items():
        assert report.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True)


def test_the_remainder_is_used_and_padded_to_shape() -> None:
    seen = list(minibatches(10, 4, torch.Generator().manual_seed(0)))
    assert [index.shape[0] for index, _ in seen] == [4, 4, 4]
    rows = torch.cat([index[real > 0] for index, real in seen])
    assert sorted(rows.tolist()) == list(range(10))
    assert sum(real.sum().item() for _, real in seen) == 10


def test_gradients_are_clipped_to_their_norm(steps: Setting) -> None:
    """Adam's first step hardly depends on the gradient's size: its first moment does."""
    tight = small(steps.agent, epochs=1, minibatch=96, max_grad_norm=1e-3)
    after, report = steps.update(tight, HyperParams())
    assert report.metrics["train/gradient_clipped"] == 1.0
    assert after.first.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_nothing_is_learned_from_an_empty_rollout(steps: Setting) -> None:
    """Fault 28: all rows masked: zero loss, finite, nothing moves."""
    empty = steps.of(weight=torch.zeros(96))
    after, report = empty.update(small(steps.agent), HyperParams())
    assert torch.equal(after.params, steps.opt_state.params)
    assert report.metrics["train/loss"] == 0.0
    assert not math.isnan(report.metrics["train/clip_fraction"])


def test_the_value_clip_is_around_the_critics_own_values() -> None:
    """Not around target − advantage: advantages are normalized, and recomputed every epoch."""
    seen: list[Tensor] = []
    setting = build((12,))
    calls = iter(range(10))

    def targets(params: Tensor) -> Targets:
        shift = float(next(calls))
        return Targets(torch.randn(12), torch.zeros(12), torch.arange(12.0)[:, None] + shift)

    step = make_step(setting.agent, Objective(), max_grad_norm=0.5)

    def watching(opt_state: OptimizerState, minibatch: Minibatch) -> StepResult:
        seen.append(minibatch.rows.old_value)
        return step(opt_state, minibatch)

    first = targets(setting.opt_state.params)
    batch = setting.batch._replace(
        advantage=first.advantage, target=first.target, old_value=first.raw
    )
    algorithm = PPO(setting.agent, watching, epochs=3, minibatch=12, recompute_advantages=True)
    algorithm.update(setting.state(), Experience(batch, targets), HyperParams())
    assert next(calls) == 3
    assert len(seen) == 3
    assert all(torch.equal(x, torch.arange(12.0)[:, None]) for x in seen)
