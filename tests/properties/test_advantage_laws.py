"""Laws of advantages: naive loops agree, and rows of weight 0 do not exist."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from keel.functional import (
    Advantages,
    dr_grpo,
    gae,
    grpo,
    n_step,
    normalize,
    reward_to_go,
    rloo,
    token_gae,
)

GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -1.0, 0.0])
DISCOUNT = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@st.composite
def generators(draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**32)))


@st.composite
def rollouts(draw) -> dict[str, torch.Tensor]:
    """What `gae` takes, `[T, *lead]`, with any pattern of ends and of rows that do not count."""
    generator = draw(generators())
    lead = draw(st.sampled_from([(), (3,), (2, 2)]))
    shape = (draw(st.integers(1, 9)), *lead)

    def chance(probability: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) < probability

    def normal(size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    often = st.sampled_from([0.0, 0.2, 0.5, 1.0])
    return {
        "reward": normal(shape),
        "value": normal(shape),
        "last_value": normal(lead),
        "terminated": chance(draw(often)),
        "truncated": chance(draw(often)),
        "final_value": normal(shape),
        "weight": chance(draw(st.sampled_from([0.5, 0.9, 1.0]))).double(),
    }


def episodes(rollout: dict[str, torch.Tensor]):
    """For every column: its last value, and its counted rows as (index, r, V, v' at an end)."""
    steps, *lead = rollout["reward"].shape
    for column in product(*map(range, lead)):
        walk = []
        for t in range(steps):
            at = (t, *column)
            if rollout["weight"][at] > 0:
                end = None
                if rollout["terminated"][at]:
                    end = 0.0
                elif rollout["truncated"][at]:
                    end = rollout["final_value"][at].item()
                walk.append((at, rollout["reward"][at].item(), rollout["value"][at].item(), end))
        yield rollout["last_value"][column].item(), walk


def naive_gae(rollout: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
    advantage = torch.zeros_like(rollout["reward"])
    for following, walk in episodes(rollout):
        carry = 0.0
        for at, reward, value, end in reversed(walk):
            delta = reward + gamma * (following if end is None else end) - value
            carry = delta + (gamma * lam * carry if end is None else 0.0)
            advantage[at], following = carry, value
    return advantage


def naive_n_step(rollout: dict[str, torch.Tensor], n: int, gamma: float) -> torch.Tensor:
    target = torch.zeros_like(rollout["reward"])
    for last_value, walk in episodes(rollout):
        for start in range(len(walk)):
            total, factor, end = 0.0, 1.0, None
            for _, reward, _, end in walk[start : start + n]:
                total, factor = total + factor * reward, factor * gamma
                if end is not None:
                    break
            if end is None:
                end = walk[start + n][2] if start + n < len(walk) else last_value
            target[walk[start][0]] = total + factor * end
    return target


@given(rollouts(), DISCOUNT, DISCOUNT)
def test_gae_is_the_backward_loop(rollout, gamma, lam):
    result = gae(**rollout, gamma=gamma, lam=lam)
    expected = naive_gae(rollout, gamma, lam)
    assert_close(result.advantage, expected, rtol=1e-12, atol=1e-12)
    target = (expected + rollout["value"]) * rollout["weight"]
    assert_close(result.target, target, rtol=1e-12, atol=1e-12)


@given(rollouts(), st.integers(1, 12), DISCOUNT)
def test_n_step_is_the_forward_sum(rollout, n, gamma):
    result = n_step(**rollout, n=n, gamma=gamma)
    expected = naive_n_step(rollout, n, gamma)
    assert_close(result.target, expected, rtol=1e-12, atol=1e-12)
    advantage = (expected - rollout["value"]) * rollout["weight"]
    assert_close(result.advantage, advantage, rtol=1e-12, atol=1e-12)


@given(rollouts(), DISCOUNT)
def test_reward_to_go_is_the_sum_of_what_follows(rollout, gamma):
    rollout["value"].zero_()
    rollout["last_value"].zero_()
    rollout["truncated"].zero_()
    reward, terminated, weight = rollout["reward"], rollout["terminated"], rollout["weight"]
    expected = naive_n_step(rollout, len(reward), gamma)
    result = reward_to_go(reward, terminated, gamma=gamma, weight=weight)
    assert_close(result, expected, rtol=1e-12, atol=1e-12)


@given(rollouts(), DISCOUNT)
def test_lambda_joins_one_step_to_all_steps(rollout, gamma):
    steps = len(rollout["reward"])
    one, every = (n_step(**rollout, n=n, gamma=gamma) for n in (1, steps))
    assert_close(gae(**rollout, gamma=gamma, lam=0.0), one, rtol=1e-12, atol=1e-12)
    assert_close(gae(**rollout, gamma=gamma, lam=1.0), every, rtol=1e-12, atol=1e-12)


def insert(x: torch.Tensor, kept: torch.Tensor, garbage: float, axis: int = 0) -> torch.Tensor:
    """`x` at the places `kept` along `axis`, and garbage between them."""
    shape = list(x.shape)
    shape[axis] = len(kept)
    filler = torch.full(shape, garbage, dtype=torch.float64).to(x.dtype)
    return filler.index_copy(axis, kept.nonzero()[:, 0], x)


@st.composite
def insertions(draw, rows: int) -> torch.Tensor:
    """bool: `rows` True among a few False, in any order."""
    return torch.tensor(draw(st.permutations([True] * rows + [False] * draw(st.integers(1, 4)))))


@given(st.data(), rollouts(), GARBAGE)
def test_inserted_rows_of_weight_zero_change_no_advantage(data, rollout, garbage):
    kept = data.draw(insertions(len(rollout["reward"])))
    longer = {name: insert(x, kept, garbage) for name, x in rollout.items() if name != "last_value"}
    longer["weight"] = insert(rollout["weight"], kept, 0.0)
    longer["last_value"] = rollout["last_value"]
    for estimator in (gae, n_step):
        full, plain = estimator(**longer), estimator(**rollout)
        assert_close(Advantages(*(x[kept] for x in full)), plain, rtol=1e-12, atol=1e-12)
        assert not any(x[~kept].any() for x in full)


@given(st.data(), generators(), st.integers(1, 6), GARBAGE)
def test_inserted_tokens_of_weight_zero_change_no_advantage(data, generator, length, garbage):
    kept = data.draw(insertions(length))
    reward, value, weight = torch.randn(3, 2, length, generator=generator, dtype=torch.float64)
    weight = (weight > 0).double()
    plain = token_gae(reward, value, weight, gamma=0.9)
    full = token_gae(
        insert(reward, kept, garbage, axis=1),
        insert(value, kept, garbage, axis=1),
        insert(weight, kept, 0.0, axis=1),
        gamma=0.9,
    )
    assert_close(Advantages(*(x[:, kept] for x in full)), plain, rtol=1e-12, atol=1e-12)


@st.composite
def batches(draw) -> dict:
    """Advantages `[M]` of four groups, some rows without weight."""
    generator, size = draw(generators()), draw(st.integers(1, 12))
    return {
        "advantage": torch.randn(size, generator=generator, dtype=torch.float64),
        "group": torch.randint(4, (size,), generator=generator),
        "weight": torch.rand(size, generator=generator).round(),
        "groups": 4,
    }


METHODS = st.sampled_from(["none", "batch", "global", "group", "robust"])


@given(st.data(), batches(), METHODS, GARBAGE, st.integers(-9, 9))
def test_inserted_rows_of_weight_zero_change_no_normalization(data, batch, method, garbage, key):
    kept = data.draw(insertions(len(batch["advantage"])))
    longer = batch | {
        "advantage": insert(batch["advantage"], kept, garbage),
        "group": torch.full((len(kept),), key).masked_scatter(kept, batch["group"]),
        "weight": insert(batch["weight"], kept, 0.0),
    }
    full, plain = normalize(method=method, **longer), normalize(method=method, **batch)
    assert_close(full.advantage[kept], plain.advantage, rtol=1e-12, atol=1e-12)
    assert not full.advantage[~kept].any()
    assert_close(full[1:], plain[1:], rtol=1e-12, atol=1e-12)


@given(st.data(), batches(), METHODS)
def test_the_order_of_the_rows_does_not_matter(data, batch, method):
    order = torch.tensor(data.draw(st.permutations(range(len(batch["advantage"])))))
    shuffled = batch | {name: batch[name][order] for name in ("advantage", "group", "weight")}
    plain, other = normalize(method=method, **batch), normalize(method=method, **shuffled)
    assert_close(other.advantage, plain.advantage[order], rtol=1e-12, atol=1e-12)
    assert_close(other[1:], plain[1:], rtol=1e-12, atol=1e-12)


@given(batches(), st.sampled_from(["batch", "group", "robust"]))
def test_every_group_is_normalized_as_if_it_were_alone(batch, method):
    advantage, group, counts = batch["advantage"], batch["group"], batch["weight"] > 0
    result = normalize(method=method, **batch).advantage
    for key in range(4):
        rows = counts if method == "batch" else counts & (group == key)
        x = advantage[rows].numpy()
        centre, spread = x.mean() if x.size else 0.0, x.std(ddof=1) if x.size > 1 else math.inf
        if method == "robust" and x.size > 1:
            low, centre, high = np.percentile(x, [25, 50, 75])
            spread = high - low
        assert_close(result[rows].numpy(), (x - centre) / spread, rtol=1e-9, atol=1e-9)


@given(batches(), st.sampled_from([2.0**-30, 0.5, 3.0, 1e6]), st.floats(-3, 3))
def test_normalized_advantages_have_no_unit_and_no_origin(batch, unit, origin):
    moved = batch | {"advantage": unit * (batch["advantage"] + origin)}
    for method in ("batch", "group", "robust"):
        plain, other = (normalize(method=method, floor=1e-300, **x) for x in (batch, moved))
        assert_close(other.advantage, plain.advantage, rtol=1e-6, atol=1e-6)


@given(batches())
def test_rloo_subtracts_the_mean_of_the_others(batch):
    score, group = batch["advantage"], batch["group"]
    expected = torch.zeros_like(score)
    for i in range(len(score)):
        others = [score[j] for j in range(len(score)) if j != i and group[j] == group[i]]
        if others:
            expected[i] = score[i] - sum(others) / len(others)
    assert_close(rloo(score, group, 4), expected, rtol=1e-12, atol=1e-12)


@given(batches())
def test_group_baselines_agree_up_to_a_factor_and_leave_nothing_over(batch):
    score, group = batch["advantage"], batch["group"]
    for baseline in (grpo, dr_grpo, rloo):
        sums = torch.zeros(4, dtype=score.dtype).index_add(0, group, baseline(score, group, 4))
        assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)
    count = torch.bincount(group, minlength=4)[group]
    centred = dr_grpo(score, group, 4)
    assert_close(rloo(score, group, 4) * (count - 1), centred * count, rtol=1e-12, atol=1e-12)
