"""Cloning inside a trust region: its loss and gradient, the bound, and who may turn its weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.algorithms.critic import CriticFit
from keel.algorithms.trpo import Problem
from keel.controllers.controllers import Decay, Outcome
from keel.controllers.demos import CloningTrust, LossBalance
from keel.distributions.actions import Categorical, Gaussian
from keel.experience.batch import DemoBatch
from keel.losses.demos import (
    Limit,
    Pull,
    cloning_loss,
    cloning_metrics,
    mean_cloning_loss,
    pull,
)
from keel.losses.ppo import Objective
from keel.trust_region.certify import Certified
from keel.trust_region.measure import demo_kl, exact_kl
from keel.types import HyperParams, OptimizerState, UpdateReport

from .conftest import FEATURES, Setting, build, natural, small

ROWS = 96


def demos_for(setting: Setting, seed: int = 1) -> DemoBatch:
    generator = torch.Generator().manual_seed(seed)
    obs = {"obs": torch.randn(ROWS, FEATURES, generator=generator)}
    action = torch.zeros(ROWS, dtype=torch.long)
    if isinstance(setting.agent.dist, Gaussian):
        action = torch.randn(ROWS, 2, generator=generator)
    return DemoBatch(obs, action, torch.rand(ROWS, generator=generator), torch.ones(ROWS))


@pytest.fixture(params=["categorical", "gaussian"])
def taught(request: pytest.FixtureRequest) -> Setting:
    setting = build((ROWS,), dist=Gaussian(2) if request.param == "gaussian" else Categorical(3))
    setting.batch = setting.batch._replace(demos=demos_for(setting))
    return setting


def constrained(
    setting: Setting, hparams: HyperParams, limit: Limit | None = None
) -> tuple[OptimizerState, UpdateReport]:
    fit = CriticFit(epochs=1, minibatch=40)
    return setting.update(Certified(natural(setting.agent, critic=fit, limit=limit)), hparams)


def test_the_loss_is_that_of_torch():
    """Cross-entropy, weighted; two of the four rows are padding or worth nothing."""
    setting = build((ROWS,))
    obs = {"obs": torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(5))}
    demos = DemoBatch(
        obs,
        torch.tensor([0, 2, 1, 1]),
        torch.tensor([1.0, 3.0, 0.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )
    logits = setting.agent.policy(setting.opt_state.params, obs)["logits"]
    each = torch.nn.functional.cross_entropy(logits, demos.action, reduction="none")
    expected = (each[0] + 3.0 * each[1]) / 3.0
    found = cloning_loss(setting.agent, setting.opt_state.params, demos, 1.0)
    torch.testing.assert_close(found, expected.reshape(1))
    whole = mean_cloning_loss(setting.agent, setting.opt_state.params, demos, 1.0)
    assert whole == pytest.approx(expected.item())


def test_where_nothing_is_real_nothing_is_cloned():
    """A minibatch may be padding only: a loss of 0 with a gradient of 0, not 0/0."""
    setting = build((ROWS,))
    demos = demos_for(setting)._replace(weight=torch.zeros(ROWS), real=torch.zeros(ROWS))
    leaf = setting.opt_state.params.clone().requires_grad_()
    loss = cloning_loss(setting.agent, leaf, demos, 1.0)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.tolist() == [0.0]
    assert not gradient.any()
    assert mean_cloning_loss(setting.agent, setting.opt_state.params, demos, 1.0) == 0.0


@pytest.mark.parametrize(
    ("policy_norm", "cloning_norm", "ratio"),
    [(2.0, 3.0, 0.75), (1.0, 3.0, 1.5), (0.0, 3.0, math.inf), (0.0, 0.0, math.nan), (2.0, 0.0, 0)],
)
def test_how_hard_demonstrations_pull_by_hand(
    policy_norm: float, cloning_norm: float, ratio: float
):
    """coef·‖cloning‖ / ‖policy‖ with a coefficient of ½; beside no gradient it is infinite, and of
    nothing beside nothing there is no ratio. Losses of 4 and −2: |½·4| / |−2| = 1."""
    pulled = Pull(torch.zeros(1), policy_norm, cloning_norm, 0.1)
    metrics = cloning_metrics(pulled, HyperParams(bc_coef=0.5), policy_loss=-2.0, bc_loss=4.0)
    assert metrics["train/bc_gradient_ratio"] == pytest.approx(ratio, nan_ok=True)
    assert metrics["train/bc_ppo_ratio"] == pytest.approx(1.0)
    assert metrics["train/bc_gradient_norm"] == cloning_norm


def test_the_objective_adds_it_with_its_coefficient(taught: Setting):
    hparams = HyperParams(bc_coef=0.7)

    def loss(params: Tensor, bc_coef: float, demos: DemoBatch | None) -> Tensor:
        batch = taught.batch._replace(demos=demos)
        dials = replace(hparams, bc_coef=bc_coef).tensor()
        found, statistics = Objective()(taught.agent, params, batch, dials)
        if demos is None:
            assert statistics.bc_loss.item() == 0.0
        return found.sum()

    params = taught.opt_state.params
    demos = taught.batch.demos
    assert demos is not None
    alone = loss(params, 0.7, None)
    both = loss(params, 0.7, demos)
    cloned = cloning_loss(taught.agent, params, demos, 1.0)
    torch.testing.assert_close(both, alone + 0.7 * cloned.sum())
    torch.testing.assert_close(loss(params, 0.0, demos), alone)


def test_the_pull_is_that_of_finite_differences(taught: Setting):
    """Along cloning's own gradient, the loss must change by its norm."""
    params, demos = taught.opt_state.params, taught.batch.demos
    assert demos is not None
    found = pull(taught.agent, params, taught.batch, HyperParams())
    step = 1e-2 * (found.cloning / found.cloning_norm).float()[None]
    ahead = mean_cloning_loss(taught.agent, params + step, demos, 1.0)
    behind = mean_cloning_loss(taught.agent, params - step, demos, 1.0)
    assert (ahead - behind) / 2e-2 == pytest.approx(found.cloning_norm, rel=1e-3)
    assert -1.0 <= found.cosine <= 1.0


