"""The promise: after every update of every shape the exact KL is inside the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.errors import KeelError
from keel.models.distributions import Categorical, Gaussian
from keel.regions.certify import Certified
from keel.regions.gate import ConsistencyError, check_replay
from keel.regions.measure import exact_kl
from keel.regions.objective import Objective
from keel.regions.proximal import Proximal
from keel.rollout.batch import Sampled
from keel.types import Knobs

from .conftest import SHAPES, SMALL, Setting, build


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
    knobs = Knobs(learning_rate=rate, max_kl=bound)
    after, report = setting.update(Certified(SMALL), knobs, seed=seed)
    kl = exact_kl(setting.agent, after.params, setting.rows, 1.0)
    assert (kl <= bound).all()
    torch.testing.assert_close(kl, report.kl_exact, rtol=0, atol=0)
    assert (report.kl_exact <= report.kl_requested).all()
    assert torch.isfinite(after.params).all()


def test_a_calm_update_is_left_alone(setting: Setting) -> None:
    knobs = Knobs(learning_rate=1e-3, max_kl=0.5)
    plain, _ = setting.update(SMALL, knobs)
    certified, report = setting.update(Certified(SMALL), knobs)
    assert report.verdict == "accepted"
    assert torch.equal(plain.params, certified.params)


def test_a_wild_update_is_walked_back_and_says_so(setting: Setting) -> None:
    _, report = setting.update(Certified(SMALL), Knobs(learning_rate=0.3, max_kl=0.001))
    assert report.verdict == "walked_back"
    assert "above max_kl" in report.reason
    assert (report.alpha > 0).all()
    assert (report.alpha < 1).any()
    assert report.metrics["train/walk_back"] == 1.0
    assert report.kl_requested.max() > 0.001


def test_without_enforcement_the_kl_is_reported_and_stands(steps: Setting) -> None:
    knobs = Knobs(learning_rate=0.3, max_kl=0.001)
    _, report = steps.update(Certified(SMALL, enforce=False), knobs)
    assert report.kl_exact.item() > 0.001
    assert report.verdict == "accepted"


def test_the_critic_keeps_its_step_when_the_policy_is_walked_back(steps: Setting) -> None:
    knobs = Knobs(learning_rate=0.3, max_kl=0.001)
    plain, _ = steps.update(SMALL, knobs)
    certified, _ = steps.update(Certified(SMALL), knobs)
    critic = ~steps.agent.policy_columns
    assert torch.equal(plain.params[:, critic], certified.params[:, critic])
    assert not torch.equal(plain.params[:, ~critic], certified.params[:, ~critic])


def test_a_step_that_cannot_be_kept_is_undone_bit_for_bit(
    steps: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KL that is infinite at any step length: parameters, moments and step count are the old."""
    real = exact_kl

    def hopeless(agent: object, params: torch.Tensor, *rest: object) -> torch.Tensor:
        same = torch.equal(params, steps.optimum.params)
        return real(agent, params, *rest) if same else torch.tensor([torch.inf]).double()

    monkeypatch.setattr("keel.regions.measure.exact_kl", hopeless)
    after, report = steps.update(Certified(SMALL), Knobs(learning_rate=0.3, max_kl=1e-6))
    policy = steps.agent.policy_columns
    for old, new in zip(steps.optimum[:3], after[:3], strict=True):
        assert torch.equal(old[:, policy], new[:, policy])
    assert torch.equal(after.steps[:, 0], steps.optimum.steps[:, 0])
    assert report.verdict == "rejected"
    assert report.kl_exact.item() == 0.0
    assert torch.isnan(torch.tensor(report.metrics["train/kl_step"]))


def test_agents_are_certified_on_their_own(agents: Setting) -> None:
    """Only the second agent has advantages worth a step: only its step is walked back."""
    learned = agents.targets(agents.optimum.params)
    loud = learned.advantage * torch.tensor([1e-9, 1.0, 1e-9])
    quiet = learned._replace(advantage=loud, target=torch.zeros_like(learned.target))
    setting = replace(agents, targets=lambda _: quiet)
    region = Certified(replace(SMALL, objective=Objective(value_coef=0.0), max_grad_norm=1e9))
    _, report = setting.update(region, Knobs(learning_rate=0.02, max_kl=0.01))
    assert report.alpha[1] < 1.0
    assert report.kl_requested[1] > report.kl_requested[0]


