"""Every distribution against torch.distributions, and its sampler against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, Normal
from torch.distributions import kl_divergence as torch_kl

from keel.distributions.actions import Categorical, Dist, Gaussian
from keel.distributions.composed import Bernoulli, MultiCategorical, SquashedGaussian
from keel.errors import ShapeError

DISTS: dict[str, Dist] = {
    "categorical": Categorical(4),
    "multi-categorical": MultiCategorical((3, 2)),
    "bernoulli": Bernoulli(3),
    "gaussian": Gaussian(2),
    "squashed": SquashedGaussian((-2.0, 0.0), (2.0, 1.0)),
}


def outputs(dist: Dist, rows: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dist.outputs, generator=generator)


def reference(name: str, params: dict[str, Tensor]) -> object:
    if name == "categorical":
        return TorchCategorical(logits=params["logits"])
    if name == "bernoulli":
        return Independent(TorchBernoulli(logits=params["logits"]), 1)
    return Independent(Normal(params["mean"], params["log_std"].exp()), 1)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian"])
def test_log_prob_entropy_and_kl_agree_with_torch(name: str) -> None:
    dist = DISTS[name]
    p, q = (dist.params(outputs(dist, seed=s), None, 1.0) for s in (0, 1))
    expected_p, expected_q = reference(name, p), reference(name, q)
    action = expected_p.sample()
    torch.testing.assert_close(dist.log_prob(p, action), expected_p.log_prob(action))
    torch.testing.assert_close(dist.entropy(p), expected_p.entropy())
    torch.testing.assert_close(dist.kl(p, q), torch_kl(expected_p, expected_q))


def test_a_multi_categorical_is_the_sum_of_its_parts() -> None:
    dist = MultiCategorical((3, 2))
    p, q = (dist.params(outputs(dist, seed=s), None, 1.0) for s in (0, 1))
    parts = [
        (
            TorchCategorical(logits=x["logits"][:, :3]),
            TorchCategorical(logits=x["logits"][:, 3:]),
        )
        for x in (p, q)
    ]
    action = torch.stack([part.sample() for part in parts[0]], -1)
    log_prob = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts[0]))
    torch.testing.assert_close(dist.log_prob(p, action), log_prob)
    torch.testing.assert_close(dist.entropy(p), sum(part.entropy() for part in parts[0]))
    kl = sum(torch_kl(a, b) for a, b in zip(*parts, strict=True))
    torch.testing.assert_close(dist.kl(p, q), kl)


def test_squashing_changes_neither_kl_nor_ratio() -> None:
    squashed, plain = DISTS["squashed"], Gaussian(2)
    p, q = (squashed.params(outputs(plain, seed=s), None, 1.0) for s in (0, 1))
    action = p["mean"] + 0.3
    torch.testing.assert_close(squashed.kl(p, q), plain.kl(p, q))
    torch.testing.assert_close(
        squashed.log_prob(p, action) - squashed.log_prob(q, action),
        plain.log_prob(p, action) - plain.log_prob(q, action),
    )


def test_the_entropy_of_a_narrow_squashed_gaussian_carries_the_jacobian() -> None:
    """At mean 0 the Jacobian of tanh is 1: both entropies agree; at mean 1 it is 1 − tanh²(1)."""
    dist = SquashedGaussian((-1.0,), (1.0,))
    at = {m: {"mean": torch.tensor([m]), "log_std": torch.tensor([-5.0])} for m in (0.0, 1.0)}
    gap = dist.entropy(at[1.0]) - dist.entropy(at[0.0])
    assert gap.item() == pytest.approx(math.log(1 - math.tanh(1.0) ** 2), abs=1e-5)


def noise_for(dist: Dist, rows: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    return dist.noise((rows.shape[0],), rng)


@pytest.mark.parametrize("name", DISTS)
def test_samples_follow_the_distribution(name: str) -> None:
    """The mean log-prob of many samples is minus the entropy, within five standard errors."""
    dist = DISTS[name]
    row = outputs(dist, rows=1).repeat(20_000, 1)
    params = dist.params(row, None, 1.5)
    action = dist.sample(row.numpy(), None, 1.5, noise_for(dist, row, np.random.default_rng(0)))
    log_prob = dist.log_prob(params, torch.from_numpy(action))
    base = dist.base if isinstance(dist, SquashedGaussian) else dist
    error = log_prob.std().item() / math.sqrt(20_000)
    assert abs(log_prob.mean().item() + base.entropy(params)[0].item()) < 5 * error


@pytest.mark.parametrize("name", DISTS)
def test_the_mode_is_the_likeliest_action(name: str) -> None:
    dist = DISTS[name]
    row = outputs(dist)
    params = dist.params(row, None, 1.0)
    best = dist.log_prob(params, torch.from_numpy(dist.mode(row.numpy(), None)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        drawn = torch.from_numpy(dist.sample(row.numpy(), None, 1.0, noise_for(dist, row, rng)))
        assert (dist.log_prob(params, drawn) <= best + 1e-6).all()


def test_a_mask_rules_out_actions_and_their_gradient() -> None:
    dist = Categorical(3)
    output = torch.tensor([[1.0, 5.0, 0.5]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    params = dist.params(output, mask, 1.0)
    legal = torch.tensor([[1.0, 0.5]]).log_softmax(-1)
    torch.testing.assert_close(dist.log_prob(params, torch.tensor([0])), legal[:, 0])
    rows = output.detach().repeat(500, 1)
    noise = noise_for(dist, rows, np.random.default_rng(0))
    drawn = dist.sample(rows.numpy(), mask.numpy(), 1.0, noise)
    assert set(drawn.tolist()) == {0, 2}
    (gradient,) = torch.autograd.grad(dist.entropy(params).sum(), output)
    assert gradient[0, 1] == 0.0
    assert torch.isfinite(gradient).all()


def test_a_misshapen_mask_is_named() -> None:
    with pytest.raises(ShapeError, match=r"action_mask: expected shape \[1, 3\]"):
        Categorical(3).params(torch.zeros(1, 3), torch.ones(1, 2, dtype=torch.bool), 1.0)
    with pytest.raises(ShapeError, match="a Gaussian has no outcomes"):
        Gaussian(1).params(torch.zeros(1, 2), torch.ones(1, 1, dtype=torch.bool), 1.0)


@pytest.mark.parametrize("name", DISTS)
def test_heat_raises_the_entropy(name: str) -> None:
    dist = DISTS[name]
    cold, hot = (dist.params(outputs(dist), None, t) for t in (1.0, 2.0))
    assert (dist.entropy(hot) > dist.entropy(cold)).all()


@pytest.mark.parametrize("name", DISTS)
def test_the_fisher_matrix_is_the_curvature_of_the_kl(name: str) -> None:
    """KL(p‖p + εu) = ½ε² uᵀFu + O(ε³), in double precision."""
    dist = DISTS[name]
    base = dist.base if isinstance(dist, SquashedGaussian) else dist
    params = {k: x.double() for k, x in dist.params(outputs(dist), None, 1.0).items()}
    generator = torch.Generator().manual_seed(3)
    tangent = {
        k: torch.randn(x.shape, generator=generator, dtype=torch.float64) for k, x in params.items()
    }
    step = 1e-4
    moved = {k: params[k] + step * tangent[k] for k in params}
    curved = dist.fisher(params, tangent)
    form = sum((tangent[k] * curved[k]).sum(-1) for k in params)
    torch.testing.assert_close(base.kl(params, moved) * 2 / step**2, form, rtol=1e-3, atol=1e-6)


def test_squashed_actions_stay_inside_their_bounds() -> None:
    dist = SquashedGaussian((-2.0, 0.0), (2.0, 1.0))
    action = dist.to_env(np.array([[-50.0, 50.0], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(action, [[-2.0, 1.0], [0.0, 0.5]], atol=1e-6)