def test_what_teaches_the_same_has_cosine_one():
    """Shown are the rollout's own rows, weighted by their advantage: both gradients are one."""
    setting = build((ROWS,))
    rows = setting.batch
    demos = DemoBatch(rows.obs, rows.action, rows.weight * rows.advantage, rows.weight)
    taught = rows._replace(demos=demos)
    found = pull(setting.agent, setting.opt_state.params, taught, HyperParams())
    assert found.cosine == pytest.approx(1.0, abs=1e-5)
    assert found.cloning_norm == pytest.approx(found.policy_norm, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.001, 0.05), st.floats(0.1, 1000.0), st.booleans(), st.integers(0, 100))
def test_the_bound_covers_cloning(bound: float, coef: float, second_order: bool, seed: int):
    """However loudly demonstrations speak, the exact KL on the rollout stays inside."""
    setting = build((ROWS,))
    setting.batch = setting.batch._replace(demos=demos_for(setting, seed))
    hparams = HyperParams(max_kl=bound, bc_coef=coef, learning_rate=1e-2)
    if second_order:
        after, report = constrained(setting, hparams)
    else:
        after, report = setting.update(Certified(small(setting.agent, epochs=2)), hparams)
    kl = exact_kl(setting.agent, after.params, setting.batch, 1.0)
    assert (kl <= bound).all()
    assert report.metrics["train/bc_coef"] == coef


@pytest.mark.parametrize("second_order", [False, True])
def test_cloning_makes_what_was_shown_likelier(taught: Setting, second_order: bool):
    demos = taught.batch.demos
    assert demos is not None
    hparams = HyperParams(max_kl=0.02, bc_coef=10.0, learning_rate=3e-3)
    algorithm = Certified(small(taught.agent, epochs=4))
    after, report = (
        constrained(taught, hparams) if second_order else taught.update(algorithm, hparams)
    )
    before = mean_cloning_loss(taught.agent, taught.opt_state.params, demos, 1.0)
    now = mean_cloning_loss(taught.agent, after.params, demos, 1.0)
    assert now < before - 0.01
    metrics = report.metrics
    weighted = metrics["train/policy_loss_bc_weighted"]
    assert weighted == pytest.approx(10.0 * metrics["train/bc_loss"])
    own = metrics["train/policy_loss_ppo"]
    if second_order:  # without an entropy bonus both are the surrogate at ratio 1
        assert metrics["train/policy_loss"] == pytest.approx(own, abs=1e-6)
    assert metrics["train/bc_ppo_ratio"] == pytest.approx(abs(weighted) / (abs(own) + 1e-8))
    moved = demo_kl(taught.agent, taught.opt_state.params, after.params, demos, 1.0)
    assert metrics["train/kl_demos"] == pytest.approx(moved)
    assert moved > 0.0


