"""Verdicts: their criteria, and how often they are wrong about nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import ttest_ind

from keel.compare.intervals import improvement_interval, score_interval
from keel.compare.verdict import (
    Criteria,
    Effect,
    Problems,
    correct,
    decide,
    difference,
    effect_of,
    percent,
)

CALM = Problems(0.0, 1e-4)


def scores(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.float64)]


def test_the_effect_by_hand():
    """Means 10 and 12; variances 1 and 4, three runs each: error √(5/3) = 1.29, 2.94 degrees of
    freedom, t = 3.216, so 2 ± 4.15, and of 10 that is 0.2 ± 0.415."""
    effect = effect_of(scores(9.0, 10.0, 11.0), scores(10.0, 12.0, 14.0))
    assert effect.estimate == pytest.approx(0.2)
    assert effect.high - effect.estimate == pytest.approx(0.415, abs=2e-3)
    assert effect.low == pytest.approx(0.4 - effect.high)


def test_a_negative_baseline_keeps_the_sign_of_the_change():
    """From −200 to −150 is a gain of a quarter."""
    effect = effect_of(scores(-200.0, -200.0, -200.0), scores(-150.0, -150.0, -150.0))
    assert effect.estimate == pytest.approx(0.25)


def test_what_is_better_than_nothing_at_all_is_kept():
    """Five runs that never scored, against five that do: the variant's own size is the measure."""
    never, scored = scores(*[0.0] * 5), scores(924.5, 933.1, 923.2, 926.8, 925.8)
    effect = effect_of(never, scored)
    assert effect.estimate == pytest.approx(1.0)
    assert decide(effect, CALM, CALM).decision == "keep"
    assert decide(effect_of(never, never), CALM, CALM).decision == "not distinguishable"
    worse = effect_of(never, scores(-10.0, -11.0, -9.0, -10.0, -10.0))
    assert decide(worse, CALM, CALM).decision == "roll back"


def test_tasks_count_alike_whatever_their_scale():
    """+10 % of 10 and −10 % of 10,000 are nothing together."""
    old = [torch.full((3,), 10.0), torch.full((3,), 10_000.0)]
    new = [torch.full((3,), 11.0), torch.full((3,), 9_000.0)]
    assert effect_of(old, new).estimate == pytest.approx(0.0, abs=1e-6)


def test_from_five_runs_on_an_outlier_is_trimmed():
    old, new = scores(10.0, 10.0, 10.0, 10.0, 10.0), scores(10.0, 10.0, 10.0, 10.0, 900.0)
    assert difference(old, new).estimate == 0.0


@pytest.mark.parametrize(("before", "after"), [(4, 4), (5, 4), (4, 5)])
def test_below_five_runs_of_either_side_nothing_is_trimmed(before: int, after: int):
    """One run of 10 + 10 · n among n − 1 of 10: the mean is twice as high. A quarter of four is
    one run of each end, and would hide it."""
    old, new = scores(*[10.0] * before), scores(*[10.0] * (after - 1), 10.0 + 10.0 * after)
    assert effect_of(old, new).estimate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("effect", "decision", "said"),
    [
        (Effect(0.2, 0.05, 0.35, 5, 4), "keep", "better by 20 % (5.0 % to 35 %)"),
        (Effect(-0.2, -0.35, -0.05, 5, 4), "roll back", "worse by −20 %"),
        (Effect(-0.04, -0.06, -0.02, 9, 4), "slightly worse", "less than the 10 %"),
        (Effect(-0.10, -0.12, -0.08, 9, 4), "slightly worse", "less than the 10 %"),
        (Effect(-0.2, -0.5, 0.1, 5, 17), "not distinguishable", "includes no change"),
        (Effect(0.9, 0.8, 1.0, 2, 3), "not distinguishable", "2 runs of a side decide nothing"),
    ],
)
def test_scores_decide_as_far_as_their_interval_lets_them(effect: Effect, decision: str, said: str):
    verdict = decide(effect, CALM, CALM)
    assert verdict.decision == decision
    assert said in verdict.reasons[0]


def test_a_loss_that_is_certain_but_small_is_slightly_worse():
    """Means 100 and 95, variances 1: error √(2/3) = 0.816, t = 6.1 at four degrees of freedom."""
    effect = effect_of(scores(99.0, 100.0, 101.0), scores(94.0, 95.0, 96.0))
    assert (effect.estimate, effect.high < 0.0) == (pytest.approx(-0.05), True)
    assert decide(effect, CALM, CALM).decision == "slightly worse"
    assert decide(effect, CALM, CALM, Criteria(drop=0.04)).decision == "roll back"


