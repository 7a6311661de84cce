"""The promise: after every update of every shape the exact KL is inside the bound."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.distributions.actions import Categorical, Gaussian
from keel.errors import KeelError
from keel.experience.batch import Batch, Sampled
from keel.losses.ppo import Objective
from keel.trust_region.certify import Certified
from keel.trust_region.gate import (
    GATE,
    ConsistencyError,
    NumericError,
    _slack,
    check_replay,
    replay_gap,
)
from keel.trust_region.measure import exact_kl
from keel.types import HyperParams

from .conftest import SHAPES, Setting, build, small


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(1e-5, 3.0),
    st.floats(1e-4, 0.2),
    st.integers(0, 1000),
)
def test_the_exact_kl_never_exceeds_the_bound(
    shape: str, rate: float, bound: float, seed: int
) -> None:
    """Whatever the learning rate: measured again, independently, per group."""
    setting = SHAPES[shape]()
    hparams = HyperParams(learning_rate=rate, max_kl=bound)
    after, report = setting.update(Certified(small(setting.agent)), hparams, seed=seed)
    kl = exact_kl(setting.agent, after.params, setting.batch, 1.0)
    assert (kl <= bound).all()
    torch.testing.assert_close(kl, report.kl_exact, rtol=0, atol=0)
    assert (report.kl_exact <= report.kl_requested).all()
    assert torch.isfinite(after.params).all()


def test_a_calm_update_is_left_alone(setting: Setting) -> None:
    hparams = HyperParams(learning_rate=1e-3, max_kl=0.5)
    plain, _ = setting.update(small(setting.agent), hparams)
    certified, report = setting.update(Certified(small(setting.agent)), hparams)
    assert report.verdict == "accepted"
    assert torch.equal(plain.params, certified.params)


def test_a_wild_update_is_walked_back_and_says_so(setting: Setting) -> None:
    _, report = setting.update(
        Certified(small(setting.agent)), HyperParams(learning_rate=0.3, max_kl=0.001)
    )
    assert report.verdict == "walked_back"
    assert "above max_kl" in report.reason
    assert (report.alpha > 0).all()
    assert (report.alpha < 1).any()
    assert report.metrics["train/walk_back"] == 1.0
    assert report.kl_requested.max() > 0.001


def test_without_enforcement_the_kl_is_reported_and_stands(steps: Setting) -> None:
    hparams = HyperParams(learning_rate=0.3, max_kl=0.001)
    _, report = steps.update(Certified(small(steps.agent), enforce=False), hparams)
    assert report.kl_exact.item() > 0.001
    assert report.verdict == "accepted"


def test_the_critic_keeps_its_step_when_the_policy_is_walked_back(steps: Setting) -> None:
    hparams = HyperParams(learning_rate=0.3, max_kl=0.001)
    plain, _ = steps.update(small(steps.agent), hparams)
    certified, _ = steps.update(Certified(small(steps.agent)), hparams)
    critic = ~steps.agent.policy_columns
    assert torch.equal(plain.params[:, critic], certified.params[:, critic])
    assert not torch.equal(plain.params[:, ~critic], certified.params[:, ~critic])


def test_a_step_that_cannot_be_kept_is_undone_bit_for_bit(
    steps: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KL that is infinite at any step length: parameters, moments and step count are the old."""
    real = exact_kl

    def hopeless(agent: object, params: torch.Tensor, *rest: object) -> torch.Tensor:
        same = torch.equal(params, steps.opt_state.params)
        return real(agent, params, *rest) if same else torch.tensor([torch.inf]).double()

    monkeypatch.setattr("keel.trust_region.measure.exact_kl", hopeless)
    after, report = steps.update(
        Certified(small(steps.agent)), HyperParams(learning_rate=0.3, max_kl=1e-6)
    )
    policy = steps.agent.policy_columns
    for old, new in zip(steps.opt_state[:3], after[:3], strict=True):
        assert torch.equal(old[:, policy], new[:, policy])
    assert torch.equal(after.steps[:, 0], steps.opt_state.steps[:, 0])
    assert report.verdict == "rejected"
    assert report.kl_exact.item() == 0.0
    assert torch.isnan(torch.tensor(report.metrics["train/kl_step"]))


def test_agents_are_certified_on_their_own(agents: Setting) -> None:
    """Only the second agent has advantages worth a step: only its step is walked back."""
    setting = agents.of(
        advantage=agents.batch.advantage * torch.tensor([1e-9, 1.0, 1e-9]),
        target=torch.zeros_like(agents.batch.target),
    )
    objective = Objective(value_coef=0.0)
    region = Certified(small(agents.agent, objective=objective, max_grad_norm=1e9))
    _, report = setting.update(region, HyperParams(learning_rate=0.02, max_kl=0.01))
    assert report.alpha[1] < 1.0
    assert report.kl_requested[1] > report.kl_requested[0]


