"""Rules of thermometer, consistency, numerics and trust region: each fires where it should."""

from __future__ import annotations

from dataclasses import replace

import cases_consistency
import cases_thermometer
import cases_trust_region
import numpy as np
import pytest
from logs import findings_of, make_log
from rule_case import Case

import keel.doctor.rules  # noqa: F401
from keel.apps.language.config import Language
from keel.config import Config
from keel.config.reading import to_dict
from keel.doctor.examine import examine
from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series
from keel.tracking.metrics import REGISTRY

CASES = (*cases_thermometer.CASES, *cases_consistency.CASES, *cases_trust_region.CASES)
FAMILIES = ("thermometer", "consistency", "numerics", "trust region")
MINE = [entry for entry in RULES.values() if entry.family in FAMILIES]


def name(case: Case) -> str:
    return f"{case.rule}-{case.framework}-{case.level}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_rule_speaks_with_the_numbers_of_its_log(case: Case) -> None:
    finding = findings_of(case.rule, case.log())
    assert finding is not None
    first = finding.evidence[0]
    assert finding.level == case.level
    assert first.value == pytest.approx(case.value)
    assert first.threshold == (None if case.threshold is None else pytest.approx(case.threshold))
    assert all(part in finding.cause for part in case.says), finding.cause


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_rule_is_silent_in_the_healthy_neighbor(case: Case) -> None:
    assert findings_of(case.rule, case.healthy()) is None


@pytest.mark.parametrize("case", CASES, ids=name)
def test_without_one_of_its_metrics_a_rule_is_skipped_and_says_which(case: Case) -> None:
    log = case.log()
    for need in RULES[case.rule].needs:
        names = need.split("|")
        without = replace(
            log,
            series={key: s for key, s in log.series.items() if key not in names},
            settings={k: v for k, v in log.settings.items() if SETTING + k not in names},
        )
        skipped = {entry.rule: entry.missing for entry in examine(without).skipped}
        assert any(names[0].removeprefix(SETTING) in text for text in skipped[case.rule])


def test_every_rule_has_a_case() -> None:
    assert {entry.id for entry in MINE} == {case.rule for case in CASES}


def test_every_finding_says_what_to_do_and_how_to_tell_other_causes() -> None:
    for case in CASES:
        finding = findings_of(case.rule, case.log())
        assert finding is not None
        assert finding.fix.text
        assert case.level == "usual" or finding.others or case.rule == "walk-backs-miscounted"
        assert all(suspect.test for suspect in finding.others)
        assert 0.0 < finding.confidence < 1.0
        for entry in finding.evidence[:1]:
            assert entry.threshold is None or entry.threshold_source, case.rule


def test_settings_to_change_are_settings_of_keel() -> None:
    known = _dotted(to_dict(Config())) | _dotted(to_dict(Language()))
    for case in CASES:
        finding = findings_of(case.rule, case.log())
        assert finding is not None
        for change in finding.fix.changes:
            assert change.setting in known, f"{case.rule}: {change.setting}"
            assert (change.to is None) != (change.times is None)


def test_settings_that_rules_read_are_settings_of_keel_or_facts() -> None:
    known = _dotted(to_dict(Config())) | _dotted(to_dict(Language()))
    for entry in MINE:
        for need in "|".join(entry.needs).split("|"):
            if need.startswith(SETTING) and not need.startswith(SETTING + "facts."):
                assert need.removeprefix(SETTING) in known, entry.id


def test_rules_that_one_row_is_enough_for_speak_from_one_row() -> None:
    spoken = set()
    for case in CASES:
        log = case.log()
        for at in range(log.rows):
            spoken |= set(_rules_found(_rows(log, at, at + 1)))
    assert spoken >= {
        "share-outside-0-1",
        "kl-negative",
        "explained-variance-over-1",
        "entropy-over-maximum",
        "replay-differs",
        "clipped-before-first-step",
        "illegal-actions",
        "ratio-mean-off",
        "sampler-gap-constant",
        "optimizer-empty",
        "gradient-vanishes",
        "loss-non-finite",
        "ratios-non-finite",
        "k3-explodes",
        "learning-rate-too-high",
        "clip-does-not-bound",
        "certificate-broken",
        "loss-zero-is-usual",
        "clip-zero-is-usual",
    }


def test_one_row_makes_a_rule_less_sure() -> None:
    for case in CASES:
        if case.rule not in ("learning-rate-too-high", "gradient-vanishes"):
            continue
        log = case.log()
        whole, row = findings_of(case.rule, log), findings_of(case.rule, _rows(log, 0, 1))
        if log.rows > 1 and whole is not None and row is not None:
            assert row.confidence < whole.confidence


