"""metrics.jsonl: what is written is strict JSON, and is read back exactly."""

from __future__ import annotations

import csv
import json
import math
import os
import re

import numpy as np
import pytest
import torch

from keel.errors import InputError
from keel.tracking import MetricsWriter, RunError, RunWarning, export_csv, last_values, read_metrics
from keel.tracking.writer import encode_line

NAN, INF = math.nan, math.inf


def strict(line):
    def refuse(token):
        raise AssertionError(token)

    record = json.loads(line, parse_constant=refuse)
    assert re.fullmatch("[0-9a-f]{8}", record.pop("crc"))
    return record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_line_is_strict_json_with_flags_for_what_json_cannot_hold():
    line = encode_line(5, {"a": 1.5, "b": NAN, "c": -INF, "d": True, "e": None, "f": "accepted"})
    assert line.endswith(b"\n")
    assert strict(line) == {
        "step": 5, "a": 1.5, "b": None, "c": None, "d": 1, "e": None, "f": "accepted",
        "flags": {"b": "nan", "c": "-inf"},
    }  # fmt: skip


def test_a_healthy_line_has_no_flags():
    assert strict(encode_line(0, {"a": 0.1})) == {"step": 0, "a": 0.1}


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_any_kind_are_written_as_numbers(value):
    assert strict(encode_line(0, {"a": value}))["a"] == 0.5


@pytest.mark.parametrize("value", [torch.zeros(2), [1], {}])
def test_what_is_no_number_is_named(value):
    with pytest.raises(InputError, match="metric 'train/x': expected one number"):
        encode_line(0, {"train/x": value})


@pytest.mark.parametrize("name", ["step", "flags", "dropped", "crc"])
def test_the_lines_own_names_cannot_be_metrics(name):
    with pytest.raises(InputError, match="the line's own"):
        encode_line(0, {name: 1.0})


def test_what_is_written_is_read_back_exactly(path):
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 0.1 + 0.2, "v": "accepted"})
        writer.write(2, {"a": INF, "b": NAN})
        writer.write(3, {"a": -INF, "b": 1e-300, "v": "rejected"})
    table = read_metrics(path)
    assert table.step.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(table["a"], [0.1 + 0.2, INF, -INF])
    np.testing.assert_array_equal(table["b"], [NAN, NAN, 1e-300])
    assert table.texts == {"v": ["accepted", None, "rejected"]}
    assert len(table) == 3
    assert (table.ignored, table.duplicates, table.nonstandard, table.dropped) == (0, 0, 0, 0)


def test_each_line_is_visible_at_once(path):
    writer = MetricsWriter(path)
    writer.write(1, {"a": 1.0})
    assert len(read_metrics(path)) == 1
    writer.close()
    with pytest.raises(RunError, match="closed"):
        writer.write(2, {})


def test_a_resumed_file_equals_an_uninterrupted_one(path, tmp_path):
    def metrics(step):
        return {"train/kl_exact": 0.01 / step, "train/kl_step": NAN if step == 3 else 0.5}

    whole = tmp_path / "whole.jsonl"
    with MetricsWriter(whole) as writer:
        for step in range(1, 7):
            writer.write(step, metrics(step))
    with MetricsWriter(path) as writer:
        for step in range(1, 6):  # dies after 5; its last checkpoint is of step 2
            writer.write(step, metrics(step))
    with path.open("ab") as file:
        file.write(b'{"step":6,"train/k')
    with MetricsWriter(path) as writer:
        assert writer.truncate_after(2) == 3
        for step in range(3, 7):
            writer.write(step, metrics(step))
    assert path.read_bytes() == whole.read_bytes()


def test_truncating_keeps_everything_where_nothing_is_later(path):
    with MetricsWriter(path) as writer:
        assert writer.truncate_after(9) == 0
        writer.write(1, {"a": 1})
        assert writer.truncate_after(1) == 0
        writer.write(2, {"a": 2})
    assert read_metrics(path).step.tolist() == [1, 2]


def test_truncating_removes_what_stands_between(path):
    path.write_bytes(b'{"step":1}\n{"step":9}\n{"half\n{"step":2}\n')
    with MetricsWriter(path) as writer:
        assert writer.truncate_after(2) == 2
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_the_last_values_are_found_at_the_end_of_a_long_file(path):
    with MetricsWriter(path) as writer:
        for step in range(3000):
            writer.write(step, {"a": step, "b": 7.0 if step == 2990 else NAN, "pad": "x" * 100})
        writer.write(3000, {"wide": "x" * 200_000})
    assert last_values(path, "a", "b") == (3000, [2999.0, 7.0], 0)


def test_a_run_without_metrics_is_an_error(tmp_path):
    with pytest.raises(RunError, match="no metrics here"):
        read_metrics(tmp_path)


def test_csv_export_leaves_missing_values_empty(path, tmp_path):
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 0.1, "v": "ok"})
        writer.write(2, {"a": NAN, "b": INF})
    target = tmp_path / "out.csv"
    export_csv(path.parent, target)
    with target.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["step", "a", "b", "v"], ["1", "0.1", "", "ok"], ["2", "", "inf", ""]]


def test_csv_export_into_a_missing_folder_is_an_error(path, tmp_path):
    MetricsWriter(path).close()
    with pytest.raises(RunError, match="cannot be written"):
        export_csv(path, tmp_path / "absent" / "out.csv")


def test_the_last_line_can_be_completed(path):
    """Byte for byte as if it had been written at once; lines before it stay as they are."""
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 1.0})
        writer.write(2, {"a": NAN, "b": -INF, "c": "accepted", "d": 0.1})
        before = path.read_bytes()
        writer.amend(2, {"eval": 3.0, "worst": NAN})
        writer.write(3, {"a": 1.0})
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[0] == before.splitlines(keepends=True)[0]
    whole = {"a": NAN, "b": -INF, "c": "accepted", "d": 0.1, "eval": 3.0, "worst": NAN}
    assert lines[1:] == [encode_line(2, whole), encode_line(3, {"a": 1.0})]


def test_a_line_that_becomes_shorter_leaves_nothing_behind_it(path):
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 0.123456789012345})
        writer.amend(1, {"a": 1.0})
        writer.write(2, {"a": 2.0})
    assert path.read_bytes() == encode_line(1, {"a": 1.0}) + encode_line(2, {"a": 2.0})


def test_what_completes_a_line_that_is_not_there_becomes_a_line(path):
    """The disk was full when it should have been written."""
    with MetricsWriter(path) as writer:
        assert writer.last() is None
        writer.amend(1, {"eval": 3.0})
        assert writer.last() == {"step": 1, "eval": 3.0}
        writer.amend(2, {"eval": 4.0})
    assert read_metrics(path)["eval"].tolist() == [3.0, 4.0]


def test_a_line_that_cannot_be_completed_stays_whole(path, monkeypatch):
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": 1.0})
        before = path.read_bytes()
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(before)]))
        with pytest.warns(RunWarning, match="the disk is full"):
            writer.amend(1, {"eval": 3.0})
        assert path.read_bytes() == before
        assert writer.dropped == 1
