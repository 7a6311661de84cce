"""Networks that remember: what they forget, and that replaying gives what acting gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Advantage, Network, from_dict
from keel.envs import make_envs
from keel.experience.rollout import Collector, Rollout
from keel.experience.targets import compute_targets
from keel.networks.agent import Agent
from keel.networks.build import build_agent
from keel.networks.recurrent import (
    ACTOR_HIDDEN_STATE,
    CRITIC_HIDDEN_STATE,
    EPISODE_STARTS,
    GRU,
    torch_operations,
)
from keel.training.builder import build_algorithm
from keel.training.session import open_session
from keel.trust_region.gate import check_replay
from keel.trust_region.measure import exact_kl

BOX = spaces.Box(-1.0, 1.0, (3,))


def build(memory: Any, kind: Any = "mlp", observation: Any = BOX) -> Agent:
    network = Network(kind=kind, hidden=(16,), features=32, recurrent=memory, recurrent_size=8)
    return build_agent(observation, spaces.Discrete(3), network, 0)


def test_it_forgets_where_an_episode_begins() -> None:
    """The second half of a sequence that starts anew is that half alone, from nothing."""
    gru = GRU(3, 5, torch.Generator().manual_seed(0))
    x = torch.randn(2, 6, 3)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    starts[0, 4] = True
    state = torch.randn(2, 5)
    seen = gru(x, state, starts)
    alone = gru(x[:, 4:], torch.zeros(2, 5), torch.zeros(2, 2, dtype=torch.bool))
    torch.testing.assert_close(seen[0, 4:], alone[0])
    assert not torch.allclose(seen[1, 4:], alone[1])


def test_no_gradient_flows_past_a_start() -> None:
    gru = GRU(3, 5, torch.Generator().manual_seed(0))
    x = torch.randn(1, 6, 3, requires_grad=True)
    starts = torch.tensor([[False, False, False, True, False, False]])
    gru(x, torch.zeros(1, 5), starts)[0, 5].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[0, :3], torch.zeros(3, 3))
    assert (x.grad[0, 3:] != 0).all()


def test_it_is_torchs_own_gru_where_nothing_is_forgotten() -> None:
    gru = GRU(3, 5, torch.Generator().manual_seed(0))
    reference = torch.nn.GRU(3, 5, batch_first=True)
    reference.weight_ih_l0.data = gru.cell.weight_ih.data
    reference.weight_hh_l0.data = gru.cell.weight_hh.data
    reference.bias_ih_l0.data = gru.cell.bias_ih.data
    reference.bias_hh_l0.data = gru.cell.bias_hh.data
    x, state = torch.randn(2, 6, 3), torch.randn(2, 5)
    expected, _ = reference(x, state[None])
    torch.testing.assert_close(gru(x, state, torch.zeros(2, 6)), expected)


@pytest.mark.parametrize("kind", ["mlp", "decoupled", "cnn"])
@pytest.mark.parametrize("memory", ["actor", "critic", "both"])
def test_which_of_them_remembers(memory: str, kind: str) -> None:
    observation = spaces.Box(0, 255, (4, 84, 84), np.uint8) if kind == "cnn" else BOX
    agent = build(memory, kind, observation)
    expected = {
        "actor": {ACTOR_HIDDEN_STATE},
        "critic": {CRITIC_HIDDEN_STATE},
        "both": {ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE},
    }[memory]
    assert set(agent.hidden_state_sizes) == expected
    raw = torch.from_numpy(np.stack([observation.sample() for _ in range(4)]))
    tree = {
        "obs": raw.reshape(2, 2, *observation.shape),
        EPISODE_STARTS: torch.zeros(2, 2),
        **{key: torch.zeros(2, size) for key, size in agent.hidden_state_sizes.items()},
    }
    policy, value, states = agent.outputs(agent.initial, tree)
    assert policy is not None
    assert value is not None
    assert states is not None
    assert policy.shape == (2, 2, 3)
    assert value.shape == (2, 2, 1)
    assert {key: x.shape for key, x in states.items()} == dict.fromkeys(expected, (2, 2, 8))


def collect(memory: str, autoreset: Any = "next_step", steps: int = 40) -> tuple[Agent, Rollout]:
    """A second rollout, so that memory and episodes are under way when it begins."""
    envs = make_envs("CartPole-v1", 3, backend="sync", seed=0, autoreset=autoreset)
    network = Network(hidden=(16,), recurrent=memory, recurrent_size=8)  # type: ignore[arg-type]
    agent = build_agent(envs.observation_space, envs.action_space, network, 0)
    agent.initial = agent.initial + 0.3 * torch.randn(
        agent.initial.shape, generator=torch.Generator().manual_seed(1)
    )
    collector = Collector(envs, agent, steps, envs.reset(0), np.random.default_rng(0))
    collector.begin(collector.obs)
    collector.collect(agent.initial, 1.0, None)
    rollout = collector.collect(agent.initial, 1.0, None)
    envs.close()
    assert rollout.value is not None
    assert (rollout.terminated | rollout.truncated).any()
    return agent, rollout


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("memory", ["actor", "critic", "both"])
def test_replaying_sequences_gives_what_acting_gave(memory: str, autoreset: str) -> None:
    agent, rollout = collect(memory, autoreset)
    batch = rollout.batch()
    assert batch.weight.shape == (3, 40)
    assert check_replay(agent, agent.initial, batch, 1.0, enforce=True) < 1e-5
    assert exact_kl(agent, agent.initial, batch, 1.0).item() < 1e-10


def step_by_step(agent: Agent, rollout: Rollout) -> torch.Tensor:
    """V of every observation `[T + 1, N]`, one row at a time: the reference."""
    assert rollout.hidden_state is not None
    states = dict(rollout.hidden_state)
    values = []
    trees = [{key: x[t] for key, x in rollout.obs.items()} for t in range(len(rollout.reward))]
    for tree in (*trees, rollout.last_obs):
        row = {key: x[:, None] for key, x in tree.items()}
        outputs = agent.outputs(agent.initial, row | states)
        assert outputs.value is not None
        assert outputs.hidden_state is not None
        values.append(outputs.value[:, 0, 0])
        states = {key: x[:, 0] for key, x in outputs.hidden_state.items()}
    return torch.stack(values)


def test_targets_bootstrap_from_remembered_values() -> None:
    """λ = 0: the target of a row is r + γ·V(next), 0 where the episode ended for good."""
    agent, rollout = collect("both")
    targets, _ = compute_targets(agent, agent.initial, rollout, Advantage(gamma=0.9, lam=0.0))
    values = step_by_step(agent, rollout)
    expected = rollout.reward + 0.9 * values[1:] * (~rollout.terminated)
    counted = rollout.weight > 0
    torch.testing.assert_close(targets.target.T[counted], expected[counted])


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_truncated_episode_goes_on_from_its_own_memory(at_the_end: bool) -> None:
    """Same-step autoreset keeps the final observation apart: V there continues the sequence, in
    the last row of a rollout too."""
    agent, rollout = collect("critic", "same_step")
    ended = rollout.terminated.clone()
    fields = {**vars(rollout), "terminated": torch.zeros_like(ended), "truncated": ended}
    if at_the_end:
        ended[-1, 1] = True
        final = {key: x[:1] for key, x in fields["final_obs"].items()}
        fields |= {"final_obs": final, "final_index": torch.tensor([39 * 3 + 1])}
    rollout = Rollout(**fields)
    assert rollout.final_obs is not None
    assert rollout.final_index is not None
    targets, _ = compute_targets(agent, agent.initial, rollout, Advantage(gamma=0.9, lam=0.0))
    row, column = divmod(int(rollout.final_index[0]), 3)
    assert rollout.hidden_state is not None
    upto = {k: x[: row + 1, column : column + 1].transpose(0, 1) for k, x in rollout.obs.items()}
    last = rollout.final_obs["obs"][0][None, None]
    longer = {"obs": torch.cat([upto["obs"], last], 1)}
    longer[EPISODE_STARTS] = torch.cat(
        [upto[EPISODE_STARTS], torch.zeros(1, 1, dtype=torch.bool)], 1
    )
    longer |= {key: x[column : column + 1] for key, x in rollout.hidden_state.items()}
    value = agent.value(agent.initial, longer)[0, -1]
    expected = rollout.reward[row, column] + 0.9 * value
    torch.testing.assert_close(targets.target[column, row], expected)


def test_minibatches_are_whole_sequences() -> None:
    config = from_dict({"network": {"memory": "both"}, "rollout_steps": 64})
    algorithm: Any = build_algorithm(config, build("both"), step=lambda *_: pytest.fail("unused"))
    assert algorithm.algorithm.minibatch == 4  # 256 steps of 64 each


def test_a_sequence_is_not_compiled() -> None:
    config = from_dict({"network": {"memory": "actor"}, "total_steps": 10_000_000})
    session = open_session(config)
    session.source.close()
    assert session.choices["compile"] is False


def test_state_dependent_deviations_begin_where_they_were_asked_to() -> None:
    network = Network(state_std=True, log_std=-0.5)
    agent = build_agent(BOX, spaces.Box(-1.0, 1.0, (2,)), network, 0)
    params = agent.policy(agent.initial, {"obs": torch.randn(64, 3)})
    assert params["log_std"].shape == (64, 2)
    assert (params["log_std"] + 0.5).abs().max() < 0.1
    assert params["log_std"].std(0).min() > 0.0  # and they depend on the observation


def test_torch_can_capture_a_memory_whole() -> None:
    """As `--compile on` does; the cell is asked for, not the compiled loops."""
    gru = GRU(3, 4, torch.Generator().manual_seed(0))
    x, state, starts = torch.randn(2, 5, 3), torch.zeros(2, 4), torch.zeros(2, 5)
    captured = torch.compile(gru, backend="eager", fullgraph=True)
    torch.testing.assert_close(captured(x, state, starts), gru(x, state, starts))


def test_torchs_own_operations_give_the_same_memory() -> None:
    gru = GRU(3, 4, torch.Generator().manual_seed(0))
    x, state, starts = torch.randn(2, 5, 3), torch.randn(2, 4), torch.tensor([[0, 0, 1, 0, 0]] * 2)
    with torch_operations():
        spelled_out = gru(x, state, starts)
    torch.testing.assert_close(spelled_out, gru(x, state, starts))