@pytest.mark.parametrize(
    ("kl", "rate", "to", "times"),
    [
        (0.12, 5e-3, 1e-3, None),  # √(0.01 / 0.12) = 0.29: 1.4e-3, and 1e-3 is the most
        (0.16, 4e-4, 1e-4, None),  # √(0.01 / 0.16) = 0.25
        (1.0, None, None, 0.1),
        (1e4, None, None, 0.03),
    ],
)
def test_a_lower_learning_rate_goes_by_the_square_root_of_the_kl(
    kl: float, rate: float | None, to: float | None, times: float | None
) -> None:
    settings = {} if rate is None else {"region.learning_rate": rate}
    log = make_log({"train/approx_kl": kl, "train/clip_fraction": 0.45}, settings=settings)
    finding = findings_of("learning-rate-too-high", log)
    assert finding is not None
    (change,) = finding.fix.changes
    assert (change.to, change.times) == (to, times)


def test_a_higher_learning_rate_goes_by_the_square_root_of_the_kl() -> None:
    log = make_log({"train/approx_kl": 3e-9, "train/clip_fraction": 0.0})
    finding = findings_of("steps-too-small", log)
    assert finding is not None
    assert [change.times for change in finding.fix.changes] == [1000.0]  # √(3e-3 / 3e-9)


def test_the_name_in_the_log_tells_which_limit_holds() -> None:
    log = make_log({"train/sampler_ratio_mean": 1.2}, framework="trl")
    assert findings_of("sampler-ratio-off", log) is None
    series = replace(log["train/sampler_ratio_mean"], label="train/token_mult_prob_error")
    finding = findings_of("sampler-ratio-off", replace(log, series={series.name: series}))
    assert finding is not None
    assert (finding.level, finding.evidence[0].threshold) == ("watch", 1.05)


def test_a_penalty_in_the_reward_is_not_missed_in_the_loss() -> None:
    columns = {"train/kl_reference": 0.2, "train/loss": 0.01, "train/policy_loss": 0.01}
    log = make_log({**columns, "train/kl_coef": 0.1}, framework="verl")
    assert findings_of("beta-not-forwarded", log) is not None
    kl = replace(log["train/kl_reference"], label="actor/reward_kl_penalty")
    in_reward = replace(log, series={**log.series, kl.name: kl})
    assert findings_of("beta-not-forwarded", in_reward) is None


@pytest.mark.parametrize("framework", ["trl", "verl"])
def test_a_healthy_run_of_grpo_is_healthy(framework: str) -> None:
    rng = np.random.default_rng(0)

    def noisy(first: float, last: float, spread: float) -> list[float]:
        return list(np.linspace(first, last, 60) + spread * rng.standard_normal(60))

    columns = {
        "train/loss": noisy(0.0, 0.0, 1e-4),
        "train/gradient_norm": noisy(0.4, 0.3, 0.05),
        "train/clip_fraction": 0.0,
        "train/entropy": noisy(0.8, 0.4, 0.02),
        "train/learning_rate": list(np.linspace(1e-6, 0.0, 60)),
        "train/sampler_gap": noisy(0.015, 0.018, 0.001),
        "train/sampler_ratio_mean": noisy(1.0, 1.0, 0.01),
        "train/kl_k1": noisy(0.0, 0.0, 1e-4),
        "train/kl_reference": list(np.abs(noisy(0.0, 0.04, 1e-3))),
        "rollout/return_mean": noisy(0.2, 0.8, 0.05),
        "rollout/informative": noisy(0.7, 0.5, 0.05),
        "rollout/reward_std_group": noisy(0.3, 0.2, 0.02),
        "rollout/length_mean": noisy(200.0, 300.0, 10.0),
    }
    found = examine(make_log(columns, framework=framework))
    assert [finding.rule for finding in found.findings if finding.family in FAMILIES] == []
    assert {finding.rule for finding in found.usual} >= {
        "loss-zero-is-usual",
        "clip-zero-is-usual",
        "sampler-gap-is-usual",
        "k1-negative-is-usual",
    }


def test_a_cause_sets_its_consequences_aside() -> None:
    case = next(c for c in CASES if c.rule == "learning-rate-too-high" and c.rows > 1)
    diagnosis = examine(case.log())
    assert diagnosis.verdict == "sick"
    assert [finding.rule for finding in diagnosis.findings] == ["learning-rate-too-high"]
    assert {s.finding.rule for s in diagnosis.suppressed} == {"kl-over-target"}


