"""TRPO: the direction, its scaling to the exact KL, the honest line search, and rejections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.algorithms.critic import CriticObjective
from keel.algorithms.trpo import Problem
from keel.distributions.actions import Categorical
from keel.experience.batch import Batch
from keel.losses.ppo import Objective
from keel.trust_region.certify import Certified
from keel.trust_region.gate import ConsistencyError
from keel.trust_region.measure import exact_kl
from keel.types import HyperParams, OptimizerState, UpdateReport

from .conftest import FIT, SHAPES, Setting, build, natural


def update(
    setting: Setting, hparams: HyperParams, *, seed: int = 0, gate: bool = True, **changes: Any
) -> tuple[OptimizerState, UpdateReport]:
    algorithm = Certified(natural(setting.agent, **changes), gate=gate)
    return setting.update(algorithm, hparams, seed=seed)


def problem(setting: Setting, objective: Objective, hparams: HyperParams) -> Problem:
    return Problem(setting.agent, setting.opt_state.params, setting.batch, hparams, objective)


def test_the_loss_is_that_of_policy_and_critic() -> None:
    """Without demonstrations their coefficient is of nothing."""
    _, report = update(build((96,)), HyperParams(bc_coef=0.5))
    told = report.metrics
    assert told["train/loss"] == pytest.approx(told["train/value_loss"] + told["train/policy_loss"])


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(1e-4, 0.2),
    st.floats(1e-3, 1.0),
    st.floats(0.2, 1.0),
    st.integers(0, 1000),
)
def test_no_accepted_step_is_over_the_bound(
    shape: str, bound: float, damping: float, fraction: float, seed: int
) -> None:
    """Measured again, independently, per group; nothing was walked back to get there."""
    setting = SHAPES[shape]()
    hparams = HyperParams(max_kl=bound, damping=damping)
    after, report = update(setting, hparams, seed=seed, fisher_fraction=fraction)
    kl = exact_kl(setting.agent, after.params, setting.batch, 1.0)
    assert (kl <= bound).all()
    torch.testing.assert_close(kl, report.kl_exact, rtol=0, atol=0)
    assert report.verdict == "accepted"
    assert report.metrics["train/walk_back"] == 0.0
    assert torch.isfinite(after.params).all()


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
def test_the_step_lands_on_the_exact_kl_from_either_side(steps: Setting, damping: float) -> None:
    """Damping shrinks the quadratic model's step: of ten it leaves a hundredth of the bound."""
    hparams = HyperParams(max_kl=0.01, damping=damping)
    _, plain = update(steps, hparams, rescale_to_kl=False)
    _, landed = update(steps, hparams)
    assert 0.0095 <= landed.kl_exact.item() <= 0.01
    assert plain.kl_exact.item() <= 0.01
    if damping == 10.0:
        assert plain.kl_exact.item() < 0.003
        assert landed.metrics["train/step_scale"] > 1.5


def test_the_direction_solves_the_damped_natural_gradient(steps: Setting) -> None:
    """(F + λ)x = g with F = Jᵀ (diag p − ppᵀ) J written out, averaged over the rows that count."""
    hparams = HyperParams(max_kl=1e-3, damping=0.1, entropy_coef=0.0)
    task = problem(steps, Objective(), hparams)
    gradient, gap = task.gradient()
    agent, start = steps.agent, steps.agent.critic_from
    policy = steps.opt_state.params[0, :start]

    def logits(x: Tensor) -> Tensor:
        found = agent.outputs_of(agent.policy_layout.unflatten(x), steps.batch.obs, "actor").policy
        assert found is not None
        return found

    jacobian = torch.func.jacrev(logits)(policy)
    p = logits(policy).softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    share = steps.batch.weight / steps.batch.weight.sum()
    matrix = torch.einsum("r,rip,rij,rjq->pq", share, jacobian, fisher, jacobian).double()
    matrix += 0.1 * torch.eye(start)
    expected = torch.linalg.solve(matrix, gradient.double())
    after, _ = update(steps, hparams, cg_iters=200)
    moved = (after.params - steps.opt_state.params)[0, :start].double()
    cosine = moved @ expected / (moved.norm() * expected.norm())
    assert cosine > 1 - 1e-5
    assert gap < 1e-5


@pytest.mark.parametrize("shape", ["steps", "continuous", "tokens"])
@pytest.mark.parametrize("floor", [None, 10.0])
def test_one_objective_gives_gradient_prediction_and_acceptance(
    shape: str, floor: float | None
) -> None:
    """The gradient is the slope of what the line search measures: entropy and floor included."""
    setting = SHAPES[shape]()
    objective = Objective(entropy_floor=floor, entropy_floor_coef=0.3)
    task = problem(setting, objective, HyperParams(entropy_coef=0.7))
    gradient, *_ = task.gradient()
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(5))
    direction /= direction.norm()
    size = 1e-2
    up, _ = task.evaluate(task.moved(direction, size))
    down, _ = task.evaluate(task.moved(direction, -size))
    assert (gradient @ direction).item() == pytest.approx((up - down) / (2 * size), rel=2e-2)
    with_entropy, *_ = problem(setting, Objective(), HyperParams(entropy_coef=0.7)).gradient()
    without, *_ = problem(setting, Objective(), HyperParams(entropy_coef=0.0)).gradient()
    assert not torch.allclose(with_entropy, without)


