"""Distributions of one's own: their mathematics, training with both algorithms, trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_toys import TINY, finish, forget, imported, train_by_command, write_module
from torch import Tensor, nn
from torch.distributions import Beta as TorchBeta
from torch.distributions import kl_divergence

import keel
from keel.cli import main
from keel.config import Config, Network, from_dict
from keel.config.common import DISTRIBUTIONS
from keel.distributions.actions import Categorical, Dist, Gaussian
from keel.errors import InputError, KeelError
from keel.networks.accelerate import actor_obstacle, fisher_obstacle, step_obstacle
from keel.networks.build import build_agent, build_dist
from keel.tracking.record import read_config
from keel.training.api import iterate
from keel.training.policy import evaluate_policy, open_policy
from keel.training.runner import resume
from keel.training.session import open_session
from keel.trust import UntrustedCodeError

SOURCE = """
import math
import numpy as np
import torch
from keel.distributions.actions import Categorical, Dist

class Beta(Dist):
    def __init__(self, action_space):
        self.low, self.high = (x.reshape(-1) for x in (action_space.low, action_space.high))
        self.dim = len(self.low)

    @property
    def outputs(self):
        return 2 * self.dim

    def params(self, output, mask, temperature):
        shape = 1.0 + torch.nn.functional.softplus(output) / temperature
        alpha, beta = shape.split(self.dim, -1)
        return {"alpha": alpha, "beta": beta}

    def log_prob(self, params, action):
        a, b = params["alpha"], params["beta"]
        each = (a - 1) * action.log() + (b - 1) * (1 - action).log() - log_beta(a, b)
        return each.sum(-1)

    def entropy(self, params):
        a, b = params["alpha"], params["beta"]
        inner = (a - 1) * a.digamma() + (b - 1) * b.digamma() - (a + b - 2) * (a + b).digamma()
        return (log_beta(a, b) - inner).sum(-1)

    def kl(self, p, q):
        a, b, c, d = p["alpha"], p["beta"], q["alpha"], q["beta"]
        total = (c - a + d - b) * (a + b).digamma()
        moved = (a - c) * a.digamma() + (b - d) * b.digamma() + total
        return (log_beta(c, d) - log_beta(a, b) + moved).sum(-1)

    def sample(self, output, mask, temperature, noise):
        rng = np.random.default_rng(noise.reshape(-1))
        a, b = self._shapes(output, temperature)
        return rng.beta(a, b).clip(1e-4, 1 - 1e-4).astype(np.float32)

    def mode(self, output, mask):
        a, b = self._shapes(output, 1.0)
        return ((a - 1) / (a + b - 2)).clip(1e-4, 1 - 1e-4).astype(np.float32)

    def to_env(self, action):
        return self.low + (self.high - self.low) * action

    def from_env(self, action):
        inside = (action - self.low) / (self.high - self.low)
        return inside.clip(1e-4, 1 - 1e-4).astype(np.float32)

    def _shapes(self, output, temperature):
        return np.split(1.0 + np.logaddexp(0.0, output) / temperature, 2, -1)

def log_beta(a, b):
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

class Bounded(Categorical):
    pass

def choices(action_space):
    return Bounded(int(action_space.n))