@pytest.mark.slow
def test_inductor_takes_demonstrations_too(taught: Setting):
    """One compiled step equals the eager one."""
    hparams = HyperParams(bc_coef=2.0, max_kl=10.0)
    eager, _ = taught.update(Certified(small(taught.agent, epochs=1, minibatch=48)), hparams)
    by_inductor = small(taught.agent, epochs=1, minibatch=48, compiled=True)
    compiled, report = taught.update(Certified(by_inductor), hparams)
    torch.testing.assert_close(compiled.params, eager.params, rtol=1e-4, atol=1e-5)
    assert report.metrics["train/bc_loss"] > 0.0


def test_the_line_search_predicts_with_cloning(taught: Setting):
    """One objective for gradient and acceptance: a short step brings what the gradient says."""
    hparams = HyperParams(bc_coef=3.0)
    problem = Problem(taught.agent, taught.opt_state.params, taught.batch, hparams, Objective())
    gradient, _ = problem.gradient()
    pulled = pull(taught.agent, taught.opt_state.params, taught.batch, hparams)
    whole = gradient - 3.0 * pulled.cloning[: gradient.shape[0]].to(gradient)
    step = whole / whole.norm()
    gain, _ = problem.evaluate(problem.moved(step, 1e-2))
    assert gain == pytest.approx(1e-2 * (whole @ step).item(), rel=0.05)


KNOBS = HyperParams(bc_coef=1.0)


def outcome(**bc: float) -> Outcome:
    return Outcome(kl=0.01, return_mean=0.0, **bc)


def test_decay_ends_at_its_floor():
    rule = Decay("bc_coef", 0.5, 0.2)
    hparams = KNOBS
    seen = []
    for _ in range(4):
        _, hparams = rule(rule.init(), outcome(), hparams)
        seen.append(hparams.bc_coef)
    assert seen == [0.5, 0.25, 0.2, 0.2]


def test_the_note_s_rule_and_its_way_back():
    rule = LossBalance(1.0)
    _, hparams = rule({}, outcome(bc_loss_ratio=4.0), KNOBS)
    assert hparams.bc_coef == 0.25
    _, hparams = rule({}, outcome(bc_loss_ratio=1e6), hparams)
    assert hparams.bc_coef == 0.01
    _, hparams = rule({}, outcome(bc_loss_ratio=0.1), hparams)
    assert hparams.bc_coef == pytest.approx(0.1)
    _, hparams = rule({}, outcome(bc_loss_ratio=1e-9), hparams)
    assert hparams.bc_coef == 1.0
    assert rule({}, outcome(), hparams)[1] is hparams


def test_the_pull_of_an_update_is_limited_by_its_gradients():
    pulled = Pull(torch.zeros(3), policy_norm=2.0, cloning_norm=4.0, cosine=0.3)
    limit = Limit(10.0)
    assert limit(HyperParams(bc_coef=10.0), pulled).bc_coef == 0.5
    assert limit(HyperParams(bc_coef=1.0), pulled).bc_coef == pytest.approx(
        0.05
    )  # a tenth of the trust
    assert Limit(10.0, max_ratio=3.0)(HyperParams(bc_coef=10.0), pulled).bc_coef == 1.5
    assert Limit(10.0, floor=0.2)(HyperParams(bc_coef=1.0), pulled).bc_coef == 0.2
    silent = pulled._replace(cloning_norm=0.0)
    assert limit(HyperParams(bc_coef=10.0), silent).bc_coef == 10.0