def test_the_p_value_is_welchs():
    old, new = [9.0, 10.0, 11.0], [10.0, 12.0, 14.0]
    expected = float(ttest_ind(new, old, equal_var=False).pvalue)
    assert effect_of(scores(*old), scores(*new)).p == pytest.approx(expected, rel=1e-9)


def with_p(p: float, estimate: float = 0.2, seeds: int = 5) -> Effect:
    """An effect that counts alone, with this p-value."""
    low, high = sorted((0.1 * estimate, 1.9 * estimate))
    return Effect(estimate, low, high, seeds, 7, p, p)


def test_several_variants_are_corrected_by_holm():
    """Of 0.01, 0.04, 0.03 the smallest is tripled; 0.03 is doubled to 0.06, and 0.04 may not be
    below that. Alone, all three would have been kept."""
    effects = [with_p(0.01), with_p(0.04), with_p(0.03)]
    corrected = correct(effects)
    assert [effect.p_holm for effect in corrected] == pytest.approx([0.03, 0.06, 0.06])
    assert [effect.variants for effect in corrected] == [3, 3, 3]
    assert [decide(effect, CALM, CALM).decision for effect in effects] == ["keep"] * 3
    first, second, third = (decide(effect, CALM, CALM) for effect in corrected)
    assert (first.decision, second.decision) == ("keep", "not distinguishable")
    assert first.reasons == (
        "better by 20 % (2.0 % to 38 %; p = 0.03 after Holm's correction for 3 variants)",
    )
    assert third.reasons[0] == (
        "20 % (2.0 % to 38 %) would count alone (p = 0.03), but not as one of 3 variants: "
        "p = 0.06 after Holm's correction"
    )


def test_losses_are_corrected_too():
    small, large = correct([with_p(0.04, -0.05), with_p(0.001, -0.3)])
    assert decide(small, CALM, CALM).decision == "slightly worse"
    assert decide(large, CALM, CALM).decision == "roll back"
    doubtful, _ = correct([with_p(0.04, -0.05), with_p(0.5, -0.3)])
    assert decide(doubtful, CALM, CALM).decision == "not distinguishable"


def test_one_variant_and_those_of_too_few_runs_are_not_corrected():
    alone, few = correct([with_p(0.04), with_p(0.9, seeds=2)])
    assert (alone.p_holm, alone.variants, few.variants) == (0.04, 1, 1)
    assert decide(alone, CALM, CALM).decision == "keep"


def test_more_variants_need_more_seeds():
    """Two instead of one: from 1.96 + 0.84 standard errors to 2.24 + 0.84, squared."""
    one = effect_of(scores(9.0, 10.0, 11.0), scores(10.0, 12.0, 14.0))
    two, _ = correct([one, one])
    assert one.seeds_needed is not None
    assert two.seeds_needed is not None
    assert two.seeds_needed / one.seeds_needed == pytest.approx((3.083 / 2.802) ** 2, rel=0.05)