"""
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_module(tmp_path, monkeypatch, SOURCE)
    return tmp_path


def settings(distribution: Any, **more: Any) -> dict[str, Any]:
    region = {"minibatch": 32, "epochs": 2, **more.pop("region", {})}
    return {**TINY, "distribution": distribution, "region": region, **more}


def outputs(seed: int, rows: int = 5, count: int = 4) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(seed)).double()


def test_the_example_is_torchs_beta(here: Path) -> None:
    dist = build_dist(BOX, kind="own_parts:Beta")
    p, q = (dist.params(outputs(seed), None, 1.5) for seed in (0, 1))
    expected_p, expected_q = (TorchBeta(x["alpha"], x["beta"]) for x in (p, q))
    action = expected_p.sample()
    for own, expected in (
        (dist.log_prob(p, action), expected_p.log_prob(action)),
        (dist.entropy(p), expected_p.entropy()),
        (dist.kl(p, q), kl_divergence(expected_p, expected_q)),
    ):
        torch.testing.assert_close(own, expected.sum(-1))


def test_its_gradients_are_those_of_finite_differences(here: Path) -> None:
    dist = build_dist(BOX, kind="own_parts:Beta")
    old = {k: x.detach() for k, x in dist.params(outputs(0), None, 1.0).items()}
    action = torch.full((5, 2), 0.3, dtype=torch.float64)

    def numbers(output: Tensor) -> tuple[Tensor, ...]:
        now = dist.params(output, None, 1.0)
        return dist.kl(old, now), dist.log_prob(now, action), dist.entropy(now)

    assert torch.autograd.gradcheck(numbers, outputs(1).requires_grad_())


@pytest.mark.parametrize("dist", [Categorical(4), Gaussian(2)], ids=["categorical", "gaussian"])
def test_the_fisher_matrix_by_default_is_the_curvature_of_the_kl(dist: Dist) -> None:
    """Against the closed forms of Keel's own."""
    params = {k: x.detach() for k, x in dist.params(outputs(0), None, 1.0).items()}
    tangent = {k: torch.randn_like(x) for k, x in params.items()}
    torch.testing.assert_close(
        Dist.fisher(dist, params, tangent), dist.fisher(params, tangent), rtol=1e-6, atol=1e-9
    )


def test_what_is_drawn_has_its_density(here: Path) -> None:
    """The mean of a Beta is α / (α + β); the same seeds give the same draws."""
    dist = build_dist(BOX, kind="own_parts:Beta")
    output = np.tile(np.array([[0.5, -1.0, 1.0, 2.0]], np.float32), (20_000, 1))
    noise = dist.noise((20_000,), np.random.default_rng(0))
    drawn = dist.sample(output, None, 1.0, noise)
    assert np.array_equal(drawn, dist.sample(output, None, 1.0, noise))
    params = dist.params(torch.from_numpy(output[:1]), None, 1.0)
    mean = params["alpha"] / (params["alpha"] + params["beta"])
    np.testing.assert_allclose(drawn.mean(0), mean[0].numpy(), atol=0.01)
    np.testing.assert_allclose(dist.from_env(dist.to_env(drawn)), drawn, atol=1e-5)


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_it_learns_inside_of_the_bound(here: Path, algo: str) -> None:
    given = settings(imported().Beta, algo=algo, region={"max_kl": 0.01}, total_steps=256)
    rows = [x.metrics for x in iterate("Pendulum-v1", runs=here / "runs", name="mine", **given)]
    assert len(rows) == 4
    for metrics in rows:
        assert metrics["train/gate_log_ratio"] <= 1e-3
        assert metrics["train/gate_all_rows"] == 1.0
        assert 0.0 < metrics["train/kl_exact"] <= 0.01
        assert metrics["train/kl_is_exact"] == 1.0
    stored = read_config(here / "runs" / "mine" / "seed-0")
    assert stored["network"]["distribution"] == "own_parts:Beta"


def test_kernels_leave_it_and_say_why(here: Path) -> None:
    given = {**TINY, "env": "Pendulum-v1", "region": {"minibatch": 32}}
    session = open_session(from_dict({**given, "network": {"distribution": "own_parts:Beta"}}))
    session.source.close()
    assert session.choices["optimizer_step"] == "torch (the distribution is Beta)"
    agent = session.agent
    assert fisher_obstacle(agent) == "the distribution is Beta"
    assert not actor_obstacle(agent)  # it gives outputs, whatever they mean
    box = spaces.Box(-1.0, 1.0, (3,))
    inherited = build_agent(box, spaces.Discrete(2), Network(distribution="own_parts:choices"), 0)
    objective = session.algorithm.objective
    assert step_obstacle(inherited, objective) == "the distribution is Bounded"


def test_it_is_resumed_and_opened_and_needs_trust_from_a_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = here / "runs" / "mine"
    finish(iterate("Pendulum-v1", runs=here / "runs", name="mine", **settings(imported().Beta)))
    forget(monkeypatch)
    stored = read_config(run / "seed-0")
    finish(resume(run, from_dict({"total_steps": 192}, from_dict(stored))))
    policy = open_policy(run, "last")
    assert evaluate_policy(policy, episodes=1).returns
    forget(monkeypatch)
    monkeypatch.setenv("KEEL_STATE_DIR", str(here / "somebody else"))
    with pytest.raises(UntrustedCodeError, match=r"network\.distribution own_parts:Beta"):
        open_policy(run)
    assert open_policy(run, trust_code=True).params.shape == policy.params.shape


