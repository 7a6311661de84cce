from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from keel.config import Agents, Network
from keel.errors import InputError
from keel.networks.build import build_agent
from keel.networks.pointer import Embedding, Pooled, Scorer
from keel.networks.several import sharing

OBSERVATION = spaces.Dict(
    {
        "parcels": spaces.Box(-1.0, 1.0, (6, 4)),
        "own": spaces.Box(-1.0, 1.0, (3,)),
        "agent": spaces.Discrete(2),
        "state": spaces.Box(-1.0, 1.0, (5,)),
    }
)


def tree(*lead: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "parcels": torch.randn(*lead, 6, 4),
        "own": torch.randn(*lead, 3),
        "agent": torch.arange(2).expand(*lead),
        "state": torch.randn(*lead[:-1], 1, 5).expand(*lead, 5),
    }


def agent(how: str = "none", critic: str = "central", actions: int = 13):  # type: ignore[no-untyped-def]
    many = Agents(sharing=how, critic=critic)  # type: ignore[arg-type]
    names = ("industry", "council")
    space = spaces.Discrete(actions)
    return build_agent(
        OBSERVATION, space, Network(kind="pointer", hidden=(8,)), 0, None, names, many
    )


def test_an_items_network_needs_actions_among_the_rows_of_a_matrix() -> None:
    assert type(agent().network.actor).__name__ == "Scorer"
    with pytest.raises(InputError, match="items: needs Discrete actions and one matrix"):
        agent(actions=5)  # fewer than there are rows
    with pytest.raises(InputError, match="items: needs Discrete actions and one matrix"):
        build_agent(spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(3), Network(kind="pointer"), 0)


def test_a_matrix_alone_is_enough() -> None:
    space = spaces.Dict({"replicas": spaces.Box(-1.0, 1.0, (4, 3))})
    made = build_agent(space, spaces.Discrete(4), Network(kind="pointer", hidden=(8,)), 0)
    outputs = made.outputs(made.initial, {"replicas": torch.randn(5, 4, 3)})
    assert outputs.policy.shape == (5, 4)
    assert outputs.value.shape == (5, 1)


def test_logits_follow_their_items() -> None:
    made, obs = agent(), tree(7, 2)
    params = made.initial + 0.3 * torch.randn(made.initial.shape)
    order = torch.randperm(6)
    moved = dict(obs, parcels=obs["parcels"][:, :, order])
    before = made.outputs(params, obs).policy
    after = made.outputs(params, moved).policy
    assert before.shape == (7, 2, 13)
    two_each = before[..., :12].unflatten(-1, (6, 2))[:, :, order].flatten(-2)
    assert torch.allclose(after[..., :12], two_each, atol=1e-6)
    assert torch.allclose(after[..., 12], before[..., 12], atol=1e-6)


def test_items_of_which_nothing_is_legal_are_not_looked_at() -> None:
    made, obs = agent(), tree(7, 2)
    params = made.initial + 0.3 * torch.randn(made.initial.shape)
    legal = torch.rand(7, 2, 6) < 0.5
    legal[0, 0] = False  # a row that can only wait
    mask = torch.cat([legal.repeat_interleave(2, -1), torch.ones(7, 2, 1, dtype=torch.bool)], -1)
    known = made.policy(params, obs | {"action_mask": mask})["logits"]
    strange = torch.where(legal[..., None], obs["parcels"], 1e6)
    told = made.policy(params, obs | {"action_mask": mask, "parcels": strange})["logits"]
    assert torch.equal(known, told)
    assert torch.equal(known == -torch.inf, ~mask)
    # each is scored as if it were alone: only the wait depends on the others
    everything = made.outputs(params, obs).policy
    assert torch.allclose(known[..., :12][mask[..., :12]], everything[..., :12][mask[..., :12]])


