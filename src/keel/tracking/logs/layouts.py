"""Layouts of text logs: from lines to rows, in the names of the log.

| layout | who prints it |
|---|---|
| `table` | Stable-Baselines3, on the console |
| `steps` | verl: `step:59 - actor/kl_loss:0.012 - …` |
| `blocks` | rsl_rl and IsaacLab: `Learning iteration 3/1500` and lines `Mean reward: 1.23` |
| `dicts` | TRL and OpenRLHF: a Python dictionary a line |
| `jsonl` | verl's file logger, ms-swift, RLlib's `result.json`, W&B, anybody: an object a line |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from keel.tracking.logs.log import Row
from keel.tracking.logs.names import STEPS, Names, without_run
from keel.tracking.logs.text import MOST_VALUES, NUMBER, number, numbers, python_mapping
from keel.tracking.metrics import REGISTRY

Layout = Callable[[Iterable[str]], Iterator[Row]]

WIDEST = 1_000
"""Characters of a line of a table or of a block."""
_CELLS = re.compile(r"\|( {1,40})([^|]{1,300}?) *\| *([^|]{0,300}?) *\|\s*$")
_CUT = "..."
_SB3 = tuple(alias.name for m in REGISTRY.values() for alias in m.aliases.get("sb3", ()))


def read_table(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the tables that Stable-Baselines3 prints, a row each.

    A table ends with a line that is none of it, or where a name comes again.
    """
    values: dict[str, float] = {}
    section = ""
    for line in lines:
        match = _CELLS.search(line) if "|" in line and len(line) < WIDEST else None
        if match is None:
            if values:
                yield Row(None, values)
            values, section = {}, ""
            continue
        name, text = match[2], match[3]
        if name.endswith("/") and not text:
            section = name
            continue
        known = number(text)
        name = _whole_name(name if "/" in name else f"{section}{name}")
        if name in values:
            yield Row(None, values)
            values = {}
        if known is not None and len(values) < MOST_VALUES:
            values[name] = known
    if values:
        yield Row(None, values)


def _whole_name(name: str) -> str:
    """Return the name that was cut to `train/policy_gradient_...`, or that lost its section."""
    if name.endswith(_CUT):
        fitting = [known for known in _SB3 if known.startswith(name[: -len(_CUT)])]
    elif "/" not in name:
        fitting = [known for known in _SB3 if known.rpartition("/")[2] == name]
    else:
        return name
    return fitting[0] if len(fitting) == 1 else name


_STEP = re.compile(r"(?:^|[\s)\]:])step:\s*(\d{1,18}) - ")


def read_steps(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the lines that verl prints: `step:59 - actor/kl_loss:0.012 - …`."""
    for line in lines:
        match = _STEP.search(line) if "step:" in line else None
        if match is None:
            continue
        values = {}
        for part in line[match.end() :].split(" - ")[:MOST_VALUES]:
            name, _, text = part.strip().rpartition(":")
            known = number(text)
            if name and known is not None:
                values[name] = known
        yield Row(int(match[1]), values)


_ITERATION = re.compile(r"Learning iteration (\d{1,18})/\d{1,18}")
_LINE = re.compile(rf"^\s*([^\s:][^:]{{0,200}}):\s+({NUMBER})(?=s?\s*$| )")
_SECONDS = re.compile(r"(collection|learning):? ([\d.]+)s")
_TIMES = {"collection": "Collection time", "learning": "Learning time"}
_TOTALS = ("Total timesteps", "Total steps")


def read_blocks(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the blocks that rsl_rl prints, an iteration each.

    Its steps are the total of time steps; a block that was cut before that is given the one that
    would follow.
    """
    values: dict[str, float] = {}
    iteration, total, growth, is_open = 0, 0, 0, False

    def finish() -> Iterator[Row]:
        nonlocal total, growth
        told = next((int(values[name]) for name in _TOTALS if values.get(name, -1.0) >= 0.0), None)
        if told is not None:
            total, growth = told, told - total
        elif total:
            total += growth
        if values:
            yield Row(total or iteration, values)

    for line in lines:
        match = _ITERATION.search(line) if "Learning iteration" in line else None
        if match is not None:
            if is_open:
                yield from finish()
            values, iteration, is_open = {}, int(match[1]), True
            continue
        entry = _LINE.match(line) if is_open and ":" in line and len(line) < WIDEST else None
        if entry is None:
            continue
        if len(values) < MOST_VALUES:
            values[entry[1]] = float(entry[2])
        if entry[1] == "Computation":
            values |= {_TIMES[name]: float(text) for name, text in _SECONDS.findall(line[:300])}
    if is_open:
        yield from finish()


_GLOBAL_STEP = re.compile(r"[Gg]lobal[_ ]step:? (\d{1,18})[:,]")


def read_dicts(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the Python dictionaries that TRL, ms-swift and OpenRLHF print, one a line."""
    for line in lines:
        if "{" not in line or ":" not in line:
            continue
        values = python_mapping(line)
        if values:
            before = _GLOBAL_STEP.search(line)
            yield Row(int(before[1]) if before else None, values)


def read_json_lines(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the JSON objects of a text, one a line; numbers in objects in them as `a/b`."""
    for line in lines:
        start = line.find('{"')
        if start < 0:
            continue
        data = parse_json(line[start:])
        if data is None:
            continue
        step = None
        if isinstance(inner := data.get("data"), Mapping) and type(data.get("step")) is int:
            step, data = data["step"], dict(inner)  # verl's file logger
        values = numbers(data)
        flags = data.get("flags")
        if isinstance(flags, Mapping):  # of Keel, whose JSON knows no infinity
            values |= {str(n): float(x) for n, x in flags.items() if x in ("inf", "-inf")}
        yield Row(step, {without_run(name): value for name, value in values.items()})


def parse_json(text: str) -> dict[str, Any] | None:
    """Return a JSON object, with NaN and Infinity as Python writes them; None if it is none."""
    import msgspec

    try:
        data = msgspec.json.decode(text.rstrip())
    except (msgspec.MsgspecError, RecursionError):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return None
    return data if isinstance(data, dict) else None


LAYOUTS: dict[str, Layout] = {
    "table": read_table,
    "steps": read_steps,
    "blocks": read_blocks,
    "jsonl": read_json_lines,
    "dicts": read_dicts,
}
"""Layouts of text logs, by name; where two fit equally well, the first is taken."""
TITLES = {
    "table": "console tables",
    "steps": "console lines step:N - name:value",
    "blocks": "console blocks",
    "dicts": "a Python dictionary a line",
    "jsonl": "JSON lines",
}
FRAMEWORKS = {"table": "sb3", "steps": "verl", "blocks": "rsl_rl"}
"""Layouts that only one framework prints."""


def step_name(rows: list[Row], names: Names) -> str | None:
    """Return the name that counts the steps: one that all rows with metrics have, if there is one.

    Args:
        rows: From the beginning of a log.
        names: Those of the log.
    """
    counted = [row.values for row in rows if any(names.find(name) for name in row.values)]
    present = [name for name in STEPS if any(name in values for values in counted)]
    everywhere = [name for name in present if all(name in values for values in counted)]
    return next(iter(everywhere or present), None)


def with_steps(rows: Iterable[Row], name: str | None) -> Iterator[Row]:
    """Yield rows with their steps taken from one of their values."""
    for row in rows:
        value = row.values.get(name) if name and row.step is None else None
        if value is not None and value == value and abs(value) < 2.0**63:
            yield row._replace(step=int(value))
        else:
            yield row
