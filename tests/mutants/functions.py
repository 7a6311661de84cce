"""The functions of a file: which are called, and how they get the code of a changed file."""

from __future__ import annotations

import ast
import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path


class Tracer:
    """Notes the first lines of the functions of a file that are called."""

    def __init__(self, path: str, calls: set[int]) -> None:
        self.path = path
        self.calls = calls

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_filename == self.path:
            self.calls.add(code.co_firstlineno)

    def __enter__(self) -> None:
        if self.path:
            sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        if self.path:
            sys.settrace(None)


def function_spans(source: str) -> list[tuple[range, range]]:
    """Return of every outermost function its lines with decorators, and those of its body."""
    spans = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                end = (node.end_lineno or 0) + 1
                spans.append((range(first, end), range(node.body[0].lineno, end)))
            else:
                waiting.append(node)
    return spans


def span_of(spans: list[tuple[range, range]], line: int) -> range | None:
    """Return the lines of the function whose body has a line; `None` for what runs at import."""
    return next((lines for lines, body in spans if line in body), None)


def functions_of(path: Path) -> list[types.FunctionType]:
    """Return all functions that were made from a file, wherever they are referred to."""
    found = [x for x in gc.get_objects() if type(x) is types.FunctionType]
    return [x for x in found if x.__code__.co_filename == str(path)]


def give_code(functions: list[types.FunctionType], source: str, path: str) -> None:
    """Let functions that exist already run the code of a changed source."""
    codes = {
        (code.co_name, code.co_firstlineno): code
        for code in codes_of(compile(source, path, "exec"))
    }
    for function in functions:
        code = function.__code__
        function.__code__ = codes[code.co_name, code.co_firstlineno]


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all that are inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)