def _swap_logits(setting: Setting) -> Setting:
    behaviour = {"logits": setting.rows.behaviour["logits"].flip(-1)}
    log_prob = setting.agent.dist.log_prob(behaviour, setting.rows.action)
    return replace(setting, rows=replace(setting.rows, behaviour=behaviour, log_prob=log_prob))


def _epsilon_greedy(setting: Setting) -> Setting:
    p = setting.rows.log_prob.exp()
    return replace(setting, rows=replace(setting.rows, log_prob=(0.9 * p + 0.1 / 3).log()))


def _other_temperature(setting: Setting) -> Setting:
    behaviour = setting.agent.dist.params(setting.rows.behaviour["logits"], None, 1.5)
    log_prob = setting.agent.dist.log_prob(behaviour, setting.rows.action)
    return replace(setting, rows=replace(setting.rows, behaviour=behaviour, log_prob=log_prob))


def _renormalised(setting: Setting) -> Setting:
    return replace(setting, rows=replace(setting.rows, obs={"obs": 1.1 * setting.rows.obs["obs"]}))


@pytest.mark.parametrize(
    "fault", [_swap_logits, _epsilon_greedy, _other_temperature, _renormalised]
)
def test_the_gate_stops_a_replay_that_differs_from_its_sampling(
    fault: object, steps: Setting
) -> None:
    assert callable(fault)
    with pytest.raises(ConsistencyError, match=r"consistency gate: .* before any step"):
        fault(steps).update(Certified(SMALL), Knobs())


def test_the_gate_can_be_opened_and_is_quiet_on_a_true_replay(setting: Setting) -> None:
    _, report = setting.update(Certified(SMALL), Knobs(learning_rate=1e-4))
    assert report.metrics["train/gate_log_ratio"] < 1e-5
    _, report = _swap_logits(build((96,))).update(Certified(SMALL, gate=False), Knobs())
    assert report.metrics["train/gate_log_ratio"] > 1e-3


def test_a_narrow_gaussian_is_allowed_the_rounding_of_its_mean() -> None:
    """A mean that is off by 1e-6 at σ = 1e-3 gives log-ratios of 1e-3; one off by 1e-3, of 1."""
    setting = build((96,), dist=Gaussian(2))
    params = setting.optimum.params.clone()
    params[:, setting.agent.layout.slice_of("head.log_std")] = -7.0
    behaviour = setting.agent.policy(params, setting.rows.obs)
    noise = torch.randn(behaviour["mean"].shape, generator=torch.Generator().manual_seed(0))
    for shift, refused in ((1e-6, False), (1e-3, True)):
        action = behaviour["mean"] + behaviour["log_std"].exp() * noise
        sampled = {**behaviour, "mean": behaviour["mean"] + shift}
        rows = replace(
            setting.rows,
            behaviour=sampled,
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
    sampled = Sampled({"obs": 1.05 * steps.rows.obs["obs"]}, 1.1)
    with torch.no_grad():
        behaviour = steps.agent.policy(steps.optimum.params, sampled.obs, sampled.temperature)
    rows = replace(
        steps.rows,
        behaviour=behaviour,
        log_prob=steps.agent.dist.log_prob(behaviour, steps.rows.action),
        sampled=sampled,
    )
    setting = replace(steps, rows=rows)
    for rate in (1e-4, 0.05):
        after, report = setting.update(Certified(SMALL), Knobs(learning_rate=rate, max_kl=0.01))
        with torch.no_grad():
            now = steps.agent.policy(after.params, rows.obs, 1.0)
            cold = steps.agent.policy(steps.optimum.params, sampled.obs, 1.0)
        kls = [steps.agent.dist.kl(old, now).double() for old in (behaviour, cold)]
        means = [((kl * rows.weight).sum() / rows.weight.sum()).item() for kl in kls]
        assert max(means) <= 0.01
        assert report.kl_exact.item() == pytest.approx(max(means), rel=1e-6)
        assert report.metrics["train/gate_log_ratio"] < 1e-5
    assert report.verdict == "walked_back"


def test_certification_refuses_an_estimate() -> None:
    setting = build((96,))
    setting.agent.dist = Categorical(3, exact=False)
    with pytest.raises(KeelError, match="Categorical has no closed-form KL"):
        Certified(Proximal()).init(setting.agent)
