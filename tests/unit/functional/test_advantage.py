"""Advantages by hand: every number here can be checked on paper (γ = λ = ½ unless said)."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from keel.errors import InputError, ShapeError
from keel.functional import (
    dr_grpo,
    gae,
    grpo,
    n_step,
    normalize,
    reinforce_pp,
    reward_to_go,
    rloo,
    token_gae,
)

NAN, INF = math.nan, math.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

# The episode most examples share. Without an end: δ = (−½, 5/2, 5), and γλ = ¼.
REWARD, VALUE, LAST = [1.0, 2.0, 4.0], [2.0, 1.0, 3.0], 8.0


def rows(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def three_steps(columns: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Reward, value and last value of the shared episode, repeated in every column."""
    reward, value = (rows(*x, dtype=dtype)[:, None].repeat(1, columns) for x in (REWARD, VALUE))
    return reward, value, rows(LAST, dtype=dtype).repeat(columns)


@DTYPES
def test_gae_of_an_episode_that_goes_on_ends_or_is_cut_off(dtype):
    reward, value, last_value = three_steps(4, dtype)
    terminated = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    truncated = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    final_value = torch.where(truncated, 6.0, NAN).to(dtype)  # never read where not truncated

    result = gae(reward, value, last_value, terminated, truncated, final_value, gamma=0.5, lam=0.5)

    # In row 1: V(s₂) = 3 counts, nothing counts, the final 6 counts; both ends mean "terminated".
    expected = [[0.4375, -0.25, 0.5, -0.25], [3.75, 1.0, 4.0, 1.0], [5.0, 5.0, 5.0, 5.0]]
    assert torch.equal(result.advantage, torch.tensor(expected, dtype=dtype))
    assert torch.equal(result.target, result.advantage + value)


def test_gae_has_the_discounts_of_its_paper():
    one, never = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
    result = gae(one, 0 * one, one[0], never)
    # δ = (1, 1 + γ) and A₀ = δ₀ + γλ δ₁, to the last digits of float64
    assert_close(result.advantage, rows(1 + 0.99 * 0.95 * 1.99, 1.99), rtol=1e-15, atol=0)


def test_gae_steps_over_a_row_of_weight_zero():
    reward, value, never = rows(1, NAN, 2, 4), rows(2, INF, 1, 3), torch.zeros(4)
    result = gae(reward, value, rows(8)[0], never, gamma=0.5, lam=0.5, weight=rows(1, 0, 1, 1))
    assert torch.equal(result.advantage, rows(0.4375, 0, 3.75, 5))
    assert torch.equal(result.target, rows(2.4375, 0, 4.75, 8))


def test_gae_gradient_is_the_discount_of_every_step():
    reward, value = rows(*REWARD).requires_grad_(), rows(*VALUE)
    never = torch.zeros(3, dtype=torch.bool)
    gae(reward, value, rows(LAST)[0], never, gamma=0.5, lam=0.5).advantage[0].backward()
    assert torch.equal(reward.grad, rows(1, 1 / 4, 1 / 16))


def test_gae_passes_the_numerical_gradient_check():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(3)]
    last_value = torch.randn(2, generator=generator, dtype=torch.float64)
    terminated = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.bool)
    truncated = torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0]], dtype=torch.bool)
    weight = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1]])

    def advantages(reward, value, final_value, last_value):
        return gae(reward, value, last_value, terminated, truncated, final_value, weight=weight)

    variables = [x.requires_grad_() for x in (*inputs, last_value)]
    assert torch.autograd.gradcheck(advantages, variables)


@pytest.mark.parametrize(("n", "target"), [(1, (1.5, 3.5, 8)), (2, (2.75, 6, 8)), (9, (4, 6, 8))])
def test_n_step_returns(n, target):
    never = torch.zeros(3, dtype=torch.bool)
    result = n_step(rows(*REWARD), rows(*VALUE), rows(LAST)[0], never, n=n, gamma=0.5)
    assert torch.equal(result.target, rows(*target))
    assert torch.equal(result.advantage, rows(*target) - rows(*VALUE))


def test_n_step_looks_five_steps_ahead_unless_told():
    one, never = torch.ones(7, dtype=torch.float64), torch.zeros(7)
    result = n_step(one, 100 * one, one[0], never)
    assert_close(result.target[0].item(), sum(0.99**k for k in range(5)) + 100 * 0.99**5)