@pytest.mark.parametrize("kind", ["scorer", "pooled"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    made = (
        Scorer(Embedding(3, 4, 8, "tanh", generator), 2, 1, "tanh", generator)
        if kind == "scorer"
        else Pooled(Embedding(3, 4, 8, "tanh", generator), 2, "tanh", generator)
    ).double()
    context, items = torch.randn(5, 3).double(), torch.randn(5, 6, 4).double()
    legal = torch.rand(5, 6) < 0.6
    names = [name for name, _ in made.named_parameters()]

    def outputs(*parts: torch.Tensor) -> torch.Tensor:
        tree = dict(zip(names, parts, strict=True))
        return made.pure({f"it.{k}": x for k, x in tree.items()}, "it", context, items, legal)

    assert torch.autograd.gradcheck(outputs, tuple(made.parameters()))


def test_every_agent_acts_with_its_own_row() -> None:
    made, obs = agent(), tree(5, 2)
    params = made.initial + 0.3 * torch.randn(made.initial.shape)
    together = made.outputs(params, obs)
    for a in range(2):
        alone = made.alone().outputs(params[a : a + 1], {k: x[:, a] for k, x in obs.items()})
        assert torch.allclose(together.policy[:, a], alone.policy, atol=1e-6)
        assert torch.allclose(together.value[:, a], alone.value, atol=1e-6)


def test_a_central_critic_sees_the_state_and_no_actor_does() -> None:
    obs = tree(4, 2)
    for critic, sees in (("central", True), ("own", False)):
        made = agent(critic=critic)
        params = made.initial + 0.3 * torch.randn(made.initial.shape)
        other = dict(obs, state=obs["state"] + 1.0)
        assert torch.equal(made.outputs(params, obs).policy, made.outputs(params, other).policy)
        same = torch.equal(made.outputs(params, obs).value, made.outputs(params, other).value)
        assert same is not sees


def test_only_a_shared_network_is_told_who_acts() -> None:
    obs = tree(4, 2)
    other = dict(obs, agent=1 - obs["agent"])
    for how, told in (("none", False), ("all", True)):
        made = agent(how)
        assert made.initial.shape[0] == (1 if how == "all" else 2)
        params = made.initial + 0.3 * torch.randn(made.initial.shape)
        same = torch.equal(made.outputs(params, obs).policy, made.outputs(params, other).policy)
        assert same is not told


def test_agents_of_a_kind_share_a_row() -> None:
    names = ("wolf_0", "wolf_1", "sheep_0")
    assert sharing(names, "kind") == (("wolf", "sheep"), (0, 0, 1))
    assert sharing(names, "all") == (("all",), (0, 0, 0))
    assert sharing(names, "none") == (names, (0, 1, 2))


def test_rows_begin_with_weights_of_their_own_and_have_names() -> None:
    made = agent()
    assert not torch.equal(made.initial[0], made.initial[1])
    named = made.named(made.initial)
    assert all(name.startswith(("industry.", "council.")) for name in named)
    assert sum(x.numel() for x in named.values()) == made.initial.numel()


def test_of_agents_and_worst_are_each_others_way_back() -> None:
    many = Agents(sharing="kind")
    names = ("wolf_0", "wolf_1", "sheep_0")
    space = spaces.Dict({**OBSERVATION.spaces, "agent": spaces.Discrete(3)})
    made = build_agent(
        space, spaces.Discrete(13), Network(kind="pointer", hidden=(8,)), 0, None, names, many
    )
    assert made.of_agents(torch.tensor([1.0, 2.0])).tolist() == [1.0, 1.0, 2.0]
    assert made.worst(torch.tensor([0.1, 0.4, 0.2])).tolist() == pytest.approx([0.4, 0.2])
    assert made.worst(torch.tensor([0.1, torch.nan, 0.2]))[0].isnan()


def test_networks_that_agents_cannot_have_are_refused() -> None:
    with pytest.raises(InputError, match="mlp, cnn or pointer without memory, not mlp with memory"):
        build_agent(
            spaces.Dict({"obs": spaces.Box(-1.0, 1.0, (3,)), "agent": spaces.Discrete(2)}),
            spaces.Discrete(3),
            Network(recurrent="actor"),
            0,
            None,
            ("a", "b"),
        )
