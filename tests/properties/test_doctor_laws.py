"""Laws of the doctor's rules: no log breaks them, and a diagnosis is JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import keel.doctor.rules  # noqa: F401
from keel.doctor.examine import examine
from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog, from_table
from keel.tracking.reader import MetricsTable

FRAMEWORKS = ("keel", "sb3", "cleanrl", "trl", "verl", "rllib", "rsl_rl", "csv")
READ = sorted(
    {n for r in RULES.values() for n in "|".join(r.needs).split("|") if not n.startswith(SETTING)}
)
KNOWN: dict[str, Any] = {
    "region.clip": 0.2,
    "region.target_kl": 0.01,
    "region.max_kl": 0.05,
    "region.certify": True,
    "region.epochs": 30,
    "region.minibatch": 64,
    "region.learning_rate": 1e-3,
    "region.kl_measure": "k1",
    "region.early_stop": "epoch",
    "region.value_coef": 0.5,
    "region.max_grad_norm": 0.5,
    "explore.entropy_coef": 0.01,
    "advantage.normalize": "batch",
    "kl.coef": 0.1,
    "sample.temperature": 0.7,
    "facts.actions": 4,
    "rollout_steps": 16,
    "envs.num": 2,
}
NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 1e-9, 0.5, 1e6, -1e6, math.inf, -math.inf, math.nan]),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.floats(0.0, 1.0),
)


@st.composite
def logs(draw: st.DrawFn) -> RunLog:
    """Return a log of any metrics that rules read, with any numbers."""
    rows = draw(st.integers(1, 50))
    names = draw(st.lists(st.sampled_from(READ), min_size=1, max_size=25, unique=True))
    columns = {}
    for name in names:
        few = draw(st.lists(NUMBERS, min_size=1, max_size=4))
        order = draw(st.sampled_from(["repeat", "tile", "sorted"]))
        values = np.resize(np.array(few), rows)
        if order == "repeat":
            values = np.repeat(np.array(few), math.ceil(rows / len(few)))[:rows]
        columns[name] = np.sort(values) if order == "sorted" else values
    table = MetricsTable(step=np.arange(1, rows + 1) * draw(st.integers(1, 5000)), columns=columns)
    known = draw(st.sets(st.sampled_from(sorted(KNOWN))))
    framework = draw(st.sampled_from(FRAMEWORKS))
    return from_table(table, framework, "drawn", settings={name: KNOWN[name] for name in known})


@settings(max_examples=300, deadline=None)
@given(logs())
def test_no_log_breaks_a_rule_and_the_diagnosis_is_strict_json(log: RunLog) -> None:
    diagnosis = examine(log)
    json.dumps(diagnosis.as_dict(), allow_nan=False)
    assert diagnosis.sentence
    assert str(diagnosis)
    assert not any(re.search(r"\{[a-z]", finding.cause) for finding in diagnosis.findings)


@settings(max_examples=100, deadline=None)
@given(logs(), st.randoms(use_true_random=False))
def test_the_order_of_metrics_changes_nothing(log: RunLog, random: Any) -> None:
    items = list(log.series.items())
    random.shuffle(items)
    other = RunLog(log.framework, log.layout, log.rows, dict(items), log.settings)
    ours, theirs = examine(log), examine(other)
    assert [f.rule for f in ours.findings] == [f.rule for f in theirs.findings]
    assert ours.verdict == theirs.verdict