@pytest.mark.parametrize("second_order", [False, True])
def test_a_limited_region_reports_what_it_did(taught: Setting, second_order: bool):
    hparams, limit = HyperParams(bc_coef=100.0, max_kl=0.02), Limit(100.0, max_ratio=0.5)
    if second_order:
        _, report = constrained(taught, hparams, limit)
    else:
        algorithm = Certified(small(taught.agent, epochs=2, limit=limit))
        _, report = taught.update(algorithm, hparams)
    assert report.metrics["train/bc_gradient_ratio"] == pytest.approx(0.5)
    assert report.metrics["train/bc_coef"] < 100.0


def test_lasting_conflict_costs_trust_and_peace_brings_it_back():
    rule = CloningTrust(1.0)
    state, hparams = rule.init(), KNOBS
    for _ in range(60):
        state, hparams = rule(state, outcome(bc_cosine=-0.3), hparams)
    assert hparams.bc_coef == 0.01
    for _ in range(200):
        state, hparams = rule(state, outcome(bc_cosine=0.3), hparams)
    assert hparams.bc_coef == 1.0
    assert rule(state, outcome(), hparams)[1] is hparams


NOISES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "coin": lambda g: 0.9 * (2.0 * torch.randint(2, (), generator=g) - 1.0),
    "uniform": lambda g: 1.8 * torch.rand((), generator=g) - 0.9,
    "normal": lambda g: (0.5 * torch.randn((), generator=g)).clamp(-1.0, 1.0),
}


@pytest.mark.parametrize("noise", NOISES)
def test_gradients_that_disagree_at_random_cost_no_trust(noise: str):
    """Without any signal the cosine is anywhere between −1 and 1: of 40 runs of 300 updates, nearly
    all keep nearly all of their trust nearly all of the time."""
    rule, least = CloningTrust(1.0), []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        state, hparams, coefs = rule.init(), KNOBS, []
        for _ in range(300):
            told = outcome(bc_cosine=NOISES[noise](generator).item())
            state, hparams = rule(state, told, hparams)
            coefs.append(hparams.bc_coef)
        least.append(sum(coefs) / len(coefs))
    assert sorted(least)[4] > 0.9
    assert min(least) > 0.5


def test_a_steady_conflict_is_seen_within_ten_updates():
    rule = CloningTrust(1.0)
    state, hparams = rule.init(), KNOBS
    for _ in range(10):
        state, hparams = rule(state, outcome(bc_cosine=-0.95), hparams)
    assert hparams.bc_coef < 0.5


def test_trust_by_hand():
    """After n updates with a cosine of −1 its mean is −m and its mean square m = 1 − 0.95ⁿ. That is
    conflict where m > 3·√(m·0.05/1.95), so for m > 9/39 = 0.231: of six updates (m = 0.265), not of
    five (0.226). One of +1 makes the mean −0.202 and the square 0.302; 3·√(0.302/39) = 0.264."""
    rule = CloningTrust(2.0)
    state, hparams = rule.init(), KNOBS
    coefs = []
    for cosine in (-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0):
        state, hparams = rule(state, outcome(bc_cosine=cosine), hparams)
        coefs.append(hparams.bc_coef)
    assert coefs == pytest.approx([2.0, 2.0, 2.0, 2.0, 2.0, 2.0 * 0.8, 2.0 * 0.8 * 1.05])


def test_a_nan_in_rows_that_do_not_count_reaches_no_gradient(taught: Setting):
    """A weight of 0 alone would let it through the backward pass, and the limit be off."""
    rows = taught.batch
    ignored = rows.weight == 0
    assert ignored.any()
    spoiled = rows.obs["obs"].clone()
    spoiled[ignored] = torch.nan
    clean = pull(taught.agent, taught.opt_state.params, rows, HyperParams())
    dirty = rows._replace(obs={"obs": spoiled})
    found = pull(taught.agent, taught.opt_state.params, dirty, HyperParams())
    assert found.policy_norm == pytest.approx(clean.policy_norm)
    assert found.cosine == pytest.approx(clean.cosine)


def test_a_limit_without_a_gradient_to_go_by_is_the_floor():
    pulled = Pull(torch.zeros(3), policy_norm=float("nan"), cloning_norm=4.0, cosine=float("nan"))
    assert Limit(10.0)(HyperParams(bc_coef=10.0), pulled).bc_coef == 0.01