def test_n_step_returns_stop_at_episode_ends_and_skip_what_does_not_count():
    reward, value, last_value = three_steps(3)
    terminated = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0]])
    truncated = torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
    weight = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    final_value = torch.full_like(reward, 6.0)
    result = n_step(
        reward, value, last_value, terminated, truncated, final_value, n=2, gamma=0.5, weight=weight
    )
    # Row 0: 1 + ½·2, then also ¼·6 of the final state; skipping row 1, 1 + ½·4 + ¼·8.
    expected = torch.tensor([[2.0, 3.5, 5.0], [2.0, 5.0, 0.0], [8.0, 8.0, 8.0]]).double()
    assert torch.equal(result.target, expected)
    assert torch.equal(result.advantage, (expected - value) * weight)


def test_reward_to_go_restarts_after_a_termination():
    reward, terminated = rows(1, 2, 4, 8), torch.tensor([0, 1, 0, 0])
    assert torch.equal(reward_to_go(reward, terminated), rows(3, 2, 12, 8))
    assert torch.equal(reward_to_go(reward, terminated, gamma=0.5), rows(2, 2, 8, 8))


class TwoSteps(gymnasium.Env):
    """Every step pays 1, and the second ends the episode."""

    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.time, {}

    def step(self, action):
        self.time += 1
        return self.time, 1.0, self.time == 2, False, {}


def test_the_autoreset_row_of_gymnasium_does_not_count():
    envs = gymnasium.vector.SyncVectorEnv([TwoSteps])  # NEXT_STEP: a done is followed by a reset
    envs.reset()
    steps = [envs.step(np.zeros(1, dtype=np.int64)) for _ in range(6)]
    reward = torch.tensor(np.array([step[1] for step in steps]))
    terminated = torch.tensor(np.array([step[2] for step in steps]))
    weight = torch.cat([torch.ones(1, 1), 1.0 - terminated[:-1].float()])

    assert reward[:, 0].tolist() == [1, 1, 0, 1, 1, 0]
    # Without the weight, row 2 would be praised for the next episode: 2 instead of 0.
    assert reward_to_go(reward, terminated, weight=weight)[:, 0].tolist() == [2, 1, 0, 2, 1, 0]


def test_token_gae_sees_only_the_tokens_of_the_policy():
    #                     prompt  token  tool  token  padding
    weight = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]] * 2, dtype=torch.float64)
    reward = torch.tensor([[NAN, 1.0, INF, 2.0, NAN]] * 2, dtype=torch.float64)
    value = torch.tensor([[INF, 2.0, NAN, 4.0, NAN]] * 2, dtype=torch.float64)
    finished = token_gae(reward, value, weight, lam=0.5)
    cut_off = token_gae(reward, value, weight, lam=0.5, last_value=rows(8, 0))
    # δ = (1 + 4 − 2, 2 + 0 − 4); a sequence cut off at a state worth 8 has δ = (3, 2 + 8 − 4).
    assert finished.advantage.tolist() == [[0, 2, 0, -2, 0]] * 2
    assert finished.target.tolist() == [[0, 4, 0, 2, 0]] * 2
    assert cut_off.advantage.tolist() == [[0, 6, 0, 6, 0], [0, 2, 0, -2, 0]]


def test_token_gae_does_not_discount_unless_told():
    value = torch.zeros(1, 2, dtype=torch.float64)
    result = token_gae(torch.ones_like(value), value, torch.ones_like(value))
    assert_close(result.advantage, torch.tensor([[1.95, 1.0]], dtype=torch.float64))


SCORE, GROUP = (0.0, 0.0, 3.0, 5.0, 5.0, 7.0), (0, 0, 0, 1, 1, 2)


@DTYPES
@pytest.mark.parametrize(
    ("baseline", "first_group"),
    [
        (grpo, (-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3))),  # mean 1, variance 6/2
        (dr_grpo, (-1, -1, 2)),
        (rloo, (-1.5, -1.5, 3)),  # 0 − (0 + 3)/2 and 3 − (0 + 0)/2
    ],
)
def test_group_baselines_and_that_equal_or_lonely_scores_say_nothing(baseline, first_group, dtype):
    result = baseline(rows(*SCORE, dtype=dtype), torch.tensor(GROUP), 3)
    assert_close(result, rows(*first_group, 0, 0, 0, dtype=dtype))