def _swap_logits(setting: Setting) -> Setting:
    behavior = {"logits": setting.batch.behavior["logits"].flip(-1)}
    log_prob = setting.agent.dist.log_prob(behavior, setting.batch.action)
    return setting.of(behavior=behavior, log_prob=log_prob)


def _epsilon_greedy(setting: Setting) -> Setting:
    p = setting.batch.log_prob.exp()
    return setting.of(log_prob=(0.9 * p + 0.1 / 3).log())


def _other_temperature(setting: Setting) -> Setting:
    behavior = setting.agent.dist.params(setting.batch.behavior["logits"], None, 1.5)
    log_prob = setting.agent.dist.log_prob(behavior, setting.batch.action)
    return setting.of(behavior=behavior, log_prob=log_prob)


def _renormalized(setting: Setting) -> Setting:
    return setting.of(obs={"obs": 1.1 * setting.batch.obs["obs"]})


def _log_probs_at(setting: Setting, temperature: float) -> Setting:
    """Sampled and stored at 1; the log-probs are those of another temperature."""
    with torch.no_grad():
        policy = setting.agent.policy(setting.opt_state.params, setting.batch.obs, temperature)
    log_prob = setting.agent.dist.log_prob(policy, setting.batch.action)
    return setting.of(log_prob=log_prob)


def _drawn_at(setting: Setting, temperature: float) -> Setting:
    with torch.no_grad():
        behavior = setting.agent.policy(setting.opt_state.params, setting.batch.obs, temperature)
    log_prob = setting.agent.dist.log_prob(behavior, setting.batch.action)
    return setting.of(behavior=behavior, log_prob=log_prob)


def _strayed(setting: Setting) -> Setting:
    """Every fifth action is another one than its log-prob belongs to."""
    action = setting.batch.action.clone()
    action[::5] = (action[::5] + 1) % 3
    return setting.of(action=action)


def _stored_another(setting: Setting) -> Setting:
    """The log-probs are right, the distributions belong to other parameters."""
    with torch.no_grad():
        behavior = setting.agent.policy(1.5 * setting.opt_state.params, setting.batch.obs)
    return setting.of(behavior=behavior)


