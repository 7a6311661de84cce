"""Networks of one's own: every form, both algorithms, several agents, saved and opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_toys import TINY, finish, forget, imported, train_by_command, write_module
from torch import nn

import keel
from keel.cli import main
from keel.config import Critic, Network, from_dict
from keel.config.common import NETWORKS
from keel.errors import InputError
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.tracking.record import read_config
from keel.training.api import iterate
from keel.training.checkpoint import load
from keel.training.policy import evaluate_policy, open_policy
from keel.training.runner import resume
from keel.trust import UntrustedCodeError

SOURCE = """
import math
import torch
from torch import nn

class Both(nn.Module):
    def __init__(self, observation_space, action_space, outputs=None, flat=False):
        super().__init__()
        n = math.prod(observation_space.shape)
        k = outputs or getattr(action_space, "n", None) or math.prod(action_space.shape)
        self.body = nn.Sequential(nn.Linear(n, 8), nn.Tanh())
        self.actor = nn.Linear(8, int(k))
        self.critic = nn.Linear(8, 1)
        self.register_buffer("shift", torch.randn(n))
        self.flat = flat

    def forward(self, obs):
        x = self.body(obs.float() + self.shift)
        value = self.critic(x)
        return self.actor(x), value.squeeze(-1) if self.flat else value

class Features(nn.Module):
    features_dim = 6
    def __init__(self, observation_space, action_space):
        super().__init__()
        self.layer = nn.Linear(math.prod(observation_space.shape), 6)

    def forward(self, obs):
        return torch.tanh(self.layer(obs))

class Joined(nn.Module):
    features_dim = 5
    def __init__(self, observation_space, action_space):
        super().__init__()
        sizes = [math.prod(space.shape) or 1 for space in observation_space.values()]
        self.layer = nn.Linear(sum(sizes), 5)

    def forward(self, obs):
        parts = [x.reshape(len(x), -1).float() for x in obs.values()]
        return torch.tanh(self.layer(torch.cat(parts, 1)))

def pair(observation_space, action_space):
    n = math.prod(observation_space.shape)
    k = getattr(action_space, "n", None) or math.prod(action_space.shape)
    return nn.Sequential(nn.Linear(n, 8), nn.Tanh(), nn.Linear(8, int(k))), nn.Linear(n, 1)

def local(observation_space, action_space):
    return (lambda *spaces: Both(*spaces))(observation_space, action_space)