@pytest.mark.parametrize("way", ["command", "file", "registered"])
def test_every_way_to_name_it(here: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(DISTRIBUTIONS, "_entries", {})
    if way == "command":
        assert train_by_command("--network.distribution", "own_parts:choices") == 0
    elif way == "file":
        (here / "mine.yaml").write_text(
            "env: CartPole-v1\nnetwork: {distribution: own_parts:choices}\n"
        )
        given = {**TINY, "region": {"minibatch": 32}, "runs": here / "runs", "name": "mine"}
        with pytest.raises(UntrustedCodeError, match=r"network\.distribution own_parts:choices"):
            iterate(config="mine.yaml", **given)
        finish(iterate(config="mine.yaml", trust_code=True, **given))
    else:
        keel.register_distribution("of_mine")(imported().choices)
        finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **settings("of_mine")))
    stored = read_config(here / "runs" / "mine" / "seed-0")
    assert stored["network"]["distribution"] == "own_parts:choices"
    assert main(["evaluate", "runs/mine", "--episodes", "1", "--json"]) == 0


def test_a_network_of_ones_own_gives_its_outputs(here: Path) -> None:
    def network(observation_space: Any, action_space: Any) -> Any:
        return nn.Linear(3, 2), nn.Linear(3, 1)

    given = settings(imported().Beta, network=network)
    last = finish(iterate("Pendulum-v1", runs=here / "runs", name="mine", **given))
    assert last.metrics["train/kl_exact"] <= 0.05


def test_it_is_not_exported(here: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from keel.training.export import export_onnx

    given = settings(imported().Beta, total_steps=64)
    finish(iterate("Pendulum-v1", runs=here / "runs", name="mine", **given))
    with pytest.raises(InputError, match="export: Beta is no distribution of Keel's"):
        export_onnx(open_policy(here / "runs" / "mine"), here / "policy.onnx")


def with_parts(**parts: Any) -> Any:
    """A categorical with other parts."""
    return lambda action_space: type("Odd", (Categorical,), parts)(int(action_space.n))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda space: space, "Discrete has no outputs, log_stds, exact"),
        (
            with_parts(log_prob=lambda *_: torch.zeros(1)),
            r"log_prob: expected \[3\] for 3 rows, got \[1\]",
        ),
        (with_parts(entropy=lambda *_: 1.0), r"entropy: expected \[3\] for 3 rows, got float"),
        (with_parts(kl=lambda *_: torch.ones(3)), "kl: of a distribution from itself is not 0"),
        (
            with_parts(log_prob=lambda *_: torch.full((3,), torch.nan)),
            "log_prob: is not finite where the network gives zeros",
        ),
        (with_parts(mode=lambda *_: np.zeros((3, 2))), r"mode: expected \[3\], as sample gives"),
        (with_parts(sample=Dist.sample), "failed on zeros: TypeError: no sampler for Odd"),
    ],
)
def test_what_is_no_distribution_is_told_why(make: Any, message: str) -> None:
    name = DISTRIBUTIONS.text(make)
    with pytest.raises(InputError, match=message):
        build_dist(spaces.Discrete(2), kind=name)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError, match=r"network\.squash: belongs to network.distribution auto"):
        from_dict({"network": {"squash": True, "distribution": "own_parts:Beta"}})
    with pytest.raises(InputError, match=r"'beta' is not one of auto, module:attribute"):
        from_dict({"network": {"distribution": "beta"}})
    assert Config().network.distribution == "auto"


def test_an_estimated_kl_is_not_certified(here: Path) -> None:
    given = settings(lambda action_space: Categorical(int(action_space.n), exact=False))
    with pytest.raises(KeelError, match="Categorical has no closed-form KL"):
        finish(iterate("CartPole-v1", runs=here / "runs", **given))
