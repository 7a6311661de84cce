"""Arithmetic with whole numbers, `+`, `-`, `*` and parentheses: reading it, and finding all of it.

    sum     = product (("+" | "-") product)*
    product = atom ("*" atom)*
    atom    = number | "(" sum ")"

No sign before a number, no spaces, no leading zeros.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from keel.errors import InputError

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MOST_CHARACTERS = 200
"""Longest text that is read: depth of recursion and size of numbers stay bounded."""
NO_NUMBER = re.compile(r"\b0[0-9]|[0-9]{7}")
"""A leading zero, or more than six digits."""


class Evaluated(NamedTuple):
    """The value of an expression, and the numbers in it from left to right."""

    value: int
    numbers: tuple[int, ...]


def evaluate(text: str) -> Evaluated:
    """Read an expression, or raise an `InputError` where it is none; nothing of it is executed.

    Examples:
        >>> evaluate("2*(3+4)-5")
        Evaluated(value=9, numbers=(2, 3, 4, 5))
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"expression: {len(text)} characters, at most {MOST_CHARACTERS} are read")
    if not re.fullmatch(r"[0-9+*()-]+", text) or NO_NUMBER.search(text):
        raise InputError(f"expression {text!r}: expected whole numbers, operators and parentheses")
    try:
        numbers: list[int] = []
        return Evaluated(_value(ast.parse(text, mode="eval").body, numbers), tuple(numbers))
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: nested too deeply
        raise InputError(f"expression {text!r}: {error}") from None


def _value(node: ast.expr, numbers: list[int]) -> int:
    """Return the value of a part, and append its numbers from left to right."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise InputError(f"expression: expected a number or an operation, got {ast.unparse(node)}")
    left, right = (_value(part, numbers) for part in (node.left, node.right))
    return OPERATORS[type(node.op)](left, right)


class Expression(NamedTuple):
    """A text without needless parentheses, its value, and the operator applied last."""

    text: str
    value: int
    last: str
    """`+`, `-` or `*`; empty for a number"""


def expressions(numbers: Sequence[int]) -> Iterator[Expression]:
    """Yield all expressions of the numbers, each used once; a text may come more than once."""
    if len(numbers) == 1:
        yield Expression(str(numbers[0]), numbers[0], "")
        return
    places = range(len(numbers))
    for size in range(1, len(numbers)):
        for chosen in combinations(places, size):
            rest = [numbers[i] for i in places if i not in chosen]
            rights = list(expressions(rest))
            for left in expressions([numbers[i] for i in chosen]):
                for right in rights:
                    yield from _joined(left, right)


def _joined(left: Expression, right: Expression) -> Iterator[Expression]:
    yield Expression(f"{left.text}+{right.text}", left.value + right.value, "+")
    subtrahend = _bracketed(right) if right.last in ("+", "-") else right.text
    yield Expression(f"{left.text}-{subtrahend}", left.value - right.value, "-")
    factors = [_bracketed(x) if x.last in ("+", "-") else x.text for x in (left, right)]
    yield Expression("*".join(factors), left.value * right.value, "*")


def _bracketed(expression: Expression) -> str:
    return f"({expression.text})"
