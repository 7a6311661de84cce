"""How long a natural step is: the quadratic model's length, and landing on the exact KL."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from keel.algorithms.critic import CriticFit
from keel.algorithms.trpo import KL_BAND, rescale_to_kl
from keel.trust_region.certify import Certified
from keel.types import HyperParams

from .conftest import build, natural

BOUND = 0.02


@pytest.mark.parametrize("damping", [0.01, 0.1, 1.0])
def test_the_step_of_the_quadratic_model(damping: float) -> None:
    """½·Δᵀ(F + λ)Δ is the bound; for a short step ½·ΔᵀFΔ is the exact KL."""
    setting = build((96,))
    bound = 1e-5
    hparams = HyperParams(max_kl=bound, damping=damping)
    algorithm = natural(
        setting.agent, critic=CriticFit(epochs=1, minibatch=96), rescale_to_kl=False, cg_iters=100
    )
    after, report = setting.update(Certified(algorithm), hparams)
    assert report.metrics["train/step_fraction"] == 1.0
    moved = (after.params - setting.opt_state.params)[0, : setting.agent.critic_from].double()
    model = report.kl_exact.item() + 0.5 * damping * moved.square().sum().item()
    assert model == pytest.approx(bound, rel=0.02)


def counted(kl_at: Callable[[float], float]) -> tuple[Callable[[float], float], list[float]]:
    lengths: list[float] = []

    def watched(length: float) -> float:
        lengths.append(length)
        return kl_at(length)

    return watched, lengths


def test_a_step_that_lands_at_once_is_kept() -> None:
    kl_at, lengths = counted(lambda length: 0.97 * BOUND * length**2)
    assert rescale_to_kl(kl_at, BOUND) == 1.0
    assert lengths == [1.0]


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("size", [0.02, 0.3, 1.5, 20.0])
def test_two_lengths_tell_the_power_of_a_kl(power: float, size: float) -> None:
    """KL = size · bound · length^power: the third length is inside, if not the second is."""
    kl_at, lengths = counted(lambda length: size * BOUND * length**power)
    length = rescale_to_kl(kl_at, BOUND)
    most = min(BOUND, size * BOUND * 8.0**power)  # it grows by a factor of 8 at most
    assert KL_BAND[0] * most <= kl_at(length) <= BOUND
    assert len(lengths) - 1 <= 3


def test_the_longest_length_inside_is_taken_if_none_lands() -> None:
    """Only the step itself is inside, far from the bound."""
    assert rescale_to_kl(lambda length: 0.1 * BOUND if length == 1.0 else 2.0 * BOUND, BOUND) == 1.0


def test_without_a_length_inside_the_last_one_is_short() -> None:
    """It is left to the line search."""
    length = rescale_to_kl(lambda length: 2.0 * BOUND, BOUND)
    assert 0.0 < length < 1.0


def test_a_kl_that_is_larger_for_a_shorter_step_shortens_it_further() -> None:
    """2 at the step itself, 3 below, and inside up to a tenth of it: no power is negative."""

    def kl_at(length: float) -> float:
        return BOUND * (0.97 if length <= 0.1 else 3.0 if length < 1.0 else 2.0)

    assert rescale_to_kl(kl_at, BOUND) <= 0.1


def test_a_length_without_a_finite_kl_is_halved() -> None:
    """Finite, and at the bound, from 0.3 of the step on: ½ is not, ¼ is."""
    assert rescale_to_kl(lambda length: 0.97 * BOUND if length <= 0.3 else math.inf, BOUND) == 0.25