def test_predicted_and_actual_improvement_agree_on_a_small_step(steps: Setting) -> None:
    _, report = update(steps, HyperParams(max_kl=1e-5, entropy_coef=0.1))
    metrics = report.metrics
    assert metrics["train/gain_ratio"] == pytest.approx(1.0, abs=0.02)
    assert metrics["train/improvement"] == pytest.approx(
        metrics["train/gain_ratio"] * metrics["train/improvement_predicted"]
    )


def rejects(setting: Setting, reason: str, hparams: HyperParams, **changes: Any) -> None:
    """The policy is what it was, bit for bit; the critic has learned; nothing pretends to be 0."""
    after, report = update(setting, hparams, **changes)
    start = setting.agent.critic_from
    assert torch.equal(after.params[:, :start], setting.opt_state.params[:, :start])
    assert not torch.equal(after.params[:, start:], setting.opt_state.params[:, start:])
    assert report.verdict == "rejected"
    assert report.reason == reason
    assert (report.kl_exact == 0.0).all()
    assert (report.alpha == 0.0).all()
    metrics = report.metrics
    assert math.isnan(metrics["train/kl_step"])
    assert math.isnan(metrics["train/gain_ratio"])
    assert metrics["train/line_search_success"] == metrics["train/step_fraction"] == 0.0


def test_a_step_that_does_not_improve_enough_is_rejected(setting: Setting) -> None:
    """Fault 26: nothing gains a hundred times what was predicted."""
    asked = {"accept_ratio": 100.0, "backtrack_iters": 4}
    rejects(setting, "too_little_improvement", HyperParams(max_kl=0.01), **asked)
    _, report = update(setting, HyperParams(max_kl=0.01), **asked)
    assert report.metrics["train/line_search_iters"] == 4.0
    assert report.metrics["train/kl_tried"] > 0.0


class Bent(Categorical):
    """A distribution whose Fisher matrix has the wrong sign."""

    def fisher(self, params: dict[str, Tensor], tangent: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: -x for key, x in super().fisher(params, tangent).items()}


def test_curvature_that_is_not_positive_is_rejected() -> None:
    """Fault 26."""
    setting = build((96,), dist=Bent(3))
    rejects(setting, "non_positive_curvature", HyperParams(damping=0.0))
    _, report = update(setting, HyperParams(damping=0.0))
    assert report.metrics["train/curvature_min"] <= 0.0
    assert math.isnan(report.metrics["train/improvement"])


class Broken(Categorical):
    """A distribution whose Fisher matrix is not a number."""

    def fisher(self, params: dict[str, Tensor], tangent: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: x * torch.nan for key, x in super().fisher(params, tangent).items()}


def test_curvature_that_is_not_finite_is_rejected() -> None:
    rejects(build((96,), dist=Broken(3)), "non_finite", HyperParams())


def test_without_advantages_there_is_no_direction(steps: Setting) -> None:
    flat = replace_advantage(steps, torch.zeros_like)
    rejects(flat, "no_gradient", HyperParams())
    assert update(flat, HyperParams())[1].metrics["train/line_search_iters"] == 0.0


def replace_advantage(setting: Setting, change: Callable[[Tensor], Tensor]) -> Setting:
    return setting.of(advantage=change(setting.batch.advantage))


def test_an_advantage_that_is_not_finite_stops_the_run(steps: Setting) -> None:
    from keel.trust_region.gate import NumericError

    with pytest.raises(NumericError, match=r"policy's gradient is not finite .*: 0\).*advantage"):
        update(replace_advantage(steps, lambda x: x * torch.nan), HyperParams())


def test_rows_of_weight_zero_do_not_count(steps: Setting) -> None:
    """They may hold anything: observations, distributions, log-probs, advantages."""
    rows = steps.batch
    nothing = rows.weight == 0
    assert nothing.any()

    def broken(x: Tensor) -> Tensor:
        return torch.where(nothing.reshape(-1, *[1] * (x.ndim - 1)), torch.nan, x)

    wild = replace_advantage(steps, broken)
    wild = wild.of(
        obs={key: broken(x) for key, x in rows.obs.items()},
        behavior={key: broken(x) for key, x in rows.behavior.items()},
        log_prob=broken(rows.log_prob),
    )
    hparams = HyperParams(max_kl=0.01, entropy_coef=0.1)
    same, _ = update(steps, hparams)
    after, report = update(wild, hparams)
    torch.testing.assert_close(same.params, after.params, rtol=0, atol=1e-6)
    assert report.verdict == "accepted"


