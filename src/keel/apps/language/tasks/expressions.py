"""Arithmetic with whole numbers, `+`, `-`, `*` and parentheses: reading it, and finding all of it.

    sum     = product (("+" | "-") product)*
    product = atom ("*" atom)*
    atom    = number | "(" sum ")"

No sign before a number, no spaces, no leading zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from keel.errors import InputError

DIGITS = "0123456789"
MOST_CHARACTERS = 200
"""Longest text that is read: depth of recursion and size of numbers stay bounded."""
MOST_DIGITS = 6


class Evaluated(NamedTuple):
    """The value of an expression, and the numbers in it from left to right."""

    value: int
    numbers: tuple[int, ...]


def evaluate(text: str) -> Evaluated:
    """Read an expression, or raise an `InputError` that says where it is none.

    Examples:
        >>> evaluate("2*(3+4)-5")
        Evaluated(value=9, numbers=(2, 3, 4, 5))
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"expression: {len(text)} characters, at most {MOST_CHARACTERS} are read")
    reader = _Reader(text)
    value = reader.sum()
    if reader.next:
        raise reader.fault("an operator or the end")
    return Evaluated(value, tuple(reader.numbers))


class _Reader:
    """A position in a text, and what was read before it."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.position : self.position + 1]

    def take(self) -> str:
        character = self.next
        self.position += 1
        return character

    def fault(self, expected: str) -> InputError:
        character = repr(self.next) if self.next else "the end"
        return InputError(
            f"expression {self.text!r}: expected {expected} at position {self.position}, "
            f"found {character}"
        )

    def sum(self) -> int:
        value = self.product()
        while self.next and self.next in "+-":
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product()
        return value

    def product(self) -> int:
        value = self.atom()
        while self.next == "*":
            self.take()
            value *= self.atom()
        return value

    def atom(self) -> int:
        if self.next != "(":
            return self.number()
        self.take()
        value = self.sum()
        if self.next != ")":
            raise self.fault("')'")
        self.take()
        return value

    def number(self) -> int:
        start = self.position
        while self.next and self.next in DIGITS:
            self.take()
        digits = self.text[start : self.position]
        if not digits or len(digits) > MOST_DIGITS or (digits[0] == "0" and digits != "0"):
            self.position = start
            raise self.fault("a number or '('")
        self.numbers.append(int(digits))
        return self.numbers[-1]


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
