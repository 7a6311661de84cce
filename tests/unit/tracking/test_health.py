"""Breaches of healthy ranges: what lasts is told, errors at once, and noise never."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import pytest

from keel.tracking.health import FINITE, Breach, Health, find_breaches
from keel.tracking.metrics import REGISTRY, Metric

CLIP, LOSS, SUCCESS = "train/clip_fraction", "train/loss", "train/line_search_success"
COUNT, WARNING = "error/non_finite_ratio_count", "warn/large_log_ratio"
NAN = math.nan


def watch(name: str, values: Iterable[float], **more: float) -> Health:
    """The health of a run with one metric, every hundred steps from 100 on."""
    health = Health()
    for number, value in enumerate(values, 1):
        health.update(100 * number, {name: value, **more})
    return health


def names(breaches: list[Breach]) -> list[str]:
    return [breach.metric for breach in breaches]


def test_a_breach_is_three_of_the_last_five() -> None:
    assert names(watch(CLIP, [0.6, 0.6]).breaches()) == []
    assert names(watch(CLIP, [0.6, 0.2, 0.6, 0.2, 0.6]).breaches()) == [CLIP]
    assert names(watch(CLIP, [0.6, 0.6, 0.2, 0.2, 0.2, 0.6]).breaches()) == []
    (breach,) = watch(CLIP, [0.2, 0.6, 0.2, 0.7, 0.61]).breaches()
    assert (breach.value, breach.low, breach.high) == (0.61, None, 0.3)
    assert (breach.since, breach.until, breach.outside, breach.window) == (200, None, 3, 5)
    assert str(breach) == "train/clip_fraction 0.61 above 0.3 since step 200 (rule of thumb)"


def test_since_stays_while_it_lasts_and_begins_anew_after_a_pause() -> None:
    (lasting,) = watch(CLIP, [0.6] * 40).breaches()
    assert (lasting.since, lasting.outside) == (100, 5)
    (again,) = watch(CLIP, [0.6] * 3 + [0.2] * 5 + [0.6] * 3).breaches()
    assert again.since == 900


@pytest.mark.parametrize("value", [0.3, 0.0])
def test_the_ends_of_a_range_are_healthy_and_a_small_clip_fraction_is(value: float) -> None:
    assert watch(CLIP, [value] * 9).summary() == []


def test_what_was_outside_for_a_quarter_of_the_run_is_in_the_summary() -> None:
    """Held from the third value on, and by the rule for two more: 4 − 2 + 2 = 4 of 16."""
    health = watch(CLIP, [0.6] * 4 + [0.2] * 12)
    assert health.breaches() == []
    (breach,) = health.summary()
    assert (breach.since, breach.until, breach.outside) == (100, 400, 0)
    assert str(breach) == "train/clip_fraction 0.6 above 0.3 from step 100 to 400 (rule of thumb)"
    assert watch(CLIP, [0.6] * 4 + [0.2] * 13).summary() == []


def test_an_error_is_told_at_once_and_not_forgotten() -> None:
    health = watch(COUNT, [0.0, 3.0])
    assert str(*health.breaches()) == (
        "error/non_finite_ratio_count 3 above 0 since step 200 (rule of thumb)"
    )
    later = watch(COUNT, [0.0, 3.0, *[0.0] * 98])
    assert later.breaches() == []
    assert names(later.summary()) == [COUNT]
    assert later.summary()[0].until == 200


@pytest.mark.parametrize("name", ["train/non_finite_gradients", "warn/ratio_all_nonfinite"])
def test_so_are_gradients_and_ratios_that_are_no_numbers(name: str) -> None:
    assert names(watch(name, [0.0, 1.0]).breaches()) == [name]
    assert watch(name, [0.0] * 9).summary() == []


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_told_at_once(value: float) -> None:
    (breach,) = watch(LOSS, [0.1, value]).breaches()
    assert str(breach) == "train/loss is not finite since step 200"
    assert json.loads(json.dumps(breach.as_dict(), allow_nan=False))["value"] is None
    (over,) = watch(LOSS, [value, *[0.1] * 50]).summary()
    assert str(over) == "train/loss was not finite at step 100"


def test_elsewhere_nan_is_nothing_to_judge() -> None:
    """A warning that is NaN warns of nothing, also where others stand beside it."""
    assert watch(WARNING, [NAN] * 9).summary() == []
    assert watch(WARNING, [9.0, NAN, NAN, 9.0, NAN, NAN, 9.0]).summary() == []
    assert names(watch(WARNING, [9.0, NAN, 9.0, NAN, 9.0]).breaches()) == [WARNING]
    assert watch("train/gain_ratio", [NAN] * 9).summary() == []


def test_the_kl_is_held_against_the_bound_in_force() -> None:
    """Not against the 0.05 of the presets, and against that where no bound is known."""
    assert watch("train/kl_exact", [0.08] * 5, **{"train/max_kl": 0.1}).summary() == []
    (breach,) = watch("train/kl_exact", [0.02] * 5, **{"train/max_kl": 0.01}).breaches()
    assert (breach.high, breach.source) == (0.01, "Keel")
    assert names(watch("train/kl_exact", [0.08] * 5).breaches()) == ["train/kl_exact"]


def test_a_kl_far_over_its_bound_is_told_at_once_and_not_forgotten() -> None:
    """One update without a bound may ruin a policy, which then moves no more."""
    far, near = 0.51, 0.5  # of a bound of 0.05: more than ten times, and ten times
    health = watch("train/kl_exact", [0.01, far], **{"train/max_kl": 0.05})
    assert names(health.breaches()) == ["train/kl_exact"]
    assert watch("train/kl_exact", [0.01, near], **{"train/max_kl": 0.05}).breaches() == []
    quiet = [far, 0.06, *[0.0] * 98]
    (breach,) = watch("train/kl_exact", quiet, **{"train/max_kl": 0.05}).summary()
    assert str(breach) == "train/kl_exact 0.51 above 0.05 from step 100 to 200 (Keel)"


def test_the_line_search_is_judged_by_its_mean() -> None:
    """6 of 20 are the note's 30 %, 5 of 17 are below; so few as 9 updates say nothing."""
    assert watch(SUCCESS, [1.0] * 6 + [0.0] * 14).breaches() == []
    assert watch(SUCCESS, [0.0] * 9).breaches() == []
    health = watch(SUCCESS, [1.0] * 5 + [0.0] * 17)  # 3 of the last 20
    (breach,) = health.breaches()
    assert breach.value == pytest.approx(0.15)
    assert str(breach) == (
        "train/line_search_success 0.15 (mean of 20) below 0.3 since step 1,700 (rule of thumb)"
    )


