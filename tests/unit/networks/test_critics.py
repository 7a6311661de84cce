"""Critics: what their outputs mean, what they lose, and in which units."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from keel.config import Critic as CriticConfig
from keel.config import Network, from_dict
from keel.errors import InputError
from keel.functional import value as losses
from keel.networks import popart
from keel.networks.actor_critic import Scalar
from keel.networks.agent import UNITS, Agent
from keel.networks.build import build_agent
from keel.networks.critics import Critic, Histogram, Quantile, calibration, lower_mean

ALL: dict[str, Critic] = {
    "scalar": Scalar(),
    "quantile": Quantile(8, kappa=0.1),
    "ordered": Quantile(8, kappa=0.1, ordered=True),
    "two_hot": Histogram(11, 4.0, "two_hot"),
    "hl_gauss": Histogram(11, 4.0, "hl_gauss"),
}
every = pytest.mark.parametrize("critic", ALL.values(), ids=ALL)
DISTRIBUTIONS = {name: critic for name, critic in ALL.items() if name != "scalar"}
distributional = pytest.mark.parametrize("critic", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- what the outputs mean ------------------------------------------------------------------------


def test_the_value_of_quantiles_is_their_mean():
    raw = torch.tensor([[1.0, 2.0, 6.0, 3.0]])
    assert Quantile(4).value(raw).item() == 3.0


def test_ordered_quantiles_rise_around_their_mean():
    critic = Quantile(16, ordered=True)
    raw = 5.0 * noise(50, 16)
    q = critic.quantiles(raw)
    assert (q.diff(dim=-1) > 0.0).all()
    assert torch.allclose(q.mean(-1), raw[:, 0])
    assert torch.allclose(critic.value(raw), raw[:, 0])


def test_ordered_quantiles_that_learned_nothing_span_about_three_units():
    """ln 2 · 4 · 15/16 = 2.6."""
    q = Quantile(16, ordered=True).quantiles(torch.zeros(16))
    assert (q[-1] - q[0]).item() == pytest.approx(math.log(2.0) * 4.0 * 15 / 16)


def test_the_value_of_a_histogram_is_its_mean():
    """Half on −4, half on +2 (of −4, −2, 0, 2, 4)."""
    raw = torch.tensor([0.0, -torch.inf, -torch.inf, 0.0, -torch.inf])
    assert Histogram(5, 4.0).value(raw).item() == pytest.approx(-1.0)


def test_quantiles_of_a_histogram_lie_inside_its_bins():
    """All on the atom 2, whose bin is 1 … 3: the levels spread over it."""
    raw = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 0.0, -torch.inf])
    q = Histogram(5, 4.0).quantiles(raw)
    assert q[0].item() == pytest.approx(1.0 + 2.0 * 0.5 / 32, abs=1e-5)
    assert q[-1].item() == pytest.approx(3.0 - 2.0 * 0.5 / 32, abs=1e-5)


def test_a_lower_tail_by_hand():
    """The lowest 60 % of four equal chances: 1, 2 and 0.1/0.25 of 4: (¼·1 + ¼·2 + 0.1·4) / 0.6."""
    found = lower_mean(torch.tensor([8.0, 1.0, 4.0, 2.0]), torch.full((4,), 0.25), 0.6)
    assert found.item() == pytest.approx((0.25 + 0.5 + 0.4) / 0.6)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_cvar_of_a_gaussian(share: float):
    """−φ(z)/α at z = Φ⁻¹(α), here of 2,000 quantiles."""
    normal = torch.distributions.Normal(0.0, 1.0)
    q = normal.icdf(losses.midpoints(2000, torch.zeros(1, dtype=torch.float64)))
    z = normal.icdf(torch.tensor(share, dtype=torch.float64))
    expected = -normal.log_prob(z).exp() / share
    found = Quantile(2000, tail=share).value(q)
    assert found.item() == pytest.approx(expected.item(), abs=2e-3)


@distributional
def test_a_tail_of_one_is_the_mean(critic: Critic):
    raw = noise(5, critic.outputs)
    tail = replace(critic, tail=1.0 - 1e-12)  # type: ignore[call-arg]
    assert torch.allclose(tail.value(raw), critic.value(raw), atol=1e-9)


# --- what they lose -------------------------------------------------------------------------------


@every
def test_gradients_are_those_of_finite_differences(critic: Critic):
    raw, target = noise(6, critic.outputs).requires_grad_(), noise(6, seed=1)
    old = noise(6, critic.outputs, seed=2)
    assert torch.autograd.gradcheck(lambda x: critic.loss(x, target), (raw,))
    assert torch.autograd.gradcheck(lambda x: critic.loss(x, target, old, 0.3), (raw,))


@every
def test_a_wide_clip_does_nothing_and_a_tight_one_stops_what_runs_away(critic: Critic):
    old, target = noise(200, critic.outputs), 0.5 * noise(200, seed=1)
    raw = (old + 0.5 * noise(200, critic.outputs, seed=2)).requires_grad_()
    free = critic.loss(raw, target)
    assert torch.equal(critic.loss(raw, target, old, 1e6), free)
    held = critic.loss(raw, target, old, 0.05)
    assert (held >= free - 1e-12).all()
    assert (held > free + 1e-9).any()


@distributional
def test_the_distribution_of_samples_is_learned(critic: Critic):
    """All samples from N(1, ½²): the fitted distribution has their mean and their quantiles."""
    critic = replace(critic, outputs=33 if isinstance(critic, Quantile) else 101)
    samples = 1.0 + 0.5 * noise(4000)
    raw = torch.zeros(critic.outputs, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([raw], 0.05)
    for _ in range(800):
        optimizer.zero_grad()
        critic.loss(raw.expand(4000, -1), samples).mean().backward()
        optimizer.step()
    assert critic.value(raw).item() == pytest.approx(1.0, abs=0.03)
    q = critic.quantiles(raw.detach())
    levels = critic.levels(q)
    expected = torch.distributions.Normal(1.0, 0.5).icdf(levels)
    middle = (levels > 0.1) & (levels < 0.9)
    assert (q - expected)[middle].abs().max() < 0.06


# --- calibration ----------------------------------------------------------------------------------


def test_a_true_prediction_is_calibrated():
    samples = noise(20_000)
    levels = losses.midpoints(32, samples)
    q = torch.distributions.Normal(0.0, 1.0).icdf(levels).expand(20_000, -1)
    found = calibration(Quantile(32), q, samples)
    assert found["train/coverage_80"] == pytest.approx(0.8, abs=0.01)
    assert found["train/calibration_error"] < 0.01


def test_a_prediction_that_is_too_narrow_is_seen():
    """Half as wide: P(|x| < 1.28/2) = 0.48 in place of 0.8."""
    samples = noise(20_000)
    q = torch.distributions.Normal(0.0, 0.5).icdf(losses.midpoints(32, samples)).expand(20_000, -1)
    assert calibration(Quantile(32), q, samples)["train/coverage_80"] == pytest.approx(
        0.48, abs=0.01
    )


# --- units ----------------------------------------------------------------------------------------


def agent_for(kind: str, network: str = "mlp", **more: object) -> Agent:
    config = from_dict({"critic": {"kind": kind, **more}, "network": {"kind": network}})
    box = spaces.Box(-1.0, 1.0, (5,))
    return build_agent(box, spaces.Discrete(3), config.network, 0, config.critic)


@pytest.mark.parametrize("network", ["mlp", "decoupled"])
@pytest.mark.parametrize(("kind", "more"), [("scalar", {"normalize": "on"}), ("quantile", {})])
def test_new_units_leave_what_is_said_as_it_was(kind: str, more: dict[str, str], network: str):
    agent = agent_for(kind, network, **more)
    obs = {"obs": noise(50, 5).float()}
    before = agent.value(agent.initial, obs)
    params = agent.initial
    for mean, std in ((100.0, 30.0), (-5.0, 2.0), (-5.0, 2.0)):
        params = popart.rescale_critic(agent, params, torch.tensor([mean]), torch.tensor([std**2]))
        assert torch.allclose(agent.value(params, obs), before, rtol=1e-4, atol=1e-3)
    assert params[0, -1] == 3.0


def test_units_are_the_mean_and_spread_of_all_targets_at_first():
    """Two updates of mean 0 and 10, std 1: together mean 5, variance 1 + 25."""
    agent = agent_for("quantile")
    params = agent.initial
    for mean in (0.0, 10.0):
        params = popart.rescale_critic(agent, params, torch.tensor([mean]), torch.tensor([1.0]))
    shift, scale, _ = params[0, -3:].tolist()
    assert shift == pytest.approx(5.0)
    assert scale == pytest.approx(math.sqrt(26.0))
    x = torch.tensor([12.0])
    assert torch.allclose(popart.in_reward(params, popart.in_units(params, x)), x)


def test_returns_that_do_not_vary_keep_the_scale():
    agent = agent_for("quantile")
    params = popart.rescale_critic(agent, agent.initial, torch.tensor([7.0]), torch.tensor([0.0]))
    assert params[0, -3:].tolist() == [7.0, 1.0, 1.0]


def test_a_scalar_critic_has_no_units_unless_asked():
    assert UNITS not in agent_for("scalar").layout.names
    assert agent_for("scalar", normalize="on").layout.names[-1] == UNITS
    assert agent_for("quantile", normalize="off").layout.names[-1] != UNITS


def test_the_policy_starts_as_with_a_scalar_critic():
    """Only the critic's last layer is wider: the same seed acts the same."""
    obs = {"obs": noise(50, 5).float()}
    policies = [
        agent_for(kind).policy(agent_for(kind).initial, obs) for kind in ("scalar", "quantile")
    ]
    assert torch.equal(policies[0]["logits"], policies[1]["logits"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": 0.5}, "critic.kappa: belongs to critic.kind quantile, this is scalar"),
        (
            {"kind": "quantile", "atoms": 51},
            "critic.atoms: belongs to critic.kind two_hot or hl_gauss",
        ),
        ({"kind": "quantile", "quantiles": 1}, "critic.quantiles: expected at least 2"),
        ({"kind": "quantile", "cvar": 0.0}, "critic.cvar: expected a number above 0"),
        ({"kind": "quantile", "cvar": 1.5}, "critic.cvar: expected a number from 0 to 1"),
        ({"cvar": 0.5}, "critic.cvar: belongs to"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        from_dict({"critic": settings})


def test_the_defaults_build():
    assert isinstance(agent_for("hl_gauss").critic, Histogram)
    assert CriticConfig().kind == "scalar"
    assert Network().hidden == (64, 64)