def test_a_stored_log_prob_that_is_not_finite_is_quarantined(steps: Setting) -> None:
    log_prob = steps.batch.log_prob.clone()
    log_prob[(steps.batch.weight > 0).nonzero()[3]] = -torch.inf
    sick = steps.of(log_prob=log_prob)
    after, report = update(sick, HyperParams(max_kl=0.01))
    assert report.verdict == "accepted"
    assert torch.isfinite(after.params).all()
    assert report.metrics["error/non_finite_ratio_count"] == 1.0


def test_quarantined_rows_are_counted_over_all_agents() -> None:
    setting = build((40, 2), groups=2)
    _, healthy = update(setting, HyperParams(max_kl=0.01))
    assert healthy.metrics["error/non_finite_ratio_count"] == 0.0
    log_prob, counts = setting.batch.log_prob.clone(), setting.batch.weight > 0
    for agent, number in ((0, 2), (1, 1)):  # two rows of one agent, one of the other
        log_prob[counts[:, agent].nonzero()[:number], agent] = torch.nan
    log_prob[~counts] = torch.nan  # what does not count is not counted
    sick = setting.of(log_prob=log_prob)
    _, report = update(sick, HyperParams(max_kl=0.01))
    assert report.metrics["error/non_finite_ratio_count"] == 3.0


def test_the_gate_looks_where_the_difference_is() -> None:
    """Not only at the first rows: one wrong row among thousands is found."""
    setting = build((9000,))
    log_prob = setting.batch.log_prob.clone()
    counted = (setting.batch.weight > 0).nonzero()
    log_prob[int(counted[0])] = -torch.inf  # quarantined, and no reason to look no further
    log_prob[int(counted[-1])] -= 0.5
    other = setting.of(log_prob=log_prob)
    with pytest.raises(ConsistencyError, match="not the one that sampled"):
        update(other, HyperParams())


def test_the_gate_names_a_policy_that_did_not_sample(steps: Setting) -> None:
    other = steps.of(log_prob=steps.batch.log_prob - 0.5)
    with pytest.raises(ConsistencyError, match="not the one that sampled"):
        update(other, HyperParams())
    _, report = update(other, HyperParams(), gate=False)
    assert report.metrics["train/gate_log_ratio"] == pytest.approx(0.5, abs=1e-3)


def test_the_fisher_sample_is_drawn_from_the_updates_own_stream(steps: Setting) -> None:
    start, hparams = steps.agent.critic_from, HyperParams(max_kl=0.01)
    one, again, other = (
        update(steps, hparams, seed=seed, fisher_fraction=0.3)[0].params[:, :start]
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_stacked_agents_take_the_steps_they_would_take_alone(agents: Setting) -> None:
    """Each group has its own direction, length and bound."""
    after, report = update(agents, HyperParams(max_kl=0.01))
    start = agents.agent.critic_from
    for group in range(3):
        rows = Batch(
            obs={key: x[:, group] for key, x in agents.batch.obs.items()},
            behavior={key: x[:, group] for key, x in agents.batch.behavior.items()},
            action=agents.batch.action[:, group],
            log_prob=agents.batch.log_prob[:, group],
            weight=agents.batch.weight[:, group],
            advantage=agents.batch.advantage[:, group],
            target=agents.batch.target[:, group],
            old_value=agents.batch.old_value[:, group],
        )
        own = OptimizerState(*(x[group : group + 1] for x in agents.opt_state))
        alone = Setting(agents.agent.alone(), rows, own)
        single, _ = update(alone, HyperParams(max_kl=0.01))
        torch.testing.assert_close(single.params[0, :start], after.params[group, :start])
    assert report.kl_exact.shape == (3,)


def test_the_critic_is_fitted_and_the_policy_left_to_its_step(steps: Setting) -> None:
    hparams = HyperParams(max_kl=0.01, learning_rate=1e-2)
    short, _ = update(steps, hparams)
    after, report = update(steps, hparams, critic=replace(FIT, epochs=60))
    start = steps.agent.critic_from
    assert torch.equal(short.params[:, :start], after.params[:, :start])
    assert (
        report.metrics["train/critic_loss_last"] < 0.5 * report.metrics["train/critic_loss_first"]
    )
    assert after.steps.tolist() == [[0.0, 180.0]]  # 96 rows in minibatches of 40: three a pass
    assert not after.first[:, :start].any()


def test_the_value_clip_holds_the_critic_back(steps: Setting) -> None:
    hparams = HyperParams(learning_rate=1e-2)
    free = replace(FIT, epochs=30)
    held = replace(free, objective=CriticObjective(value_clip=1e-3))
    one, _ = update(steps, hparams, critic=free)
    other, _ = update(steps, hparams, critic=held)
    assert not torch.equal(one.params, other.params)