@pytest.mark.parametrize("baseline", [grpo, dr_grpo, rloo])
def test_a_row_without_weight_gets_nothing_and_is_not_there_for_its_group(baseline):
    """Scores 1 and 3, and a 100 that does not count."""
    score, group = torch.tensor([1.0, 100.0, 3.0]), torch.zeros(3, dtype=torch.long)
    counted = torch.tensor([0, 2])
    advantage = baseline(score, group, 1, weight=torch.tensor([1.0, 0.0, 1.0]))
    torch.testing.assert_close(advantage[counted], baseline(score[counted], group[counted], 1))
    assert advantage[1] == 0.0


def test_reinforce_pp_divides_by_the_deviation_of_the_whole_batch():
    assert_close(reinforce_pp(rows(1, 2, 3)), rows(-1, 0, 1))
    assert_close(reinforce_pp(rows(1, 2, 3), torch.tensor([0, 0, 0])), rows(-1, 0, 1))
    with_baseline = reinforce_pp(rows(1, 3, 10, 14), torch.tensor([0, 0, 1, 1]), 2)
    assert_close(with_baseline, rows(-1, 1, -2, 2) / math.sqrt(10 / 3))


@DTYPES
@pytest.mark.parametrize("baseline", [grpo, dr_grpo, rloo, reinforce_pp])
@pytest.mark.parametrize("size", [1, 6, 7, 8, 3000])
def test_equal_scores_carry_no_signal_even_where_their_mean_rounds(baseline, size, dtype):
    levels = rows(0.1, 0.3, 0.9, 1e6, dtype=dtype)  # in float32, (0.3 + … + 0.3)/6 is not 0.3
    group = torch.arange(4).repeat_interleave(size)
    assert not baseline(levels[group], group, 4).any()


@DTYPES
@pytest.mark.parametrize("method", ["batch", "global", "group", "robust"])
@pytest.mark.parametrize("level", [0.0, 0.1, -0.7, 1e6, -3e-5])
@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_equal_advantages_become_zeros(method, level, size, dtype):
    same = torch.full((size,), level, dtype=dtype)
    result = normalize(same, method, group=torch.zeros(size, dtype=torch.long))
    assert not result.advantage.any()
    assert result.sign_flips == 0


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_difference_of_one_rounding_is_not_a_difference(sign):
    noise = sign * rows(0.1, 0.1, 0.1 + 2**-56)
    assert noise[2] != noise[0]
    assert not normalize(noise).advantage.any()


@pytest.mark.parametrize("method", ["batch", "global"])
def test_normalize_uses_the_standard_deviation_with_n_minus_one(method):
    advantage = rows(-2000, 1000, -500, 800)
    result = normalize(advantage, method, clamp=10.0)
    assert_close(result.advantage, (advantage + 175) / advantage.std())
    assert_close(result.advantage, rows(-1.3162, 0.8474, -0.2344, 0.7032), rtol=0, atol=5e-5)
    assert (result.center, result.scale) == (-175, advantage.std())


def test_normalize_counts_only_rows_with_weight():
    result = normalize(rows(1, NAN, 2, INF, 3), weight=rows(1, 0, 0.5, 0, 2))
    assert torch.equal(result.advantage, rows(-1, 0, 0, 0, 1))


def test_normalize_by_group_is_normalize_of_each_group():
    advantage, group = rows(1, 10, 2, 30, 3, 99), torch.tensor([0, 2, 0, 2, 0, -1])
    result = normalize(advantage, "group", group=group, groups=4, weight=rows(1, 1, 1, 1, 1, 0))
    half = math.sqrt(0.5)
    assert_close(result.advantage, rows(-1, -half, 0, half, 1, 0))
    assert_close(result.center, rows(2, 0, 20, 0))  # groups 1 and 3 are empty
    assert_close(result.scale, rows(1, 1e-8, 10 / half, 1e-8))


def test_normalize_by_batch_does_not_look_at_groups():
    advantage, group = rows(1, 2, 3), torch.tensor([0, 1, 2])
    assert torch.equal(normalize(advantage, group=group, groups=3).advantage, rows(-1, 0, 1))


