"""Demonstrations as an update takes them: checked, sampled, normalized, weighted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.config import Critic, Demonstrations, Network
from keel.envs import Envs, make_envs
from keel.errors import InputError
from keel.experience.demo_files import Demos, check_fits, save_demos
from keel.experience.demos import open_demo_dataset, open_demos, sample_demos
from keel.networks.agent import Agent
from keel.networks.build import build_agent


def demos(**changes: object) -> Demos:
    """Two episodes of CartPole, three steps and two: the first ends, the second is cut off."""
    given = Demos(
        env="CartPole-v1",
        obs={"obs": np.arange(20, dtype=np.float32).reshape(5, 4)},
        action=np.array([0, 1, 1, 0, 1]),
        reward=np.array([1.0, 1.0, 1.0, 1.0, 3.0], np.float32),
        terminated=np.array([False, False, True, False, False]),
        truncated=np.array([False, False, False, False, True]),
        lengths=(3, 2),
    )
    return replace(given, **changes)  # type: ignore[arg-type]


@pytest.fixture
def envs():
    made = make_envs("CartPole-v1", 1, seed=0)
    yield made
    made.close()


@pytest.fixture
def agent(envs: Envs) -> Agent:
    network = Network(hidden=(4,))
    return build_agent(envs.observation_space, envs.action_space, network, 0, Critic())


def saved(tmp_path: Path, given: Demos) -> str:
    path = tmp_path / "demos"
    save_demos(given, path)
    return str(path)


def test_only_the_first_episodes(tmp_path):
    path = saved(tmp_path, demos())
    assert open_demos(path).lengths == (3, 2)
    assert open_demos(path, 1).lengths == (3,)
    assert open_demos(path, 9).lengths == (3, 2)


def test_a_fingerprint_is_of_the_content():
    own = demos()
    assert own.fingerprint == demos(source="somebody else").fingerprint
    assert own.fingerprint != demos(reward=own.reward * 2).fingerprint
    ends = demos(terminated=own.terminated | own.truncated, truncated=own.truncated & False)
    assert own.fingerprint != ends.fingerprint


def test_rows_are_drawn_from_what_was_shown(tmp_path, envs, agent):
    config = Demonstrations(path=saved(tmp_path, demos()))
    dataset = open_demo_dataset(config, envs, agent, envs.reset(0))
    rng = torch.Generator().manual_seed(0)
    shown, metrics = sample_demos(
        dataset,
        agent,
        agent.initial,
        200,
        rng,
        config,
        gamma=0.5,
        preprocess=lambda obs: {"obs": obs["obs"] * 2},
        scale_reward=lambda reward: reward,
    )
    assert metrics == {}
    assert (shown.weight == 1.0).all()
    rows = (shown.obs["obs"][:, 0] / 8).long()  # each observation begins with 4 × its number
    assert set(rows.tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(shown.action, torch.tensor([0, 1, 1, 0, 1])[rows])


def test_advantages_are_returns_against_the_critic(tmp_path, envs, agent):
    """γ = ½: 1 + ½(1 + ½·1) = 1.75, 1.5, 1 for the episode that ends; the one that is cut off goes
    on with the critic's value of its last state, V₄: 3 + V₄/2, before it 1 + that half again."""
    path = saved(tmp_path, demos())
    config = Demonstrations(path=path, loss="filtered")
    dataset = open_demo_dataset(config, envs, agent, envs.reset(0))
    with torch.no_grad():
        value = agent.value(agent.initial, {"obs": torch.from_numpy(demos().obs["obs"])})
    last = 3.0 + 0.5 * value[4]
    earned = torch.stack(
        [torch.tensor(1.75), torch.tensor(1.5), torch.tensor(1.0), 1 + last / 2, last]
    )
    better = earned > value
    rng = torch.Generator().manual_seed(0)
    shown, metrics = sample_demos(
        dataset,
        agent,
        agent.initial,
        300,
        rng,
        config,
        gamma=0.5,
        preprocess=dict,
        scale_reward=lambda r: r,
    )
    rows = (shown.obs["obs"][:, 0] / 4).long()
    assert torch.equal(shown.weight, better[rows].float())
    mean = (earned - value)[rows].mean().item()
    assert metrics["train/bc_advantage_mean"] == pytest.approx(mean, rel=1e-4)
    assert metrics["train/bc_share_used"] == pytest.approx(better[rows].double().mean().item())
    assert "train/bc_share_at_cap" not in metrics