def test_variants_alike_are_rarely_told_apart_together():
    """Ten variants that are the baseline: any verdict in at most 7 % of 300 families."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(300):
        old, *others = (scores(*rng.normal(1000.0, 100.0, 5)) for _ in range(11))
        effects = correct([effect_of(old, new) for new in others])
        wrong += any(decide(x, CALM, CALM).decision != "not distinguishable" for x in effects)
    assert wrong <= 21


def test_the_seeds_that_would_be_needed_are_said():
    verdict = decide(Effect(-0.2, -0.5, 0.1, 5, 17), CALM, CALM)
    assert "about 17 runs each" in verdict.reasons[1]


def test_the_seeds_needed_do_find_the_effect():
    """An effect of half a standard deviation is found in four of five experiments with 64 runs
    each (Cohen 1988)."""
    rng = np.random.default_rng(0)
    needed = []
    for _ in range(200):
        x, y = rng.normal(10.0, 1.0, 200), rng.normal(10.5, 1.0, 200)
        found = effect_of([torch.from_numpy(x)], [torch.from_numpy(y)]).seeds_needed
        needed.append(found if found is not None else math.inf)
    # the interquartile mean of normal scores is 0.83 as efficient as the mean: 64 / 0.83 = 77
    assert np.median(needed) == pytest.approx(77, rel=0.25)


def test_new_numeric_problems_send_a_better_variant_back():
    verdict = decide(Effect(0.2, 0.05, 0.35, 5, 4), CALM, Problems(3.0, 1e-4))
    assert verdict.decision == "roll back"
    assert "new numeric problems: 3 non-finite values" in verdict.reasons[0]


def test_old_numeric_problems_are_not_new():
    verdict = decide(Effect(0.2, 0.05, 0.35, 5, 4), Problems(2.0, 1e-4), Problems(3.0, 1e-4))
    assert verdict.decision == "keep"


def test_twice_as_slow_goes_back():
    slow = Problems(0.0, 2.1e-4)
    assert decide(Effect(0.2, 0.05, 0.35, 5, 4), CALM, slow).decision == "roll back"
    assert (
        decide(Effect(0.2, 0.05, 0.35, 5, 4), CALM, slow, Criteria(slowdown=3.0)).decision == "keep"
    )


def test_an_unknown_speed_is_no_reason():
    unknown = Problems(0.0, math.nan)
    assert decide(Effect(0.2, 0.05, 0.35, 5, 4), unknown, CALM).decision == "keep"
    assert decide(Effect(0.2, 0.05, 0.35, 5, 4), CALM, unknown).decision == "keep"


FAMILIES = {
    "normal": lambda rng, n: rng.normal(1000.0, 100.0, n),
    "skewed": lambda rng, n: 1000.0 * rng.lognormal(0.0, 0.5, n),
    "heavy tails": lambda rng, n: 1000.0 + 200.0 * rng.standard_t(3, n),
    "some seeds fail": lambda rng, n: (
        np.where(rng.random(n) < 0.3, 200.0, 1000.0) + rng.normal(0.0, 30.0, n)
    ),
}


@pytest.mark.parametrize("runs", [3, 5, 10])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_variant_is_rarely_told_from_itself(family: str, runs: int):
    """1,000 comparisons of one distribution with itself: at most 70 verdicts that claim to know."""
    rng = np.random.default_rng(runs)
    wrong = 0
    for _ in range(1000):
        x, y = ([torch.from_numpy(FAMILIES[family](rng, runs))] for _ in range(2))
        wrong += decide(effect_of(x, y), CALM, CALM).decision != "not distinguishable"
    assert wrong <= 70


def test_a_plain_bootstrap_of_three_runs_would_be_wrong_three_times_as_often():
    """Why there is Student's t: the interval of 3 + 3 resampled runs excludes 0 in a fifth."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(500):
        x, y = rng.normal(size=(2, 3))
        index = rng.integers(3, size=(2, 400, 3))
        low, high = np.quantile(y[index[1]].mean(1) - x[index[0]].mean(1), [0.025, 0.975])
        wrong += low > 0 or high < 0
    assert 0.15 < wrong / 500 < 0.30


def test_the_interval_of_a_group_is_students():
    """Below five runs of the mean: 10 ± 4.303·1/√3. From five on of what trimming leaves: 1, 2, 3,
    4, 10 winsorised are 2, 2, 3, 4, 4 with variance 1; error √(4·1/(3·2)), two degrees."""
    few = score_interval(scores(9.0, 10.0, 11.0))
    assert [float(x) for x in few] == pytest.approx([10.0, 7.516, 12.484], abs=1e-3)
    five = score_interval(scores(10.0, 1.0, 3.0, 2.0, 4.0))
    reach = 4.3027 * math.sqrt(4.0 / 6.0)
    assert [float(x) for x in five] == pytest.approx([3.0, 3.0 - reach, 3.0 + reach], abs=1e-3)


def test_a_probability_of_improvement_keeps_its_doubt_where_all_runs_are_better():
    """Three runs of each side: at θ̂ = 1 the low end solves (1 − θ)² = 2.776²·Var(θ)."""
    found = improvement_interval(scores(1.0, 2.0, 3.0), scores(4.0, 5.0, 6.0))
    low = float(found.low)
    assert (float(found.estimate), float(found.high)) == (1.0, 1.0)
    pairs = 1.0 + 2.0 * ((1.0 - low) / (2.0 - low) + low / (1.0 + low))
    assert (1.0 - low) ** 2 == pytest.approx(2.7764**2 * low * (1.0 - low) * pairs / 9.0, rel=1e-4)
    assert 0.1 < low < 0.5
    one = improvement_interval(scores(1.0), scores(2.0))
    assert [float(x) for x in one] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_the_interval_of_a_probability_holds_it(runs: int):
    """Normal scores, one standard deviation apart: P = Φ(1/√2) = 0.7602."""
    rng = np.random.default_rng(runs)
    held = 0
    for _ in range(400):
        x, y = scores(*rng.normal(0.0, 1.0, runs)), scores(*rng.normal(1.0, 1.0, runs))
        found = improvement_interval(x, y)
        held += bool(found.low <= 0.7602 <= found.high)
    assert held >= 0.93 * 400


def test_per_cents_are_short():
    assert [percent(x) for x in (0.0312, -0.25, 12.0, math.inf)] == [
        "3.1 %",
        "−25 %",
        "1,200 %",
        "∞",
    ]
