"""Diagnoses as text, as data and as a page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keel.doctor.chart import HEIGHT, POINTS, WIDTH, chart
from keel.doctor.examine import Diagnosis, examine
from keel.doctor.finding import evidence
from keel.doctor.page import page
from keel.doctor.run_log import RunLog, from_table
from keel.doctor.series import Series
from keel.doctor.text import as_text, table, worst_first
from keel.tracking.reader import MetricsTable

pytestmark = pytest.mark.usefixtures("two_rules")
GOOD = {"region__learning_rate": 0.001}


def make_log(columns: dict[str, list[float]], framework: str = "keel", **facts: float) -> RunLog:
    (rows,) = {len(values) for values in columns.values()}
    table = MetricsTable(np.arange(rows), {k: np.array(v) for k, v in columns.items()})
    settings = {name.replace("__", "."): value for name, value in facts.items()}
    return from_table(table, framework, "test", settings=settings)


def sick(framework: str = "sb3") -> Diagnosis:
    log = make_log({"train/approx_kl": np.linspace(0.01, 2.0, 50).tolist()}, framework=framework)
    return examine(replace(log, path=Path("logs/<i>run</i>"), notes=("a line was left out",)))


def healthy() -> Diagnosis:
    columns = {"train/approx_kl": [0.01] * 9, "rollout/return_mean": [5.0] * 9}
    return examine(make_log(columns, **GOOD))


def series(values: list[float]) -> Series:
    return Series("m", "m", np.arange(len(values)), np.array(values))


def test_the_first_line_is_the_verdict() -> None:
    assert as_text(healthy()).splitlines()[0] == "healthy: 2 rules looked, none found anything"
    assert as_text(sick()).splitlines()[0].startswith("sick: steps are too large: ")


def test_a_finding_has_evidence_fix_and_what_tells_causes_apart() -> None:
    text = as_text(sick())
    assert "train/approx_kl: above the bound, from the beginning" in text
    assert "▁" in text
    assert "█" in text
    assert "threshold: 0.03 — a <b>" in text
    assert "+ learning_rate=0.01 × its value  # PPO(…)" in text
    assert "or: too many epochs" in text
    assert "to tell: train with one" in text
    assert "rule far, confidence 80%, source: a test" in text
    assert "note: a line was left out" in text


def test_text_cannot_steer_a_terminal() -> None:
    assert "\x1b" not in as_text(sick())
    assert "\\x1b[31m" in as_text(sick())


def test_rules_that_could_not_speak_are_counted_or_listed() -> None:
    assert "2 rules could not speak" in as_text(sick())
    assert "facts.horizon" not in as_text(sick())
    assert "   earns: rollout/return_mean" in as_text(sick(), everything=True)
    assert "   horizon: facts.horizon" in as_text(sick(), everything=True)


def test_the_worst_run_comes_first() -> None:
    unknown = examine(make_log({"train/approx_kl": [0.01] * 9}, **GOOD))
    ordered = worst_first([healthy(), unknown, sick()])
    assert [d.verdict for d in ordered] == ["sick", "cannot tell", "healthy"]
    assert [row[0] for row in table([healthy(), sick()])] == ["sick", "healthy"]


def test_data_is_strict_json_with_the_patch() -> None:
    data = json.loads(json.dumps(sick().as_dict(), allow_nan=False))
    (finding,) = data["findings"]
    assert data["verdict"] == "sick"
    assert {"rule", "cause", "level", "evidence", "fix", "others", "onset"} <= set(finding)
    assert finding["fix"]["patch"] == [
        {"setting": "region.learning_rate", "name": "learning_rate", "where": "PPO", "old": None,
         "new": None, "times": 0.01, "note": None}
    ]  # fmt: skip
    assert {"rule": "horizon", "missing": ["facts.horizon"]} in data["skipped"]


def test_the_page_escapes_everything_and_needs_nothing_else() -> None:
    html = page([healthy(), sick()])
    assert "<script" not in html
    assert "<i>run" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;" in html
    assert "logs/&lt;i&gt;run" in html
    assert not re.search(r"(src|href)=['\"]?(http|//)", html)
    assert html.index("2 runs, the worst sick") < html.index("<svg")


def test_a_chart_marks_threshold_and_onset() -> None:
    data = series([1.0, 2.0, 3.0, 4.0, 5.0])
    svg = chart(evidence(data, "high", threshold=3.5, onset=3), data)
    assert "threshold 3.5" in svg
    assert "class=onset" in svg
    x = float(re.search(r"class=onset x1=([\d.]+)", svg)[1])  # type: ignore[index]
    y = float(re.search(r"class=threshold x1=\d+ x2=\d+ y1=([\d.]+)", svg)[1])  # type: ignore[index]
    points = [tuple(map(float, p.split())) for p in re.findall(r"[ML]([\d.]+ [\d.]+)", svg)]
    assert x == points[3][0]
    assert points[3][1] < y < points[2][1]  # between 3 and 4; y grows downwards
    assert all(0 <= a <= WIDTH and 0 <= b <= HEIGHT for a, b in points)


def test_a_long_series_keeps_its_extremes_and_its_faults() -> None:
    values = np.zeros(50_000)
    values[12_345], values[40_000], values[30_000] = 7.0, -7.0, np.nan
    data = series(values.tolist())
    svg = chart(evidence(data, ""), data)
    heights = [float(p.split()[1]) for p in re.findall(r"[ML]([\d.]+ [\d.]+)", svg)]
    assert len(heights) <= 1.5 * POINTS
    assert sorted(heights)[0] < sorted(heights)[1] <= sorted(heights)[-2] < sorted(heights)[-1]
    assert svg.count("class=fault") == 1


def test_orders_of_magnitude_get_a_logarithmic_axis() -> None:
    data = series([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    svg = chart(evidence(data, ""), data)
    heights = [float(p.split()[1]) for p in re.findall(r"[ML]([\d.]+ [\d.]+)", svg)]
    assert np.diff(heights) == pytest.approx(np.diff(heights).mean(), abs=0.2)


def test_nothing_is_drawn_of_a_single_value() -> None:
    data = series([1.0])
    assert chart(evidence(data, ""), data) == ""
    assert chart(evidence(data, ""), None) == ""


def test_a_chart_is_well_formed_when_attributes_are_quoted() -> None:
    data = series([1.0, 2.0, float("nan"), 3.0])
    svg = str(chart(evidence(data, "<&>'", threshold=2.0, onset=1), data))
    quoted = re.sub(r"=([\w.\-]+)(?=[ />])", r"='\1'", svg)
    assert ET.fromstring(quoted).tag == "svg"
