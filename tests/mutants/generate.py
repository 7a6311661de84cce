"""List the mutants of a file as JSON; run by the interpreter that has Cosmic Ray.

Input: {"path": FILE, "sample": N or null, "seed": TEXT, "only": [[operator, occurrence], ...] or
null, "without": [operator, ...]}. Output: {"count": how many the file has, "mutants": [...]}.
"""

from __future__ import annotations

import ast
import difflib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LIKELY = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul",
    "BitOr_BitAnd", "BitAnd_BitOr", "Delete_USub", "Delete_Not", "Delete_Invert",
    "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt",
    "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is",
)  # fmt: skip
"""Slips of the pen, one or two for every operator; all that the tool knows, eleven for each, would
take days and say the same."""
UNLIKELY = re.compile(rf"Replace(Binary|Unary|Comparison)Operator_(?!({'|'.join(LIKELY)})$)")
CORE = "core/"

Place = tuple[int, int]
"""Line and column."""


class Position(NamedTuple):
    """Where an operator of the tool can change the file."""

    operator: str
    occurrence: int
    begin: Place


def main() -> None:
    job = json.load(sys.stdin)
    path = Path(job["path"])
    source = path.read_text(encoding="utf-8")
    ignored = annotations(path)
    lines = source.splitlines()
    possible = [
        position
        for position in positions(source)
        if position.operator not in job["without"]
        and not any(begin <= position.begin < end for begin, end in ignored)
        and not is_bare_star(lines, position.begin)
    ]
    chosen = choose(possible, job["sample"], job["seed"], job["only"])
    mutants = [describe(source, position) for position in chosen]
    json.dump({"count": len(possible), "mutants": mutants}, sys.stdout)


def choose(
    possible: list[Position], sample: int | None, seed: str, only: list[list[Any]] | None
) -> list[Position]:
    """Return the named positions, or a random sample, or all of them, in the file's order."""
    if only is not None:
        named = {(operator, occurrence) for operator, occurrence in only}
        possible = [x for x in possible if (x.operator, x.occurrence) in named]
    elif sample is not None and sample < len(possible):
        possible = random.Random(seed).sample(possible, sample)
    return sorted(possible, key=lambda x: (x.begin, x.operator, x.occurrence))


def positions(source: str) -> Iterator[Position]:
    """Yield all that the tool's operators can change in a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    for name in operator_names():
        operator = get_operator(name)
        short = name.removeprefix(CORE)
        if UNLIKELY.match(short) or operator.arguments():
            continue
        found = (begin for node in nodes for begin, _ in operator().mutation_positions(node))
        for occurrence, begin in enumerate(found):
            yield Position(short, occurrence, begin)


def describe(source: str, position: Position) -> dict[str, Any]:
    """Return a mutant: its source, and the lines that differ."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator = get_operator(CORE + position.operator)()
    mutated = mutate_code(source, operator, position.occurrence)
    lines = list(difflib.ndiff(source.splitlines(), mutated.splitlines()))
    return {
        "operator": position.operator,
        "occurrence": position.occurrence,
        "line": position.begin[0],
        "before": changed(lines, "- "),
        "after": changed(lines, "+ "),
        "source": mutated,
    }


def changed(lines: list[str], sign: str) -> str:
    """Return the lines of one side of a comparison, without indentation."""
    return "\n".join(line[2:].strip() for line in lines if line.startswith(sign))


def is_bare_star(lines: list[str], begin: Place) -> bool:
    """Return whether an operator is none: the `*` before arguments that have to be named."""
    return lines[begin[0] - 1][begin[1] :].startswith("*,")


def annotations(path: Path) -> list[tuple[Place, Place]]:
    """Return where annotations begin and end: they are never evaluated, so nothing could notice."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [
        ((x.lineno, x.col_offset), (x.end_lineno or 0, x.end_col_offset or 0))
        for x in found
        if isinstance(x, ast.expr)
    ]


if __name__ == "__main__":
    main()
