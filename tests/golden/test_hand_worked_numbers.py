"""Numbers that people worked out by hand, and where they slipped, the number that is right.

Every expected value is a sum that can be typed into a calculator; Keel stands on the other side
only. Natural logarithms give nats; a bit is log 2 = 0.693 nats.
"""

from __future__ import annotations

import math
from math import log

import pytest
import torch

from keel.controllers.controllers import Decay, Outcome
from keel.functional import categorical_kl, gaussian_kl, k1, kl_reward, policy_ratio, surrogate
from keel.types import HyperParams

BIT = log(2.0)

WEATHER = 0.8 * log(0.8 / 0.9) + 0.2 * log(0.2 / 0.1)
CODING = 0.7 * log(0.7 / 0.5) + 0.2 * log(0.2 / 0.3) + 0.1 * log(0.1 / 0.2)
STRATEGY_A = (
    0.4 * log(0.4 / 0.45) + 0.3 * log(0.3 / 0.35) + 0.2 * log(0.2 / 0.15) + 0.1 * log(0.1 / 0.05)
)
STRATEGY_B = (
    0.4 * log(0.4 / 0.8) + 0.3 * log(0.3 / 0.1) + 0.2 * log(0.2 / 0.05) + 0.1 * log(0.1 / 0.05)
)
GRADES_PQ = 0.1 * log(0.1 / 0.05) + 0.3 * log(0.3 / 0.25) + 0.4 * log(0.4 / 0.5)
GRADES_QP = 0.05 * log(0.05 / 0.1) + 0.25 * log(0.25 / 0.3) + 0.5 * log(0.5 / 0.4)


@pytest.mark.parametrize(
    ("p", "q", "derived", "quoted"),
    [
        pytest.param(
            (0.8, 0.2),
            (0.7, 0.3),
            0.8 * log(0.8 / 0.7) + 0.2 * log(0.2 / 0.3),
            "0.025732",
            id="coin",
        ),
        pytest.param(
            (0.6, 0.3, 0.1),
            (0.7, 0.2, 0.1),
            0.6 * log(0.6 / 0.7) + 0.3 * log(0.3 / 0.2),
            "0.029149",
            id="search",
        ),
        pytest.param(
            (1 / 6,) * 6,
            (0.1, 0.1, 0.1, 0.1, 0.1, 0.5),
            5 / 6 * log(1 / 6 / 0.1) + 1 / 6 * log(1 / 6 / 0.5),
            "0.2426",
            id="die",
        ),
        pytest.param(
            (0.3, 0.4, 0.3),
            (0.5, 0.3, 0.2),
            0.3 * log(0.3 / 0.5) + 0.4 * log(0.4 / 0.3) + 0.3 * log(0.3 / 0.2),
            "0.08346",
            id="tokens",
        ),
        pytest.param((0.4, 0.3, 0.2, 0.1), (0.45, 0.35, 0.15, 0.05), STRATEGY_A, "0.0335", id="A"),
        pytest.param((0.4, 0.3, 0.2, 0.1), (0.8, 0.1, 0.05, 0.05), STRATEGY_B, "0.3989", id="B"),
        pytest.param(
            (0.1, 0.3, 0.4, 0.2), (0.05, 0.25, 0.5, 0.2), GRADES_PQ, "0.03475", id="grades"
        ),
        pytest.param(
            (0.05, 0.25, 0.5, 0.2),
            (0.1, 0.3, 0.4, 0.2),
            GRADES_QP,
            "0.03133",
            id="grades, reversed",
        ),
    ],
)
def test_kl_in_nats(p: tuple[float, ...], q: tuple[float, ...], derived: float, quoted: str):
    check(kl(p, q), derived, quoted)


def test_coding_with_the_wrong_table_costs_bits():
    """Symbols (.7, .2, .1) coded as if they were (.5, .3, .2)."""
    check(kl((0.7, 0.2, 0.1), (0.5, 0.3, 0.2)) / BIT, CODING / BIT, "0.1228")