def test_a_cause_is_as_bad_as_what_follows_from_it() -> None:
    columns = {
        "train/kl_requested": 0.3,
        "train/kl_exact": 0.05,
        "train/clip_fraction": 0.45,
        "train/kl_k1": 0.05,
        "train/log_ratio_max": 12.0,
    }
    quiet = {key: value for key, value in columns.items() if key != "train/log_ratio_max"}
    assert examine(make_log(quiet)).verdict == "watch"
    diagnosis = examine(make_log(columns))
    assert diagnosis.verdict == "sick"
    assert [finding.rule for finding in diagnosis.findings] == ["learning-rate-too-high"]


def test_nothing_is_concluded_from_a_metric_that_cannot_be_true() -> None:
    columns = {"train/clip_fraction": [*[0.9] * 19, 1.7], "train/approx_kl": [5.0] * 20}
    diagnosis = examine(make_log(columns, framework="sb3"))
    assert diagnosis.findings[0].rule == "share-outside-0-1"
    assert {"clip-does-not-bound"} <= {s.finding.rule for s in diagnosis.suppressed}


def test_metrics_that_rules_read_are_registered_or_come_from_elsewhere() -> None:
    for entry in MINE:
        for need in "|".join(entry.needs).split("|"):
            if not need.startswith(SETTING):
                assert need in REGISTRY or need in FOREIGN, f"{entry.id}: {need}"


FOREIGN = {
    "train/sampler_gap",
    "train/sampler_gap_max",
    "train/sampler_ratio_mean",
    "train/action_std",
    "train/gradient_effect",
    "train/parameters_trained",
    "train/entropy_max",
    "train/value_std",
    "train/dead_units",
    "train/kl_first_epoch",
    "train/kl_last_epoch",
    "rollout/reward_std_group",
    "rollout/reward_std",
    "rollout/reward_zero_share",
    "rollout/reward_clipped_share",
    "rollout/reward_abs_max",
    "rollout/reward_share_max",
    "rollout/truncated_share",
    "rollout/bootstrap_error",
    "rollout/obs_dead_dims",
    "rollout/illegal_actions",
}
"""Metrics that only other libraries log, or callbacks measure."""


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_unit_of_steps_and_of_rewards_changes_nothing(case: Case) -> None:
    log = case.log()
    if case.rule == "counter-goes-back":
        return  # it is about steps
    scaled = replace(log, series={key: _scaled(s) for key, s in log.series.items()})
    assert _rules_found(scaled) == _rules_found(log)


def _scaled(series: Series) -> Series:
    reward = series.name in ("rollout/return_mean", "rollout/reward_mean")
    return Series(series.name, series.label, 7 * series.step, series.values * (3 if reward else 1))


def _rules_found(log: RunLog) -> list[str]:
    return [entry.id for entry in MINE if not entry.missing(log) and entry.check(log) is not None]


def _rows(log: RunLog, start: int, end: int) -> RunLog:
    steps = np.unique(np.concatenate([s.step for s in log.series.values()]))[start:end]
    series = {}
    for key, s in log.series.items():
        inside = np.isin(s.step, steps)
        if inside.any():
            series[key] = Series(s.name, s.label, s.step[inside], s.values[inside])
    return replace(log, series=series, rows=end - start)


def _dotted(data: dict[str, object], prefix: str = "") -> set[str]:
    found = set()
    for key, value in data.items():
        found.add(prefix + key)
        if isinstance(value, dict):
            found |= _dotted(value, f"{prefix}{key}.")
    return found


def test_a_search_that_accepts_another_objective_is_cured_by_a_setting() -> None:
    """Without an entropy bonus gradient and acceptance are of one objective, whatever the code."""
    columns = {"train/line_search_success": 0.0, "train/improvement_predicted": 0.01}
    known = {"rollout_steps": 64, "envs.num": 32}
    log = make_log(columns, settings={**known, "explore.entropy_coef": 0.05})
    finding = findings_of("line-search-fails", log)
    assert finding is not None
    assert [(c.setting, c.to) for c in finding.fix.changes] == [("explore.entropy_coef", 0.0)]
    finding = findings_of("line-search-fails", make_log(columns, settings=known))
    assert finding is not None
    assert [c.setting for c in finding.fix.changes] == ["region.max_kl", "natural.damping"]