def test_robust_is_distance_from_the_median_in_quartile_ranges():
    advantage = rows(5, 1, 1000, 2, 4)  # sorted 1 2 4 5 1000: median 4, IQR 5 − 2
    result = normalize(advantage, "robust")
    assert_close(result.advantage, (advantage - 4) / 3)
    assert (result.center, result.scale) == (4, 3)


def test_robust_falls_back_to_the_standard_deviation_where_the_quartiles_meet():
    result = normalize(rows(0, 0, 0, 0, 5), "robust")  # variance (4·1 + 16)/4 = 5
    assert_close(result.advantage, rows(0, 0, 0, 0, math.sqrt(5)))


def test_robust_knows_groups_and_weights():
    advantage, group = rows(1, 2, 3, 7, NAN, 9), torch.tensor([0, 0, 0, 1, 1, 1])
    weight = rows(1, 1, 1, 1, 0, 1)
    result = normalize(advantage, "robust", group=group, groups=3, weight=weight)
    assert torch.equal(result.advantage, rows(-1, 0, 1, -1, 0, 1))  # IQRs 1 and 1
    assert torch.equal(result.center, rows(2, 8, 0))


def test_none_leaves_advantages_but_masks_and_clamps():
    result = normalize(rows(-30, 4, NAN, 20), "none", weight=rows(1, 1, 0, 1), clamp=10.0)
    assert torch.equal(result.advantage, rows(-10, 4, 0, 10))
    assert (result.center, result.scale, result.sign_flips) == (0, 1, 0)


def test_the_clamp_acts_on_normalized_advantages():
    outlier = torch.zeros(121, dtype=torch.float64)
    outlier[0] = 1e6  # one among n stands at (n − 1)/√n deviations, here 120/11
    assert_close(normalize(outlier).advantage[0], rows(120 / 11)[0])
    assert normalize(outlier, clamp=10.0).advantage[0] == 10.0
    assert normalize(-outlier, clamp=10.0).advantage[0] == -10.0


def test_the_floor_bounds_the_scale_from_below():
    result = normalize(rows(1, 2, 3), floor=4.0)
    assert torch.equal(result.advantage, rows(-0.25, 0, 0.25))
    assert result.scale == 4.0
    assert normalize(rows(5, 5)).scale == 1e-8


@pytest.mark.parametrize(
    ("advantage", "weight", "flips"),
    [
        ((1, 2, 3, 10), (1, 1, 1, 1), 3),  # mean 4: three good actions are now blamed
        ((-1, -2, -3, -10), (1, 1, 1, 1), 3),
        ((-1, 0, 1), (1, 1, 1), 0),
        ((0, 1, 2), (1, 1, 1), 0),  # zero has no sign to lose, and 1 only became zero
        ((1, 2, 3, 10), (1, 0, 0, 1), 1),
    ],
)
def test_sign_flips_are_counted(advantage, weight, flips):
    assert normalize(rows(*advantage), weight=rows(*weight)).sign_flips == flips


@DTYPES
def test_normalize_is_finite_at_the_extremes(dtype):
    for size in (1e-18, 1e18):
        for method in ("batch", "robust"):
            result = normalize(rows(-size, 0, size, dtype=dtype), method, floor=1e-30)
            assert torch.equal(result.advantage, rows(-1, 0, 1, dtype=dtype))


def test_a_batch_that_does_not_count_is_all_zeros():
    for method in ("none", "batch", "group", "robust"):
        group = torch.zeros(2, dtype=torch.long)
        result = normalize(rows(NAN, 3), method, weight=rows(0, 0), group=group)
        assert torch.equal(result.advantage, rows(0, 0))
        assert result.center == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("value", r"value: expected shape \[3, 2\] \(that of reward\), got \[4\]"),
        ("terminated", r"terminated: expected shape \[3, 2\]"),
        ("truncated", r"truncated: expected shape \[3, 2\]"),
        ("final_value", r"final_value: expected shape \[3, 2\]"),
        ("weight", r"weight: expected shape \[3, 2\]"),
        ("last_value", r"last_value: expected shape \[2\] \(one row of reward\), got \[4\]"),
    ],
)
@pytest.mark.parametrize("estimator", [gae, n_step])
def test_shape_errors_name_the_argument(estimator, argument, message):
    arguments = {
        name: torch.zeros(3, 2)
        for name in ("reward", "value", "terminated", "truncated", "final_value", "weight")
    }
    arguments["last_value"] = torch.zeros(2)
    arguments[argument] = torch.zeros(4)
    with pytest.raises(ShapeError, match=message):
        estimator(**arguments)