def test_a_forecast_is_never_better_than_the_truth():
    """Rain 20 %, forecast 10 %: not −0.064 bits, which has the sign of every term reversed."""
    check(kl((0.8, 0.2), (0.9, 0.1)) / BIT, WEATHER / BIT, "0.0641")


def test_strategy_a_breaks_a_trust_region_of_a_hundredth():
    assert kl((0.4, 0.3, 0.2, 0.1), (0.45, 0.35, 0.15, 0.05)) > 0.01


def test_a_lottery_ticket_carries_twenty_bits():
    """KL of the certainty of winning against a chance of 10⁻⁶ is −log 10⁻⁶."""
    check(kl((1.0, 0.0), (1e-6, 1.0 - 1e-6)) / BIT, 6.0 * log(10.0) / BIT, "19.9")


def test_a_doubled_probability_is_clipped():
    """0.3 → 0.6 with A = 1 and ε = 0.2: max(−2·1, −1.2·1)."""
    ratio = policy_ratio(torch.tensor([0.6]).log(), torch.tensor([0.3]).log()).ratio
    assert ratio.item() == pytest.approx(2.0)
    loss = surrogate.clip(ratio, torch.ones(1), 0.2).loss
    assert loss.item() == pytest.approx(-1.2)


def test_a_doubled_probability_is_penalised():
    """1 − β·log(0.6/0.3) with β = 0.1; the penalty is 0.693 nats."""
    new, reference = torch.tensor(0.6).double().log(), torch.tensor(0.3).double().log()
    check(k1(new, reference).item(), log(2.0), "0.693")
    check(1.0 - 0.1 * kl_reward("k1", new, reference).item(), 1.0 - 0.1 * log(2.0), "0.931")


def test_equal_gaussians_are_at_zero_without_an_epsilon():
    """12 actions at σ = 0.03, where ε = 10⁻⁵ in the logarithm and beside σ² makes it negative."""
    mean, log_std = torch.zeros(12), torch.full((12,), 0.03).log()
    with_epsilon = 12 * (log(1.0 + 1e-5) + 0.03**2 / (2.0 * (0.03**2 + 1e-5)) - 0.5)
    assert f"{with_epsilon:.3f}" == "-0.066"
    assert gaussian_kl(mean, log_std, mean, log_std).item() == 0.0


def test_the_largest_ratio():
    """A log-ratio of 100 is clamped to 10."""
    log_prob = torch.tensor([100.0], dtype=torch.float64)
    ratio = policy_ratio(log_prob, torch.zeros_like(log_prob)).ratio.item()
    assert ratio == pytest.approx(math.exp(10.0))
    assert int(ratio) == 22_026


def test_an_entropy_bonus_that_hardly_decays():
    """0.05·0.9995ⁿ has fallen by a seventh after 305 updates, and needs 3,219 to reach 0.01."""
    decay, outcome = Decay("entropy_coef", 0.9995, floor=0.01), Outcome(kl=0.0, return_mean=0.0)
    hparams = HyperParams(entropy_coef=0.05)
    trace = [hparams.entropy_coef]
    while hparams.entropy_coef > 0.01:
        _, hparams = decay({}, outcome, hparams)
        trace.append(hparams.entropy_coef)
    check(trace[305], 0.05 * math.exp(305 * log(0.9995)), "0.0429")
    assert len(trace) - 1 == math.ceil(log(0.2) / log(0.9995)) == 3219
    assert trace[-1] == 0.01


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    p_logits, q_logits = (torch.tensor(x, dtype=torch.float64).log() for x in (p, q))
    return categorical_kl(p_logits, q_logits).item()


def check(measured: float, derived: float, quoted: str) -> None:
    """Keel's number is the derived one, and that is the quoted one in all its digits."""
    decimals = len(quoted.split(".")[1])
    assert measured == pytest.approx(derived, rel=1e-9)
    assert f"{derived:.{decimals}f}" == quoted
