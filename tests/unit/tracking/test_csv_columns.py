"""Columns of a CSV file, block by block: equal to the plain way, and honest about what it drops."""

from __future__ import annotations

import csv
import math
import random
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from keel.tracking import RunError, csv_columns
from keel.tracking.csv_columns import read_columns


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "log.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path: Path, *names: str) -> csv_columns.Columns:
    return read_columns(path, lambda header, _: names or header)


def plain(path: Path) -> dict[str, list[float]]:
    """The same by `csv` and `float`."""

    def number(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            return math.nan

    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return {name: [number(row[i]) for row in rows if row] for i, name in enumerate(header)}


CELLS = {
    "numbers": lambda rng: repr(rng.gauss(0, 10 ** rng.randint(-300, 300))),
    "empty": lambda rng: rng.choice(["", "1", "2.5"]),
    "nan": lambda rng: rng.choice(["nan", "", "-7", "1e5"]),
    "words": lambda rng: rng.choice(["nan", "inf", "-inf", "x", "1e999", "+1", ".5", "007", "1_0"]),
    "quotes": lambda rng: rng.choice(['"a,b"', '"two\nlines"', '"say ""no"""', "3.25"]),
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_cell_is_read_as_float_reads_it(tmp_path: Path, monkeypatch, kind: str, newline: str):
    """In blocks so small that lines, and cells in quotes, are cut everywhere."""
    monkeypatch.setattr(csv_columns, "BLOCK", 97)
    rng = random.Random(kind)
    rows = [",".join(CELLS[kind](rng) for _ in range(4)) for _ in range(200)]
    path = write(tmp_path, newline.join(["a,b,c,d", *rows, ""]))
    columns = read(path)
    expected = plain(path)
    for name in "abcd":
        np.testing.assert_array_equal(columns.values[name], expected[name])
    assert columns.damage == []


def test_a_last_line_without_its_end_counts_if_it_is_whole(tmp_path: Path):
    assert read(write(tmp_path, "a,b\n1,2\n3,4")).values["b"].tolist() == [2.0, 4.0]


def test_lines_of_another_length_are_dropped_and_told(tmp_path: Path):
    columns = read(write(tmp_path, "a,b\n1,2\n3\n\n4,5,6\n7,8\n9"))
    assert columns.values["a"].tolist() == [1.0, 7.0]
    assert columns.lines.tolist() == [2, 6]
    assert columns.damage == [
        "3 lines with another number of fields than the header were dropped (lines 3, 5 and 7)"
    ]


def test_commas_that_are_only_right_on_average_are_noticed(tmp_path: Path):
    columns = read(write(tmp_path, "a,b,c\n1,2\n3,4,5,6\n7,8,9\n"))
    assert columns.values["c"].tolist() == [9.0]
    assert "(lines 2 and 3)" in columns.damage[0]


def test_a_cell_longer_than_the_limit_of_csv_costs_nothing(tmp_path: Path):
    """Python's `csv` refuses fields above 128 KB by default; its limit stays what it was."""
    limit = csv.field_size_limit()
    text = f'a,b\n1,"{"x" * 200_000}"\n2,{"y" * 200_000}\n3,4\n'
    columns = read(write(tmp_path, text))
    assert columns.values["a"].tolist() == [1.0, 2.0, 3.0]
    assert columns.damage == []
    assert csv.field_size_limit() == limit


def test_a_line_that_never_ends_is_passed_over(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(csv_columns, "BLOCK", 1000)
    monkeypatch.setattr(csv_columns, "LONGEST", 5000)
    columns = read(write(tmp_path, f"a,b\n1,2\n{'9' * 20_000}\n3,4\n"))
    assert columns.values["a"].tolist() == [1.0, 3.0]
    assert "1 line of more than" in columns.damage[0]
    assert "line 3" in columns.damage[0]


def test_a_quote_that_is_never_closed_does_not_take_minutes(tmp_path: Path):
    """Every line after it was once counted again for each line: a minute and a half for 2 MB."""
    path = write(tmp_path, 'a,b\n1,half "quote\n' + "2,words\n" * 250_000)
    begin = time.perf_counter()
    assert len(read(path, "a").lines) == 250_001
    assert time.perf_counter() - begin < 20.0


def test_bytes_that_are_no_utf8_cost_their_cell_only(tmp_path: Path):
    """Among them half characters, as some writers leave them."""
    columns = read(write(tmp_path, b"a,b\n1,2\n3,\xed\xa0\x80\n5,\xff\n"), "a", "b")
    assert columns.values["a"].tolist() == [1.0, 3.0, 5.0]
    assert columns.values["b"][0] == 2.0
    assert np.isnan(columns.values["b"][1:]).all()
    assert "2 lines are not UTF-8" in columns.damage[0]


@pytest.mark.parametrize("text", ["", "a,b\n", "a,b\n\n\n"])
def test_a_file_without_a_row_is_an_error(tmp_path: Path, text: str):
    with pytest.raises(RunError, match="no line of numbers"):
        read(write(tmp_path, text))


def test_memory_is_that_of_the_columns_that_are_asked_for(tmp_path: Path, monkeypatch):
    """Of 16 columns one is asked for: 5 thousand numbers, and a block."""
    monkeypatch.setattr(csv_columns, "BLOCK", 10_000)
    line = ",".join(["0.123456789"] * 16) + "\n"
    path = write(tmp_path, ",".join(f"c{i}" for i in range(16)) + "\n" + line * 5_000)
    read(path, "c3")
    tracemalloc.start()
    columns = read(path, "c3")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(columns.values["c3"]) == 5_000
    assert peak < path.stat().st_size / 2
