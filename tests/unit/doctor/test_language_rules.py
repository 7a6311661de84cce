"""Rules of completions, references, seeds and rollouts."""

from __future__ import annotations

import numpy as np
import pytest
from firing import FLAT, RETURN, RISING, STD, Case, check_fires, check_silent, check_skipped
from logs import findings_of, make_log

LENGTH, ENDED, INFORMATIVE = "rollout/length_mean", "rollout/ended", "rollout/informative"
TINY = {RETURN: [0.1, 0.12] * 10, STD: 0.3}
"""A reward of completions that does not rise."""
BETTER = {RETURN: np.linspace(0.1, 0.95, 20).tolist(), STD: 0.3}

CASES = [
    Case(
        "groups-uninformative",
        TINY | {INFORMATIVE: 0.0, "rollout/reward_std": 0.4},
        {INFORMATIVE: 0.6},
        "only 0% of the groups teach anything: every completion of a prompt scores the same, while "
        "prompts differ (standard deviation 0.4 over the batch)",
        value=0.0,
        framework="trl",
    ),
    Case(
        "groups-solved",
        BETTER | {INFORMATIVE: np.linspace(0.8, 0.05, 20).tolist()},
        {INFORMATIVE: 0.8},
        "of the groups have no spread because nearly all is solved",
        level="usual",
        framework="trl",
    ),
    Case(
        "completions-cut",
        TINY | {ENDED: 0.1, LENGTH: 250.0, "rollout/length_limit": 256.0},
        {ENDED: 0.9},
        "90% of the completions are cut at 256 tokens",
        value=0.1,
        framework="trl",
    ),
    Case(
        "end-token-unknown",
        TINY | {ENDED: 0.0, LENGTH: 256.0, "rollout/length_limit": 256.0},
        {ENDED: 0.3},
        "not one completion ended in 20 updates, all have 256 tokens",
        value=0.0,
        framework="verl",
    ),
    Case(
        "reference-kl-high",
        TINY | {"kl/reference_sequence": 80.0},
        {"kl/reference_sequence": 4.0},
        "80 nats a sequence, and the reward does not rise",
        value=80.0,
        framework="trl",
    ),
    Case(
        "length-grows",
        TINY | {LENGTH: np.linspace(100, 900, 20).tolist()},
        BETTER,
        "completions grow from 121.1 to 878.9 tokens and earn no more by it",
        level="watch",
        value=878.9,
        framework="trl",
    ),
    Case(
        "length-collapsed",
        {RETURN: np.linspace(0.6, 0.1, 20).tolist(), STD: 0.3}
        | {LENGTH: np.linspace(200, 3, 20).tolist()},
        BETTER,
        "completions collapse from 194.8 to 8.184 tokens",
        value=8.184,
        framework="trl",
    ),
    Case(
        "rollouts-tiny",
        FLAT,
        RISING,
        "a rollout has 16 rows (8 environments × 2 steps)",
        value=16.0,
        settings={"rollout_steps": 2, "envs.num": 8},
    ),
    Case(
        "rollouts-tiny",
        RISING | {"train/clip_fraction": 0.1},
        {},
        "a rollout has 16 rows (8 environments × 2 steps): updates are noise",
        level="watch",
        value=16.0,
        settings={"rollout_steps": 2, "envs.num": 8},
        healthy_settings={"rollout_steps": 32},
    ),
    Case(
        "few-seeds",
        FLAT,
        {},
        "3 seeds: enough to see whether a run is healthy, not to say which of two settings",
        level="usual",
        settings={"facts.seeds": 3},
        healthy_settings={"facts.seeds": 5},
    ),
    Case(
        "resets-synchronized",
        FLAT | {"rollout/episodes": [0.0, 0.0, 0.0, 16.0] * 5},
        {"rollout/episodes": [3.0, 5.0, 4.0, 2.0] * 5},
        "all 16 environments end together, every 4 updates",
        level="watch",
        value=1.0,
        settings={"envs.num": 16},
    ),
    Case(
        "minibatches-tiny",
        FLAT,
        RISING,
        "advantages are normalized over minibatches of 8 rows",
        level="watch",
        value=8.0,
        settings={"region.minibatch": 8},
        framework="sb3",
    ),
    Case(
        "critic-idle",
        {RETURN: [*np.linspace(20, 500, 10), *([500.0] * 10)], STD: [*([9.0] * 10), *([0.0] * 10)]}
        | {"train/explained_variance": -0.4},
        FLAT,
        "explained variance is -0.40 because nothing is left to explain",
        level="usual",
    ),
]
IDS = [f"{case.rule}-{index}" for index, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_fires_on_its_fault(case: Case) -> None:
    check_fires(case)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_is_silent_beside_it(case: Case) -> None:
    check_silent(case)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rule_is_skipped_without_its_metrics(case: Case) -> None:
    check_skipped(case)


def test_new_critic_knows_nothing_and_that_is_usual() -> None:
    young = make_log({"train/explained_variance": [0.01, -0.02, 0.05]})
    finding = findings_of("critic-starts-at-zero", young)
    assert finding is not None
    assert finding.level == "usual"
    assert "0.05 after 3,072 steps" in finding.cause
    old = make_log({"train/explained_variance": 0.01}, rows=30)
    assert findings_of("critic-starts-at-zero", old) is None


def test_one_row_shows_groups_that_teach_nothing() -> None:
    """Batch std above 0, group std 0: the reward sees the prompt only."""
    columns = {RETURN: 0.4, "rollout/reward_std": 0.45, "rollout/reward_std_group": 0.0}
    finding = findings_of("groups-uninformative", make_log(columns, rows=1, framework="trl"))
    assert finding is not None
    assert finding.level == "sick"
    assert "only 0 is the spread in a group" in finding.cause


def test_solved_prompts_have_no_spread_and_no_finding() -> None:
    columns = BETTER | {INFORMATIVE: 0.02, "rollout/success": 0.97}
    assert findings_of("groups-uninformative", make_log(columns, framework="trl")) is None


def test_reference_kl_of_a_token_has_a_bound_of_its_own() -> None:
    """GRPO logs nats a token: 0.3 is usual there, and would be nothing a sequence."""
    usual = make_log(TINY | {"train/kl_reference": 0.3}, framework="trl")
    assert findings_of("reference-kl-high", usual) is None
    far = findings_of(
        "reference-kl-high", make_log(TINY | {"train/kl_reference": 7.0}, framework="trl")
    )
    assert far is not None
    assert "7 nats a token" in far.cause
    assert far.level == "sick"