def test_rewards_count_as_the_run_counts_them(tmp_path, envs, agent):
    config = Demonstrations(path=saved(tmp_path, demos()), loss="filtered")
    dataset = open_demo_dataset(config, envs, agent, envs.reset(0))
    shown, _ = sample_demos(
        dataset,
        agent,
        agent.initial,
        50,
        torch.Generator().manual_seed(0),
        config,
        gamma=0.5,
        preprocess=dict,
        scale_reward=lambda reward: reward - 1e6,
    )
    assert (shown.weight == 0.0).all()


def test_what_the_policy_cannot_do_is_refused(tmp_path, envs, agent):
    path = saved(tmp_path, demos(action=np.array([0, 1, 2, 0, 1])))
    with pytest.raises(InputError, match="1 of 5 actions are outside"):
        open_demo_dataset(Demonstrations(path=path), envs, agent, envs.reset(0))


def test_what_a_mask_rules_out_is_refused(tmp_path, envs, agent):
    mask = np.ones((5, 2), bool)
    mask[3, 0] = False
    path = saved(tmp_path, demos(obs={**demos().obs, "action_mask": mask}))
    with pytest.raises(InputError, match=r"ruled out by their action_mask.* 0 at step 3"):
        open_demo_dataset(Demonstrations(path=path), envs, agent, envs.reset(0))


MASKED = {
    "discrete": (spaces.Discrete(2), np.array([0, 1, 1, 0, 1]), 2, (3, 0)),
    "several": (
        spaces.MultiDiscrete([2, 3]),
        np.array([[0, 2], [1, 0], [1, 1], [0, 0], [1, 2]]),
        5,
        (3, 2),
    ),
    "switches": (
        spaces.MultiBinary(2),
        np.array([[0, 1], [1, 0], [1, 1], [1, 0], [0, 0]]),
        2,
        (3, 0),
    ),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_every_kind_of_action_are_held_against_it(kind: str):
    action, taken, width, hole = MASKED[kind]
    mask = np.ones((5, width), bool)
    box = spaces.Box(-100.0, 100.0, (4,))
    whole = demos(action=taken, obs={**demos().obs, "action_mask": mask})
    check_fits(whole, box, action, "demos")
    mask[hole] = False
    with pytest.raises(InputError, match=r"1 of 5 actions are ruled out .* at step 3"):
        check_fits(whole, box, action, "demos")
    narrow = replace(whole, obs={**demos().obs, "action_mask": mask[:, :-1]})
    with pytest.raises(InputError, match="action_mask has shape"):
        check_fits(narrow, box, action, "demos")


def test_a_mask_that_the_environment_gives_must_be_there(tmp_path, envs, agent):
    path = saved(tmp_path, demos())
    seen = {**envs.reset(0), "action_mask": np.ones((1, 2), bool)}
    with pytest.raises(InputError, match="no action_mask, which the environment gives"):
        open_demo_dataset(Demonstrations(path=path), envs, agent, seen)


def test_a_mask_that_it_does_not_give_is_left_out(tmp_path, envs, agent):
    path = saved(tmp_path, demos(obs={**demos().obs, "action_mask": np.ones((5, 2), bool)}))
    dataset = open_demo_dataset(Demonstrations(path=path), envs, agent, envs.reset(0))
    assert set(dataset.obs) == {"obs"}


def test_squashed_actions_are_taken_back():
    made = make_envs("Pendulum-v1", 1, seed=0)
    try:
        agent = build_agent(
            made.observation_space,
            made.action_space,
            Network(hidden=(4,), squash=True),
            0,
            Critic(),
        )
    finally:
        made.close()
    action = np.array([[-1.9], [0.0], [1.5]], np.float32)
    inner = agent.dist.from_env(action)
    np.testing.assert_allclose(agent.dist.to_env(inner), action, atol=1e-5)
    bounds = agent.dist.from_env(np.array([[-2.0], [2.0]], np.float32))
    assert np.isfinite(bounds).all()
    np.testing.assert_allclose(np.tanh(bounds), [[-0.999], [0.999]], rtol=1e-5)
