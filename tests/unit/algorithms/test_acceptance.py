"""A deliberate bug: a step aimed with the entropy bonus and accepted without it.

One state, two actions, π = (p, 1 − p) with p = 0.9; nine rows took the first action with advantage
0.1, one the second with −0.9. The mean of ratio·A is then

    S(p) = (9·(p / 0.9)·0.1 − (1 − p) / 0.1·0.9) / 10 = p − 0.9,

which falls with p, while H(p) rises: dH/dp at 0.9 is ln(0.1 / 0.9) = −2.197. So p + c·H(p) rises
as p falls where c > 1 / 2.197 = 0.455.
"""

from __future__ import annotations

import math

import pytest
import torch

from keel.algorithms.optimizer import initial_opt_state
from keel.algorithms.trpo import TRPO, Problem
from keel.config import Config, from_dict
from keel.distributions.actions import Categorical
from keel.errors import InputError
from keel.experience.batch import Batch
from keel.experiments.fault_injection import EntropyOutsideAcceptance, faulty_algorithm
from keel.losses.ppo import Objective
from keel.training.builder import build_algorithm
from keel.trust_region.certify import Certified
from keel.types import HyperParams

from .conftest import FEATURES, Setting, build, natural
from .test_trpo import update

ABOVE, BELOW = 1.0, 0.4
"""Entropy coefficients at which the step lowers p, and raises it."""
RIGHT = {"accept_ratio": 0.0}
FAULTY = {**RIGHT, "problem": EntropyOutsideAcceptance}


@pytest.fixture
def bandit() -> Setting:
    agent = build((10,), dist=Categorical(2)).agent
    params = torch.zeros_like(agent.initial)
    start = agent.critic_from
    params[0, start - 2 : start] = torch.tensor([math.log(9.0), 0.0])  # the last layer's bias
    obs = {"obs": torch.zeros(10, FEATURES)}
    with torch.no_grad():
        behavior = agent.policy(params, obs)
    action = torch.tensor([0] * 9 + [1])
    log_prob = agent.dist.log_prob(behavior, action)
    batch = Batch(
        *(obs, behavior, action, log_prob, torch.ones(10)),
        advantage=torch.tensor([0.1] * 9 + [-0.9]),
        target=torch.ones(10),
        old_value=torch.zeros(10, 1),
    )
    return Setting(agent, batch, initial_opt_state(params))


def first_probability(setting: Setting, params: torch.Tensor) -> float:
    policy = setting.agent.policy(params, setting.batch.obs)
    return policy["logits"].double().softmax(-1)[0, 0].item()


def entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_a_step_that_pays_in_entropy_is_accepted(bandit: Setting) -> None:
    after, report = update(bandit, HyperParams(max_kl=0.01, entropy_coef=ABOVE), **RIGHT)
    p = first_probability(bandit, after.params)
    assert report.verdict == "accepted"
    assert p < 0.9
    gain = (p - 0.9) + ABOVE * (entropy(p) - entropy(0.9))
    assert gain > 0.0 > p - 0.9
    assert report.metrics["train/improvement"] == pytest.approx(gain, abs=1e-6)


def test_the_fault_rejects_it_and_leaves_the_policy_bit_for_bit(bandit: Setting) -> None:
    after, report = update(bandit, HyperParams(max_kl=0.01, entropy_coef=ABOVE), **FAULTY)
    start = bandit.agent.critic_from
    assert report.verdict == "rejected"
    assert report.reason == "too_little_improvement"
    assert torch.equal(after.params[:, :start], bandit.opt_state.params[:, :start])
    assert report.kl_exact.item() == 0.0
    assert math.isnan(report.metrics["train/kl_step"])
    assert report.metrics["train/line_search_iters"] == TRPO.backtrack_iters


@pytest.mark.parametrize("coef", [0.0, BELOW])
def test_the_fault_takes_the_same_step_where_the_surrogate_rises(
    bandit: Setting, coef: float
) -> None:
    hparams = HyperParams(max_kl=0.01, entropy_coef=coef)
    right, _ = update(bandit, hparams, **RIGHT)
    wrong, report = update(bandit, hparams, **FAULTY)
    assert first_probability(bandit, right.params) > 0.9
    assert torch.equal(right.params, wrong.params)
    assert report.kl_exact.item() <= 0.01  # the certificate is not part of the fault


def test_only_the_acceptance_loses_the_entropy(bandit: Setting) -> None:
    """The gradient is the same; what is measured is p − 0.9, with or without the entropy."""
    hparams = HyperParams(entropy_coef=ABOVE)
    objective = Objective(entropy_floor=10.0)
    common = bandit.agent, bandit.opt_state.params, bandit.batch, hparams
    right = Problem(*common, Objective())
    wrong = EntropyOutsideAcceptance(*common, Objective())
    floored = EntropyOutsideAcceptance(*common, objective)
    gradient, _ = right.gradient()
    assert torch.equal(gradient, wrong.gradient()[0])
    floored.gradient()
    moved = right.moved(gradient, 0.5)
    p = first_probability(bandit, moved)
    assert wrong.evaluate(moved)[0] == pytest.approx(p - 0.9, abs=1e-6)
    assert floored.evaluate(moved)[0] == pytest.approx(p - 0.9, abs=1e-6)
    full = (p - 0.9) + ABOVE * (entropy(p) - entropy(0.9))
    assert right.evaluate(moved)[0] == pytest.approx(full, abs=1e-6)
    assert right.evaluate(moved)[1] == wrong.evaluate(moved)[1]


def test_the_fault_is_off_unless_it_is_asked_for(bandit: Setting) -> None:
    name, step = "entropy_outside_acceptance", natural(bandit.agent).step
    for config, problem in (
        (Config(algo="trpo"), Problem),
        (from_dict({"algo": "trpo", "faults": {name: True}}), EntropyOutsideAcceptance),
    ):
        built = build_algorithm(config, bandit.agent, step)
        certified = faulty_algorithm(built, config.faults)
        assert isinstance(certified, Certified)
        assert isinstance(certified.algorithm, TRPO)
        assert certified.algorithm.problem is problem
    with pytest.raises(InputError, match=f"faults.{name}: is a fault of TRPO"):
        from_dict({"algo": "ppo", "faults": {name: True}})
