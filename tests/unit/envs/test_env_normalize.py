"""Normalizers: values in, values out, numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from keel.envs import ObsNormalizer, RewardNormalizer, RunningMoments
from keel.envs.normalize import no_moments
from keel.errors import InputError, ShapeError
from keel.functional import Moments, empty_moments, update_moments

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def test_the_moments_are_those_of_the_functional_core() -> None:
    """The numpy twin and the torch original see the same batches, weights included."""
    rng = np.random.default_rng(0)
    mine, theirs = no_moments((3,)), empty_moments((3,))
    for rows in (1, 5, 40):
        batch = (rng.normal(size=(rows, 4, 3)) * 7 + 100).astype(np.float32)
        weight = rng.integers(0, 3, (rows, 4)).astype(np.float64)
        mine = mine.absorb(batch, weight)
        theirs = update_moments(theirs, torch.from_numpy(batch), torch.from_numpy(weight))
        for name in Moments._fields:
            expected = getattr(theirs, name).numpy()
            np.testing.assert_allclose(getattr(mine, name), expected, rtol=1e-12)
        np.testing.assert_allclose(mine.variance, theirs.variance.numpy(), rtol=1e-12)


def test_moments_by_hand() -> None:
    """1, 2, 3, 6: mean 3, deviations 4 + 1 + 0 + 9; a row of weight 0 may be anything."""
    moments = no_moments().absorb(np.array([1.0, np.nan, 2.0]), np.array([1.0, 0.0, 1.0]))
    moments = moments.absorb(np.array([3.0, 6.0]))
    assert (float(moments.weight), float(moments.mean)) == (4.0, 3.0)
    assert float(moments.deviations) == pytest.approx(14.0)


def test_nothing_seen_changes_nothing() -> None:
    assert no_moments((2,)).variance.tolist() == [1.0, 1.0]
    empty = no_moments().absorb(np.ones(3), np.zeros(3))
    assert float(empty.weight) == 0.0


def test_observations_become_unit_normal_and_are_clipped() -> None:
    rng = np.random.default_rng(0)
    batch = rng.normal(5.0, 3.0, (500, 8, 2)).astype(np.float32)
    normalizer = ObsNormalizer.for_space(BOX).absorb({"obs": batch}).settle()
    out = normalizer.apply({"obs": batch})["obs"]
    assert out.dtype == np.float32
    assert np.allclose(out.mean((0, 1)), 0.0, atol=1e-3)
    assert np.allclose(out.std((0, 1)), 1.0, atol=1e-3)
    far = normalizer.apply({"obs": np.array([[1e6, -1e6]], np.float32)})["obs"]
    assert far.tolist() == [[10.0, -10.0]]


def test_the_formula_by_hand() -> None:
    """Two rows 0 and 2: mean 1, variance 1, so 4 becomes 3."""
    batch = {"obs": np.array([[[0.0, 0.0]], [[2.0, 2.0]]], np.float32)}
    normalizer = ObsNormalizer.for_space(BOX).absorb(batch).settle()
    assert np.allclose(normalizer.apply({"obs": np.full((1, 2), 4.0, np.float32)})["obs"], 3.0)


def test_statistics_change_only_where_a_new_normalizer_is_asked_for() -> None:
    first = ObsNormalizer.for_space(BOX)
    obs = {"obs": np.array([[3.0, 4.0]], np.float32)}
    assert np.allclose(first.apply(obs)["obs"], obs["obs"])
    second = first.absorb({"obs": np.ones((4, 1, 2), np.float32) * 9})
    assert np.allclose(first.apply(obs)["obs"], obs["obs"])
    assert np.allclose(second.apply(obs)["obs"], obs["obs"]), "seen, and not yet in force"
    assert not np.allclose(second.settle().apply(obs)["obs"], obs["obs"])
    assert obs["obs"].tolist() == [[3.0, 4.0]], "the input is untouched"


def test_pixels_choices_and_masks_pass_unchanged() -> None:
    space = spaces.Dict(
        {
            "x": BOX,
            "pixels": spaces.Box(0, 255, (1, 2, 2), np.uint8),
            "choice": spaces.Discrete(3),
        }
    )
    obs = {
        "x": np.ones((1, 2), np.float32),
        "pixels": np.full((1, 1, 2, 2), 200, np.uint8),
        "choice": np.array([2]),
        "action_mask": np.ones((1, 3), bool),
    }
    batch = {key: array[None] for key, array in obs.items()}
    normalizer = ObsNormalizer.for_space(space).absorb(batch)
    assert list(normalizer.moments) == ["x"]
    out = normalizer.apply(obs)
    assert all(out[key] is obs[key] for key in ("pixels", "choice", "action_mask"))


def test_rows_that_do_not_count_leave_no_trace() -> None:
    rng = np.random.default_rng(1)
    batch, weight = rng.normal(size=(6, 3, 2)).astype(np.float32), np.ones((6, 3))
    plain = ObsNormalizer.for_space(BOX).absorb({"obs": batch})
    longer = np.insert(batch, 2, np.nan, axis=0)
    masked = ObsNormalizer.for_space(BOX).absorb({"obs": longer}, np.insert(weight, 2, 0, axis=0))
    assert np.allclose(plain.moments["obs"].mean, masked.moments["obs"].mean, rtol=1e-13)


def test_the_scaling_in_force_goes_a_share_of_the_way() -> None:
    """Two rows 0 and 4: from mean 0 and 1/σ = 1 to mean 2 and 1/σ = 1/2; half of the way."""
    batch = {"obs": np.array([[[0.0, 0.0]], [[4.0, 4.0]]], np.float32)}
    seen = ObsNormalizer.for_space(BOX).absorb(batch)
    half = seen.settle(0.5).scaling["obs"]
    assert half.mean.tolist() == [1.0, 1.0]
    assert half.inverse.tolist() == pytest.approx([0.75, 0.75])
    assert half.mean.dtype == half.inverse.dtype == np.float32
    rest = seen.settle(0.5).settle(1.0).scaling["obs"]
    assert np.array_equal(rest, seen.settle().scaling["obs"])
    assert np.array_equal(seen.settle(0.0).scaling["obs"], seen.scaling["obs"])


def test_observation_statistics_survive_export_bit_for_bit() -> None:
    batch = np.random.default_rng(0).normal(size=(9, 2, 2)).astype(np.float32)
    normalizer = ObsNormalizer.for_space(BOX, clip=5.0).absorb({"obs": batch}).settle(0.3)
    state = normalizer.export()
    names = ["deviations", "mean", "scaling_inverse", "scaling_mean", "weight"]
    assert sorted(state) == [f"obs.{name}" for name in names]
    assert all((x.dtype == np.float32) == ("scaling" in name) for name, x in state.items())
    again = ObsNormalizer.for_space(BOX, clip=5.0).restore(state)
    for one, two in ((again, normalizer), (again.settle(), normalizer.settle())):
        assert np.array_equal(one.apply({"obs": batch})["obs"], two.apply({"obs": batch})["obs"])


def test_statistics_of_version_0_1_were_always_in_force() -> None:
    batch = np.random.default_rng(0).normal(size=(9, 2, 2)).astype(np.float32)
    normalizer = ObsNormalizer.for_space(BOX).absorb({"obs": batch}).settle()
    old = {name: x for name, x in normalizer.export().items() if "scaling" not in name}
    again = ObsNormalizer.for_space(BOX).restore(old)
    assert np.array_equal(
        again.apply({"obs": batch})["obs"], normalizer.apply({"obs": batch})["obs"]
    )


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = ObsNormalizer.for_space(spaces.Box(-1, 1, (3,))).export()
    with pytest.raises(InputError, match=r"obs: expected statistics of shape \[2\], got \[3\]"):
        ObsNormalizer.for_space(BOX).restore(state)
    half = ObsNormalizer.for_space(BOX).export()
    del half["obs.scaling_mean"]
    with pytest.raises(InputError, match=r"lacks obs\.scaling_mean"):
        ObsNormalizer.for_space(BOX).restore(half)
    small = ObsNormalizer.for_space(BOX).export() | {"obs.scaling_mean": np.zeros(1)}
    with pytest.raises(InputError, match=r"obs: expected a scaling of shape \[2\], got \[1\]"):
        ObsNormalizer.for_space(BOX).restore(small)
    with pytest.raises(InputError, match=r"lacks obs\.weight"):
        ObsNormalizer.for_space(BOX).restore({})
    with pytest.raises(InputError, match=r"total: expected \[2\], got \[3\]"):
        RewardNormalizer.for_envs(2).restore(RewardNormalizer.for_envs(3).export())
    with pytest.raises(ShapeError, match=r"batch: expected \[\*lead, \*\[2\]\]"):
        ObsNormalizer.for_space(BOX).absorb({"obs": np.zeros((4, 3), np.float32)})
    with pytest.raises(ShapeError, match=r"reward: expected \[T, 2\]"):
        RewardNormalizer.for_envs(2).apply_rollout(np.zeros((4, 3)), np.zeros((4, 3), bool))


def test_rewards_by_hand() -> None:
    """γ = ½, rewards 1, 1, done, 1: R = 1, 1.5, 1; variance 1/18, so 1 becomes √18."""
    reward = np.ones((3, 1))
    done = np.array([[False], [True], [False]])
    scaled, after = RewardNormalizer.for_envs(1, gamma=0.5).apply_rollout(reward, done)
    assert np.allclose(scaled, np.sqrt(18.0))
    assert scaled.dtype == np.float32
    assert after.total.tolist() == [1.0]


def test_a_rollout_in_pieces_has_the_statistics_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    reward, done = rng.normal(size=(50, 4)), rng.random((50, 4)) < 0.1
    _, whole = RewardNormalizer.for_envs(4).apply_rollout(reward, done)
    _, first = RewardNormalizer.for_envs(4).apply_rollout(reward[:20], done[:20])
    _, both = first.apply_rollout(reward[20:], done[20:])
    assert np.allclose(whole.total, both.total)
    assert np.allclose(whole.moments.variance, both.moments.variance)
    assert float(first.moments.weight) == 80.0


def test_the_loop_over_environments_gives_the_same() -> None:
    rng = np.random.default_rng(2)
    reward, done = rng.normal(size=(30, 3)), rng.random((30, 3)) < 0.2
    sums = []
    for env in range(3):
        total = 0.0
        for row in range(30):
            total = total * 0.99 + reward[row, env]
            sums.append(total)
            total = 0.0 if done[row, env] else total
    scaled, _ = RewardNormalizer.for_envs(3, clip=None).apply_rollout(reward, done)
    assert np.allclose(scaled, reward / np.sqrt(np.var(sums) + 1e-8), rtol=1e-6)


def test_ignored_rows_of_rewards_are_as_if_they_were_not_there() -> None:
    rng = np.random.default_rng(3)
    reward, done = rng.normal(size=(20, 2)), rng.random((20, 2)) < 0.2
    plain, a = RewardNormalizer.for_envs(2).apply_rollout(reward, done)
    where = [5, 5, 11]
    wide = [np.insert(x, where, value, 0) for x, value in ((reward, 9.0), (done, True))]
    weight = np.insert(np.ones((20, 2)), where, 0.0, 0)
    masked, b = RewardNormalizer.for_envs(2).apply_rollout(*wide, weight)
    assert np.allclose(a.total, b.total)
    assert np.allclose(plain, masked[weight[:, 0] > 0])


def test_clipping_is_optional_and_zero_rewards_stay_zero() -> None:
    reward = np.zeros((10, 1))
    scaled, _ = RewardNormalizer.for_envs(1).apply_rollout(reward, np.zeros((10, 1), bool))
    assert not scaled.any()
    reward[5] = 1e6
    done = np.ones((10, 1), bool)
    clipped, _ = RewardNormalizer.for_envs(1, clip=2.0).apply_rollout(reward, done)
    free, _ = RewardNormalizer.for_envs(1, clip=None).apply_rollout(reward, done)
    assert clipped.max() == 2.0
    assert free.max() > 3.0


def test_reward_statistics_survive_export() -> None:
    rng = np.random.default_rng(0)
    reward, done = rng.normal(size=(10, 2)), np.zeros((10, 2), bool)
    _, state = RewardNormalizer.for_envs(2).apply_rollout(reward, done)
    again = RewardNormalizer.for_envs(2).restore(state.export())
    one, two = (s.apply_rollout(reward, done)[0] for s in (state, again))
    assert np.array_equal(one, two)
    assert isinstance(again.moments, RunningMoments)