FAULTS: dict[str, tuple[Callable[[Setting], Setting], str]] = {
    "ε-greedy, actions": (_strayed, "Cause: epsilon_greedy: .* the log-prob is another action's"),
    "ε-greedy, mixture": (
        _epsilon_greedy,
        "Cause: epsilon_greedy: .* a mixture with 0.1 of uniformly random actions",
    ),
    "log-probs at 0.5": (
        lambda setting: _log_probs_at(setting, 0.5),
        "Cause: temperature: the log-probs are of a temperature of 0.5, .* drawn at 1",
    ),
    "log-probs at 3": (
        lambda setting: _log_probs_at(setting, 3.0),
        "Cause: temperature: the log-probs are of a temperature of 3, .* drawn at 1",
    ),
    "drawn at 1.5": (
        lambda setting: _drawn_at(setting, 1.5),
        r"Cause: temperature: the actions were drawn at 1\.5, the update replays them at 1\.",
    ),
    "stored distribution": (_stored_another, "Cause: stored_distribution: .* log-probs are those"),
    "normalized again": (_renormalized, "Cause: unknown.* normalized again"),
    "another network": (_swap_logits, "Cause: unknown.* another network"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_gate_names_what_it_stops(name: str, steps: Setting) -> None:
    fault, said = FAULTS[name]
    with pytest.raises(ConsistencyError, match=rf"consistency gate: .* before any step.*{said}"):
        fault(steps).update(Certified(small(steps.agent)), HyperParams())


CONTINUOUS = ("log-probs at 0.5", "log-probs at 3", "drawn at 1.5", "stored distribution")


@pytest.mark.parametrize("name", [*CONTINUOUS, "normalized again"])
def test_the_gate_names_what_it_stops_of_gaussians(name: str) -> None:
    (fault, said), setting = FAULTS[name], SHAPES["continuous"]()
    with pytest.raises(ConsistencyError, match=said):
        fault(setting).update(Certified(small(setting.agent)), HyperParams())


@pytest.mark.parametrize("row", [3, 50, 90])
def test_the_gate_sees_a_single_wrong_row_wherever_it_is(row: int, steps: Setting) -> None:
    """96 rows in minibatches of 40: the first minibatch does not have them all."""
    weight = torch.ones_like(steps.batch.weight)
    log_prob = steps.batch.log_prob.clone()
    log_prob[row] -= 0.01
    wrong = steps.of(weight=weight, log_prob=log_prob)
    for seed in range(3):
        with pytest.raises(ConsistencyError, match=r"on 1\.04% of the rows"):
            wrong.update(Certified(small(steps.agent)), HyperParams(), seed=seed)


def test_all_rows_are_replayed_at_first_now_and_then_and_where_something_is_odd(
    steps: Setting,
) -> None:
    def looked(number: int, hparams: HyperParams, given: Setting = steps) -> float:
        region = Certified(small(given.agent), gate=False)
        _, report = given.update(region, hparams, number=number)
        return report.metrics["train/gate_all_rows"]

    calm = HyperParams(learning_rate=1e-4)
    assert [looked(number, calm) for number in (0, 9, 10, 11, 19, 20)] == [1, 1, 1, 0, 0, 1]
    assert looked(11, HyperParams(learning_rate=3.0, max_kl=1e-4)) == 1  # a KL out of proportion
    wrong = steps.of(log_prob=steps.batch.log_prob - 0.01)
    assert looked(11, calm, wrong) == 1  # the first pass sees it


def test_the_gate_can_be_opened_and_is_quiet_on_a_true_replay(setting: Setting) -> None:
    _, report = setting.update(Certified(small(setting.agent)), HyperParams(learning_rate=1e-4))
    assert report.metrics["train/gate_log_ratio"] < 1e-5
    swapped = _swap_logits(build((96,)))
    _, report = swapped.update(Certified(small(swapped.agent), gate=False), HyperParams())
    assert report.metrics["train/gate_log_ratio"] > 1e-3


def test_a_log_prob_may_differ_by_rounding_and_a_row_that_does_not_count_in_any_way(
    steps: Setting,
) -> None:
    """Half of what is allowed everywhere; and one row, of weight 0, was drawn by another policy."""
    rows = steps.batch
    behavior = {"logits": rows.behavior["logits"].clone()}
    behavior["logits"][3] = torch.tensor([9.0, 0.0, 0.0])
    weight = rows.weight.clone()
    weight[3] = 0.0
    rows = rows._replace(log_prob=rows.log_prob - GATE / 2, behavior=behavior, weight=weight)
    gap = check_replay(steps.agent, steps.opt_state.params, rows, 1.0, enforce=True)
    assert gap == pytest.approx(GATE / 2, rel=0.01)


@pytest.mark.parametrize(("gap", "refused"), [(GATE, False), (1.01 * GATE, True)])
def test_a_log_prob_may_differ_by_exactly_what_is_allowed(gap: float, refused: bool) -> None:
    """The only legal action has a log-prob of 0."""
    logits = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    agent: Any = SimpleNamespace(
        workers=1, groups=1, dist=Categorical(2), policy=lambda *_: {"logits": logits}
    )
    stored = torch.tensor([0.0, -gap])
    action = torch.zeros(2, dtype=torch.int64)
    rows = Batch({}, {"logits": logits}, action, stored, torch.ones(2), None)
    if refused:
        with pytest.raises(ConsistencyError):
            check_replay(agent, torch.zeros(1, 1), rows, 1.0, enforce=True)
    else:
        assert check_replay(agent, torch.zeros(1, 1), rows, 1.0, enforce=True) > 0.0


@pytest.mark.parametrize(("shift", "refused"), [(1e-4, False), (2e-4, True)])
def test_the_kl_of_a_narrow_gaussian_may_differ_by_the_square_of_its_rounding(
    shift: float, refused: bool
) -> None:
    """σ = 1e-3 is allowed ten times the log-ratio, and a hundred times the KL: 1e-4·100 = 0.01.
    Means that are 1e-4 apart have a KL of ½·0.1² = 0.005, and 2e-4 one of 0.02; half-way between
    them both give an action the same log-prob."""
    log_std = torch.tensor([[1e-3]]).log()
    now = {"mean": torch.zeros(1, 1), "log_std": log_std}
    sampled = {"mean": torch.full((1, 1), shift), "log_std": log_std}
    dist = Gaussian(1)
    agent: Any = SimpleNamespace(workers=1, groups=1, dist=dist, policy=lambda *_: now)
    action = torch.full((1, 1), shift / 2)
    rows = Batch({}, sampled, action, dist.log_prob(sampled, action), torch.ones(1), None)
    if refused:
        with pytest.raises(ConsistencyError):
            check_replay(agent, torch.zeros(1, 1), rows, 1.0, enforce=True)
    else:
        assert check_replay(agent, torch.zeros(1, 1), rows, 1.0, enforce=True) < 1e-3


def test_a_policy_that_gives_nan_is_no_other_policy(steps: Setting) -> None:
    params = torch.full_like(steps.opt_state.params, torch.nan)
    message = r"the policy's output is not finite \(steps skipped, none applied: 0\)"
    with pytest.raises(NumericError, match=message):
        check_replay(steps.agent, params, steps.batch, 1.0, enforce=True)


def test_the_gap_of_a_minibatch_is_that_of_the_rows_that_count(steps: Setting) -> None:
    rows, weight = steps.batch, steps.batch.weight.clone()
    log_prob = rows.log_prob.clone()
    log_prob[0], log_prob[1], weight[1] = log_prob[0] + 0.25, 9.0, 0.0
    batch = rows._replace(log_prob=log_prob, weight=weight)
    gap = replay_gap(steps.agent, steps.opt_state.params, batch, 1.0)
    assert gap == pytest.approx(0.25, rel=1e-4)


def test_what_a_narrow_gaussian_is_allowed_by_hand() -> None:
    """0.01·(1 + |μ|)/σ of the narrowest dimension of every row and agent, and at least 1."""
    std = torch.tensor([[[1e-3, 2e-3], [0.1, 0.1]], [[1e-2, 5e-3], [1.0, 1e-4]]])
    mean = torch.tensor([[[0.0, -3.0], [0.0, 5.0]], [[0.0, 0.0], [9.0, 0.0]]])
    slack = _slack({"mean": mean, "log_std": std.log()})
    assert isinstance(slack, torch.Tensor)
    torch.testing.assert_close(slack, torch.tensor([[20.0, 1.0], [2.0, 100.0]]))


def test_a_narrow_gaussian_is_allowed_the_rounding_of_its_mean() -> None:
    """A mean that is off by 1e-6 at σ = 1e-3 gives log-ratios of 1e-3; one off by 1e-3, of 1."""
    setting = build((96,), dist=Gaussian(2))
    params = setting.opt_state.params.clone()
    params[:, setting.agent.layout.slice_of("head.log_std")] = -7.0
    behavior = setting.agent.policy(params, setting.batch.obs)
    noise = torch.randn(behavior["mean"].shape, generator=torch.Generator().manual_seed(0))
    for shift, refused in ((1e-6, False), (1e-3, True)):
        action = behavior["mean"] + behavior["log_std"].exp() * noise
        sampled = {**behavior, "mean": behavior["mean"] + shift}
        rows = setting.batch._replace(
            behavior=sampled,
            action=action,
            log_prob=setting.agent.dist.log_prob(sampled, action),
        )
        given = setting.agent, params, rows, 1.0
        if refused:
            with pytest.raises(ConsistencyError):
                check_replay(*given, enforce=True)
        else:
            assert check_replay(*given, enforce=True) > 1e-3


def test_the_bound_is_from_what_sampled_to_what_acts_next(steps: Setting) -> None:
    """Sampled at temperature 1.1 on other statistics; the update's policy acts at 1 on these."""
    sampled = Sampled({"obs": 1.05 * steps.batch.obs["obs"]}, 1.1)
    with torch.no_grad():
        behavior = steps.agent.policy(steps.opt_state.params, sampled.obs, sampled.temperature)
    setting = steps.of(
        behavior=behavior,
        log_prob=steps.agent.dist.log_prob(behavior, steps.batch.action),
        sampled=sampled,
    )
    rows = setting.batch
    for rate in (1e-4, 0.05):
        after, report = setting.update(
            Certified(small(setting.agent)), HyperParams(learning_rate=rate, max_kl=0.01)
        )
        with torch.no_grad():
            now = steps.agent.policy(after.params, rows.obs, 1.0)
            cold = steps.agent.policy(steps.opt_state.params, sampled.obs, 1.0)
        kls = [steps.agent.dist.kl(old, now).double() for old in (behavior, cold)]
        means = [((kl * rows.weight).sum() / rows.weight.sum()).item() for kl in kls]
        assert max(means) <= 0.01
        assert report.kl_exact.item() == pytest.approx(max(means), rel=1e-6)
        assert report.metrics["train/gate_log_ratio"] < 1e-5
    assert report.verdict == "walked_back"


def test_certification_refuses_an_estimate() -> None:
    setting = build((96,))
    setting.agent.dist = Categorical(3, exact=False)
    with pytest.raises(KeelError, match="Categorical has no closed-form KL"):
        Certified(small(setting.agent)).init()
