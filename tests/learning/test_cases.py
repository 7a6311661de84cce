"""Every case of `keel case`, shortened: the doctor names the cause, and the cure shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.cases import CASES, Case, Outcome, run_case
from keel.cases.figures import Compared, compare

RULES = {
    "kl-explosion": "replay-differs",
    "demos-dominate": "imitation-dominates",
    "line-search-collapse": "line-search-fails",
    "reward-hacking": "reward-hacked",
    "replica-collapse": "rewards-constant",
}
"""What the doctor should say first."""
BETTER = {
    "kl-explosion": {"train/kl_exact": 0.01, "train/ratio_outside": 0.2},
    "demos-dominate": {"rollout/return_mean": 10.0},
    "line-search-collapse": {"train/line_search_success": 1.5, "rollout/return_mean": 1.02},
    "reward-hacking": {"rollout/success": 2.0},
    "replica-collapse": {"rollout/return_std": 2.0},
}
"""Metrics that improve in every form, and by which factor at least, after over before."""


def check(case: Case, tmp_path: Path, form: str) -> tuple[Outcome, dict[str, Compared]]:
    """Run a case, and check finding and cure."""
    outcome = run_case(case, runs=tmp_path, form=form)
    assert outcome.finding.rule == RULES[case.name]
    assert outcome.finding.family == case.family
    assert RULES[case.name] not in {f.rule for f in outcome.cured.diagnosis.findings}
    assert outcome.html.stat().st_size > 5_000
    assert outcome.png.stat().st_size > 20_000
    rows = compare(case.shown, outcome.sick.path, outcome.cured.path)
    found = {row.shown.metric: row for row in rows}
    for metric, factor in BETTER[case.name].items():
        before, after = found[metric].values
        assert found[metric].improved
        enough = after <= factor * before if factor < 1.0 else after >= factor * before
        assert enough, (metric, before, after)
    return outcome, found


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_case_in_its_short_form(case: Case, tmp_path: Path) -> None:
    outcome, _ = check(case, tmp_path, "short")
    if case.stops:
        assert "wrong_actor" in outcome.stopped


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_case_in_its_usual_form(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, "usual")
