from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keel.config import Faults
from keel.experience.rollout import Rollout
from keel.experiments.fault_injection import broken, interleaved
from keel.functional import gae, kl_estimate
from keel.types import MASK


def test_interleaving_reads_other_agents_as_the_future() -> None:
    """Two agents, one step, rewards 1 and 10, no values: the first gets γλ of the second's."""
    reward = torch.tensor([[[1.0, 10.0]]])
    zeros, no = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.bool)
    found = interleaved(
        reward, zeros, torch.zeros(1, 2), ~no, no, zeros,
        gamma=0.5, lam=0.5, weight=torch.ones(1, 1, 2),
    )  # fmt: skip
    assert found.advantage.tolist() == [[[1.0 + 0.25 * 10.0, 10.0]]]


def test_with_one_agent_there_is_nothing_to_interleave() -> None:
    torch.manual_seed(0)
    reward, value, final = torch.randn(3, 9, 4, 1)
    last, weight = torch.randn(4, 1), torch.ones(9, 4, 1)
    terminated, truncated = torch.rand(2, 9, 4, 1) < 0.1
    following = torch.cat([value[1:], last[None]])
    final = torch.where(truncated, final, following)
    given = (reward, value, last, terminated, truncated & ~terminated, final)
    a = interleaved(*given, gamma=0.9, lam=0.8, weight=weight)
    b = gae(*given, gamma=0.9, lam=0.8, weight=weight)
    assert torch.allclose(a.advantage, b.advantage)
    assert torch.allclose(a.target, b.target)


def taken(mask: list[int], action: int) -> Rollout:
    """One row, chosen uniformly among what is legal."""
    legal = torch.tensor(mask, dtype=torch.bool)
    logits = torch.where(legal, 0.0, -torch.inf)
    no = torch.zeros(1, dtype=torch.bool)
    return Rollout(
        obs={MASK: legal[None]},
        action=torch.tensor([action]),
        log_prob=-torch.tensor([sum(mask)]).float().log(),
        behavior={"logits": logits[None]},
        reward=torch.tensor([2.0]),
        terminated=no,
        truncated=no,
        weight=torch.ones(1),
        last_obs={MASK: legal},
    )


@pytest.mark.parametrize(
    ("action", "replayed"),
    [(1, 1), (4, 4), (6, 4), (7, 4)],  # the third legal action is 4: all behind it become 4
)
def test_an_update_that_knows_three_actions_takes_the_others_for_the_third(
    action: int, replayed: int
) -> None:
    rollout = taken([0, 1, 0, 1, 1, 0, 1, 1], action)
    confused = broken(rollout, Faults(first_actions=3))
    assert confused.obs[MASK].int().tolist() == [[0, 1, 0, 1, 1, 0, 0, 0]]
    assert confused.action.tolist() == [replayed]
    assert confused.action.dtype == rollout.action.dtype
    assert confused.log_prob is rollout.log_prob
    assert confused.behavior is rollout.behavior


def test_who_has_few_actions_loses_none() -> None:
    rollout = taken([1, 0, 1, 0], 2)
    same = broken(rollout, Faults(first_actions=3))
    assert same.obs[MASK].tolist() == rollout.obs[MASK].tolist()
    assert same.action.tolist() == [2]


def test_a_k3_of_five_is_arithmetic_where_five_actions_are_known() -> None:
    """Uniform among 42 of which the update knows five: ratio 42/5, whatever was learned.

    k3 = r − 1 − log r = 8.4 − 1 − 2.128 = 5.272, and 8.4 is outside of any clip range.
    """
    rollout = taken([1] * 42, 30)
    confused = broken(rollout, Faults(first_actions=5))
    logits = torch.where(confused.obs[MASK], 0.0, -torch.inf)
    log_prob = logits.log_softmax(-1)[0, confused.action]
    assert (log_prob - confused.log_prob).exp().item() == pytest.approx(8.4)
    k3 = kl_estimate("k3", confused.log_prob, log_prob)
    assert k3.item() == pytest.approx(8.4 - 1.0 - math.log(8.4))
    assert k3.item() == pytest.approx(5.272, abs=1e-3)


def test_a_wrong_actor_that_knows_five_actions_has_the_first_five_of_all() -> None:
    """Without a mask action 6 is the seventh of all, and counts as the fifth."""
    confused = broken(taken([0, 0, 1, 1, 0, 0, 1], 6), Faults(wrong_actor=True, first_actions=5))
    assert confused.obs[MASK].int().tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert confused.action.tolist() == [4]


def test_the_gain_is_on_rewards_alone() -> None:
    rollout = taken([1, 1], 0)
    louder = broken(rollout, Faults(reward_gain=30.0))
    assert louder.reward.tolist() == [60.0]
    assert louder.obs is rollout.obs


def test_without_faults_the_rollout_is_the_one_that_was_sampled() -> None:
    rollout = taken([1, 1], 0)
    assert broken(rollout, Faults()) is rollout


@pytest.mark.parametrize("faults", ["", "--faults.reward-gain 2"])
def test_only_a_run_with_faults_loads_the_module(faults: str, tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", "--total-steps", "64", "--envs.num", "4", "--quiet"]
    words += ["--rollout-steps", "16", "--region.minibatch", "32", "--runs", str(tmp_path)]
    words += faults.split()
    code = (
        f"import sys; from keel.cli import main; assert main({words!r}) == 0; "
        "print('keel.experiments' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split()[-1] == str(bool(faults)), found.stderr