def test_a_mean_says_of_how_many_it_is() -> None:
    (breach,) = watch(SUCCESS, [0.0] * 12).breaches()
    assert "0 (mean of 12) below 0.3 since step 1,000" in str(breach)


def test_metrics_that_are_not_there_are_not_judged() -> None:
    health = Health()
    for step in range(9):
        health.update(step, {"eval/episodes_cut": 4.0} if step == 8 else {})
    assert health.summary() == []


def test_errors_come_first() -> None:
    records = [(step, {CLIP: 0.9, COUNT: float(step == 4)}) for step in range(5)]
    assert names(find_breaches(records)) == [COUNT, CLIP]


def test_a_registry_of_ones_own() -> None:
    own = {"x": Metric("x", "x", "X.", "one", healthy=(1.0, None), healthy_note="me: at least 1")}
    (breach,) = find_breaches([(step, {"x": 0.5, CLIP: 0.9}) for step in range(3)], own)
    assert str(breach) == "x 0.5 below 1 since step 0 (me)"
    assert breach.as_dict() == {
        "metric": "x", "value": 0.5, "healthy": [1.0, None], "since": 0, "until": None,
        "outside": 3, "window": 3, "note": "me: at least 1",
    }  # fmt: skip


@pytest.mark.parametrize("name", [m.name for m in REGISTRY.values() if m.healthy is not None])
def test_every_range_says_where_it_comes_from(name: str) -> None:
    source, colon, meaning = REGISTRY[name].healthy_note.partition(": ")
    assert colon
    assert meaning
    assert source in {"rule of thumb", "TRL", "Keel"}


def test_what_must_be_finite_is_in_the_registry() -> None:
    assert set(FINITE) <= set(REGISTRY)