def test_truncation_needs_a_final_value_and_the_other_way_round():
    step = torch.zeros(3)
    for extra in ({"truncated": step}, {"final_value": step}):
        with pytest.raises(InputError, match="truncated and final_value go together"):
            gae(step, step, step[0], step, **extra)


def test_other_errors_say_what_was_wrong():
    x, number = torch.zeros(3), torch.tensor(0.0)
    with pytest.raises(InputError, match="n: expected at least 1, got 0"):
        n_step(x, x, x[0], x, n=0)
    for estimate in (
        lambda: gae(number, number, number, number),
        lambda: n_step(number, number, number, number),
        lambda: reward_to_go(number, number),
    ):
        with pytest.raises(ShapeError, match=r"reward: expected \[T, \*lead\], got shape \[\]"):
            estimate()
    with pytest.raises(ShapeError, match=r"reward: expected \[B, L\], got shape \[3\]"):
        token_gae(x, x, x)
    with pytest.raises(ShapeError, match=r"value: expected shape \[1, 3\] \(that of reward\)"):
        token_gae(x[None], x, x[None])
    with pytest.raises(InputError, match=r"'robusst' is not one of .* did you mean 'robust'"):
        normalize(x, "robusst")
    with pytest.raises(InputError, match="group: method 'group' needs the group of every row"):
        normalize(x, "group")
    with pytest.raises(ShapeError, match=r"weight: expected shape \[3\] \(that of advantage\)"):
        normalize(x, weight=torch.ones(2))
    for baseline in (dr_grpo, rloo):
        with pytest.raises(ShapeError, match=r"group: expected shape \[3\] \(that of score\)"):
            baseline(x, torch.zeros(2, dtype=torch.long), 1)


def test_gae_compiles_into_one_graph():
    generator = torch.Generator().manual_seed(0)
    reward, value, final_value, coin = torch.randn(4, 8, 3, generator=generator)
    arguments = (reward, value, value[0], coin > 1, coin < -1, final_value)
    compiled = torch.compile(gae, fullgraph=True, backend="aot_eager")
    for weight in (None, (coin.abs() > 0.1).float()):
        assert_close(compiled(*arguments, weight=weight), gae(*arguments, weight=weight))


@pytest.mark.parametrize(
    ("method", "backend"),
    [("batch", "inductor"), ("group", "aot_eager"), ("robust", "aot_eager")],
)
def test_normalize_compiles_into_one_graph(method, backend):
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(8, 3, generator=generator)
    options = {"weight": torch.rand(8, 3, generator=generator).round()}
    if method == "group":
        options |= {"group": torch.arange(24).reshape(8, 3) % 4, "groups": 4}
    compiled = torch.compile(normalize, fullgraph=True, backend=backend)
    assert_close(compiled(advantage, method, **options), normalize(advantage, method, **options))


def test_a_nan_that_counts_is_not_silenced() -> None:
    """Zeros would hide it; as NaN it stops the update, whose gradient is then never applied."""
    assert normalize(torch.tensor([1.0, torch.nan, 2.0])).advantage.isnan().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8, 1e25, 1e37])
def test_normalize_does_not_care_about_the_scale(scale):
    """−1, 0, 1: mean 0, standard deviation 1; the squares of 1e25 are beyond float32."""
    advantage = scale * torch.tensor([-1.0, 0.0, 1.0])
    found = normalize(advantage, "batch", floor=0.0)
    torch.testing.assert_close(found.advantage, torch.tensor([-1.0, 0.0, 1.0]))
    assert found.scale.item() == pytest.approx(scale, rel=1e-6)


def test_normalize_is_not_silent_where_numbers_end():
    found = normalize(torch.tensor([-3e38, 3e38, 0.0]), "batch")
    assert not found.advantage.isfinite().all()
    assert not (found.advantage == 0.0).all()


def test_the_spread_is_the_plain_one_to_the_last_bit():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = normalize(x, "batch")
    mean = found.center[0]
    plain = (((x - mean) ** 2).sum(0, keepdim=True) / 999).sqrt()
    assert torch.equal(found.scale, plain)