"""
FORMS = ("Both", "pair", "Features")
BOX, CHOICE = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)
REACH = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_module(tmp_path, monkeypatch, SOURCE)
    return tmp_path


def settings(kind: Any, algo: str = "ppo") -> dict[str, Any]:
    return {
        **TINY,
        "algo": algo,
        "network": kind,
        "region": {"minibatch": 32, "epochs": 2, "max_kl": 0.01},
    }


def built(make: Any, action: Any = CHOICE, space: Any = BOX, **critic: Any) -> Agent:
    return build_agent(space, action, Network(kind=from_kind(make)), 3, Critic(**critic))


def from_kind(make: Any) -> str:
    return NETWORKS.text(make)


def observations() -> dict[str, torch.Tensor]:
    return {"obs": torch.randn(5, 3, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("form", FORMS)
def test_roles_of_parameters_are_told(here: Path, form: str) -> None:
    agent = built(getattr(imported(), form))
    roles = [name.partition(".")[0] for name in agent.layout.names]
    expected = {
        "Both": ["trunk", "trunk", "actor", "actor", "actor", "critic", "critic"],
        "pair": ["actor"] * 4 + ["critic"] * 2,
        "Features": ["trunk"] * 2 + ["actor"] * 2 + ["critic"] * 2,
    }
    assert roles == expected[form]
    assert agent.shares == (form != "pair")
    evaluation = agent.evaluate(agent.initial, observations())
    assert evaluation.dist["logits"].shape == (5, 4)
    assert evaluation.value.shape == (5, 1)
    again = built(getattr(imported(), form))
    assert torch.equal(agent.initial, again.initial)


def test_a_buffer_is_kept_and_never_moves(here: Path) -> None:
    agent = built(imported().Both)
    (columns,) = [agent.layout.slice_of(x) for x in agent.layout.names if x.endswith("shift")]
    assert agent.initial[0, columns].abs().sum() > 0
    leaf = agent.initial.clone().requires_grad_()
    agent.evaluate(leaf, observations()).dist["logits"].square().sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad[0, columns].any()
    assert leaf.grad.any()


def test_a_value_may_be_flat(here: Path) -> None:
    make = imported().Both
    flat = built(lambda *both: make(*both, flat=True))
    column = built(make)
    assert torch.equal(
        flat.raw_value(flat.initial, observations()),
        column.raw_value(column.initial, observations()),
    )


def test_log_stds_are_keels_or_the_networks(here: Path) -> None:
    both = imported().Both
    alone = built(both, REACH)
    assert "head.log_std" in alone.layout.names
    beside = built(lambda *given: both(*given, outputs=4), REACH)
    assert "head.log_std" not in beside.layout.names

    class Pair(both):  # type: ignore[misc, valid-type]
        def forward(self, obs: torch.Tensor) -> Any:
            mean, value = super().forward(obs)
            return (mean, torch.full((2,), -1.0)), value

    given = built(Pair, REACH)
    policy = given.policy(given.initial, observations())
    assert policy["mean"].shape == (5, 2)
    assert torch.equal(policy["log_std"], torch.full((5, 2), -1.0))


def without_value(*spaces: Any) -> nn.Module:
    return nn.Linear(3, 4)


def too_wide(*spaces: Any) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(3, 5), nn.Linear(3, 1)


def two_values(*spaces: Any) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(3, 4), nn.Linear(3, 2)


def other_input(*spaces: Any) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(7, 4), nn.Linear(3, 1)


def dropout(*spaces: Any) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1)), nn.Linear(3, 1)


def batch_norm(*spaces: Any) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4)), nn.Linear(3, 1)


class Noisy(nn.Module):
    def __init__(self, *spaces: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(obs) + torch.randn(4), self.layer(obs)[:, 0]


def three(*spaces: Any) -> Any:
    return nn.Linear(3, 4), nn.Linear(3, 1), nn.Linear(3, 1)


def number(*spaces: Any) -> Any:
    return 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_value, r"expected \(distribution parameters, value\), got a tensor \[3, 4\]"),
        (too_wide, r"logits: expected \[3, 4\] for 3 observations, got \[3, 5\]"),
        (two_values, r"value: expected \[3\] or \[3, 1\] for 3 observations, got \[3, 2\]"),
        (other_input, r"its forward failed on obs \[3, 3\]: RuntimeError: mat1 and mat2"),
        (dropout, r"Dropout \(1\) in training mode .*ratio 1; remove it, or call \.eval\(\)"),
        (batch_norm, r"BatchNorm1d \(0\) in training mode"),
        (Noisy, r"other outputs when it sees the same rows again"),
        (three, r"expected a pair of modules \(actor, critic\), got \(Linear, Linear, Linear\)"),
        (number, r"expected a torch\.nn\.Module or a pair, got int"),
    ],
)
def test_what_is_no_network_is_told_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as told:
        built(make)
    assert str(told.value).startswith(f"network.kind {make.__name__}")
    assert "\n" not in str(told.value)


def test_batch_norm_in_eval_mode_is_taken() -> None:
    def make(*spaces: Any) -> Any:
        actor, critic = batch_norm()
        return actor.eval(), critic

    agent = built(make)
    assert {"actor.0.running_mean", "actor.0.running_var"} <= set(agent.layout.names)


def test_a_normalized_distribution_needs_keels_last_layer(here: Path) -> None:
    with pytest.raises(InputError, match=r"use critic\.normalize off, or return a feature extract"):
        built(imported().pair, normalize="on")
    agent = built(imported().Features, kind="quantile", quantiles=8)
    assert agent.raw_value(agent.initial, observations()).shape == (5, 8)


def test_memory_is_keels_own(here: Path) -> None:
    kind = from_kind(imported().pair)
    with pytest.raises(InputError, match=r"goes without network\.recurrent"):
        build_agent(BOX, CHOICE, Network(kind=kind, recurrent="actor"), 0)


def test_names_come_from_the_registry() -> None:
    assert NETWORKS.names()[:5] == ("auto", "mlp", "cnn", "decoupled", "pointer")
    with pytest.raises(InputError, match=r"network\.kind: 'mpl' is not one of auto, mlp.*'mlp'\?"):
        from_dict({"network": {"kind": "mpl"}})
    assert from_dict({"network": "decoupled"}).network.kind == "decoupled"


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_it_trains_inside_the_bound(here: Path, form: str, algo: str, env: str) -> None:
    given = settings(getattr(imported(), form), algo)
    last = finish(iterate(env, runs=here / "runs", name="mine", **given))
    assert 0.0 < last.metrics["train/kl_exact"] <= 0.01
    assert last.metrics["train/gate_log_ratio"] < 1e-3
    state = last.iteration.state
    first = last.iteration.session.agent.initial
    moved = (state.opt_state.params != first)[0]
    names = last.iteration.session.agent.layout
    for name in names.names:
        assert bool(moved[names.slice_of(name)].any()) != name.endswith("shift"), name


def test_trpo_needs_parameters_of_the_value(here: Path) -> None:
    class Single(nn.Module):
        def __init__(self, *spaces: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = self.layer(obs)
            return both[:, :2], both[:, 2]

    finish(iterate("CartPole-v1", runs=here / "runs", **settings(Single)))
    with pytest.raises(InputError, match="TRPO fits the critic apart"):
        finish(iterate("CartPole-v1", runs=here / "runs", **settings(Single, "trpo")))


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_as_if_it_had_not_stopped(
    here: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    given = settings(getattr(imported(), form))
    given["region"] |= {"schedule": "constant"}
    finish(iterate("CartPole-v1", runs=here / "runs", name="whole", **given | {"total_steps": 256}))
    finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **given))
    forget(monkeypatch)
    stored = read_config(here / "runs" / "mine" / "seed-0")
    assert stored["network"]["kind"] == f"own_parts:{form}"
    finish(resume(here / "runs" / "mine", from_dict({"total_steps": 256}, from_dict(stored))))
    one, other = (load(here / "runs" / name / "seed-0").tensors for name in ("whole", "mine"))
    assert torch.equal(one["opt_state/params"], other["opt_state/params"])


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_is_opened_with_its_network(
    here: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run = here / "runs" / "mine"
    last = finish(
        iterate(
            "CartPole-v1", runs=here / "runs", name="mine", **settings(getattr(imported(), form))
        )
    )
    forget(monkeypatch)
    policy = open_policy(run, "last")
    assert torch.equal(policy.params, last.iteration.state.opt_state.params)
    assert evaluate_policy(policy, episodes=1).returns
    forget(monkeypatch)
    monkeypatch.setenv("KEEL_STATE_DIR", str(here / "somebody else"))
    with pytest.raises(UntrustedCodeError, match=f"network.kind own_parts:{form}"):
        open_policy(run)
    assert open_policy(run, trust_code=True).params.shape == policy.params.shape


def test_it_is_exported(here: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from keel.training.export import export_onnx

    finish(iterate("Pendulum-v1", runs=here / "runs", name="mine", **settings(imported().Both)))
    exported = export_onnx(open_policy(here / "runs" / "mine"), here / "policy.onnx", rows=8)
    assert exported.difference < 1e-4


@pytest.mark.parametrize("way", ["command", "file", "registered"])
def test_every_way_to_name_it(here: Path, way: str) -> None:
    if way == "command":
        assert train_by_command("--network.kind", "own_parts:Features") == 0
    elif way == "file":
        (here / "mine.yaml").write_text("env: CartPole-v1\nnetwork: own_parts:Features\n")
        given = {**TINY, "region": {"minibatch": 32}, "runs": here / "runs", "name": "mine"}
        with pytest.raises(UntrustedCodeError, match=r"network\.kind own_parts:Features"):
            iterate(config="mine.yaml", **given)
        finish(iterate(config="mine.yaml", trust_code=True, **given))
    else:
        keel.register_network("of_mine")(imported().Features)
        finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **settings("of_mine")))
    stored = read_config(here / "runs" / "mine" / "seed-0")
    assert stored["network"]["kind"] == "own_parts:Features"
    assert main(["evaluate", "runs/mine", "--episodes", "1", "--json"]) == 0


def test_a_lambda_trains_and_is_not_resumed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = imported().Both
    kind = settings(lambda *given: make(*given))
    finish(iterate("CartPole-v1", runs=here / "runs", name="mine", **kind))
    forget(monkeypatch)
    with pytest.raises(InputError, match=r"network\.kind object:lambda_\w+: .*no import path"):
        resume(here / "runs" / "mine")
    with pytest.raises(InputError, match=r"network\.kind: object:lambda_.*has no import path"):
        open_policy(here / "runs" / "mine")


@pytest.mark.parametrize("sharing", ["none", "all"])
@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_several_agents_have_one_each_or_share(here: Path, sharing: str, algo: str) -> None:
    pytest.importorskip("mpe2")
    form = imported().Both if sharing == "none" else imported().Joined
    given = settings(form, algo) | {"agents": {"sharing": sharing, "critic": "own"}}
    last = finish(iterate("simple_spread", runs=here / "runs", name="mine", **given))
    assert last.iteration.state.opt_state.params.shape[0] == (3 if sharing == "none" else 1)
    assert 0.0 < last.metrics["train/kl_exact"] <= 0.01
    assert last.metrics["train/gate_log_ratio"] < 1e-3
    with pytest.raises(InputError, match=r"sees what its agent sees; use agents\.critic own"):
        finish(iterate("simple_spread", runs=here / "runs", **settings(form)))


def test_parts_of_an_observation_come_by_name(here: Path) -> None:
    space = spaces.Dict(
        {"place": BOX, "image": spaces.Box(0, 255, (1, 4, 4), np.uint8), "kind": spaces.Discrete(3)}
    )
    agent = built(imported().Joined, space=space)
    obs = {
        "place": torch.zeros(2, 3),
        "image": torch.zeros(2, 1, 4, 4, dtype=torch.uint8),
        "kind": torch.tensor([0, 2]),
    }
    assert agent.evaluate(agent.initial, obs).value.shape == (2, 1)
