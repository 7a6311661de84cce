"""Logs are somebody else's files: whatever is in them, reading ends, in order, or with one line."""

from __future__ import annotations

import math
import tracemalloc
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.errors import KeelError
from keel.tracking.logs import FORMATS, FRAMEWORKS, Log, read_log
from keel.tracking.logs.text import LONGEST, number, python_mapping

NAMES = st.sampled_from(
    ["loss", "grad_norm", "actor/pg_loss", "train/approx_kl", "Mean reward", "step", "_step", "x y"]
)
VALUES = st.one_of(st.floats(width=32), st.integers(-(10**40), 10**40), st.text(max_size=9))
SCRAPS = st.sampled_from(
    [
        "| train/ | |",
        "|    approx_kl | 0.01 |",
        "step:59 - ",
        " Learning iteration 3/9",
        "   Mean reward: 2.5",
        "{'loss': ",
        '{"step": 3, "loss": ',
        "log_history",
        "\x1b[36m(main pid=3)\x1b[0m ",
        "\r",
        "nan",
        "#{}",
        "r,l,t",
        "}" * 9,
        "[" * 9,
        "'" * 9,
    ]
)
TEXTS = st.lists(st.one_of(SCRAPS, st.text(max_size=20)), max_size=12).map("\n".join)
LAYOUTS = st.sampled_from([None, *(name for name in FORMATS if name not in ("events", "keel"))])


def check(log: Log) -> None:
    for points in log.points.values():
        assert (np.diff(points.step) > 0).all()
        assert (points.step >= 0).all()
        assert not np.isnan(points.values).any()
        assert len(points.step) == len(points.values) <= log.rows
    assert all((np.diff(steps) > 0).all() for steps in log.nans.values())


@given(text=TEXTS, layout=LAYOUTS, framework=st.sampled_from([None, *FRAMEWORKS]))
def test_any_text_is_a_log_or_an_error_of_keel(
    tmp_path_factory: pytest.TempPathFactory, text: str, layout: str | None, framework: str | None
):
    path = tmp_path_factory.mktemp("logs") / "log.txt"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(KeelError):
        check(read_log(path, layout=layout, framework=framework))


@given(data=st.binary(max_size=200), layout=LAYOUTS)
def test_any_bytes_are_a_log_or_an_error_of_keel(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, layout: str | None
):
    path = tmp_path_factory.mktemp("logs") / "log.txt"
    path.write_bytes(data)
    with suppress(KeelError):
        check(read_log(path, layout=layout))


@given(data=st.dictionaries(NAMES, VALUES, max_size=6))
def test_a_printed_dictionary_gives_its_numbers(data: dict[str, object]):
    expected = {k: v for k, v in data.items() if isinstance(v, int | float)}
    found = python_mapping(f"12:00 {data} <- printed") or {}
    for name, value in expected.items():
        assert found[name] == float(value) or math.isnan(found[name])
    words = {k: v for k, v in data.items() if isinstance(v, str)}
    assert all(number(str(words[name])) == found[name] for name in words if name in found)


def test_lines_that_are_made_to_take_long_do_not(tmp_path: Path):
    """Each of these, of a megabyte, would take hours where a pattern tried every way to read it."""
    size = LONGEST - 1_000
    lines = [
        "|" + " " * size,
        "| " * (size // 2),
        "{'a': " + "[" * size,
        "{'a': [" + "'\\" * (size // 2),
        "{'a': tensor(1" + ", " * (size // 2) + "!",
        "{'a': " + "-" * size,
        '{"a":' * (size // 5),
        '{"a": ' + "9" * size,
        "step:1 - " + "a:" * (size // 2),
        "step:1 - a:" + "np.float64(1" + ", x" * (size // 3) + "!)",
        " Learning iteration 1/2",
        " " * size + "a: 1",
        "a" * 100 + " - " * (size // 3),
        "(" + "a " * (size // 2) + "pid=1)",
        "\x1b[" * (size // 2),
        "\x1b[" + "0" * size,
        "a," * (size // 2),
    ]
    path = tmp_path / "log.txt"
    path.write_text("\n".join([*lines, "step:7 - actor/pg_loss:0.5 - actor/lr:1"]))
    log = read_log(path)
    assert log.points["train/policy_loss"].values.tolist() == [0.5]


def write_verl(path: Path, megabytes: int) -> None:
    """Write lines as verl prints them, of which most metrics are not Keel's."""
    rest = " - ".join(f"perf/some_long_name_of_a_timing_{i}:0.123456789" for i in range(60))
    with path.open("w") as file:
        for step in range(megabytes * 1_000_000 // (len(rest) + 60)):
            loss = step / 7
            file.write(f"step:{step} - actor/pg_loss:{loss} - actor/entropy:0.5 - {rest}\n")


def test_memory_does_not_grow_like_the_text(tmp_path: Path):
    peaks = []
    for megabytes in (4, 10):
        path = tmp_path / f"{megabytes}.log"
        write_verl(path, megabytes)
        tracemalloc.start()
        log = read_log(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(log.points["train/policy_loss"].step) == log.rows
    assert peaks[1] - peaks[0] < 0.05 * 6_000_000
