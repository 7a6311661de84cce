"""`trainer_state.json` of Hugging Face's trainer (TRL, ms-swift), read entry by entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from keel.errors import RunError
from keel.tracking.logs.log import Row
from keel.tracking.logs.text import LONGEST, numbers

NAME = "trainer_state.json"
HISTORY = '"log_history"'
_BLOCK = 1 << 18
_DECODER = json.JSONDecoder()


def is_trainer_state(beginning: str) -> bool:
    """Return whether a text begins like this file; its keys are sorted."""
    return beginning.lstrip().startswith("{") and HISTORY in beginning


def read_trainer_state(path: Path) -> Iterator[Row]:
    """Yield the entries of `log_history`; those of evaluations have steps of their own.

    Only a block of the file is held at a time. A file that was cut off ends where it is cut.

    Args:
        path: The file.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = _skip_to_history(lambda: file.read(_BLOCK))
            if text is None:
                raise RunError(f"{path}: no {HISTORY} in it")
            yield from _entries(text, lambda: file.read(_BLOCK))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error


def _skip_to_history(read: Callable[[], str]) -> str | None:
    """Return what follows the `[` of the history; None if there is none."""
    text = ""
    while block := read():
        text = text[-len(HISTORY) - 20 :] + block
        at = text.find(HISTORY)
        if at >= 0:
            text = text[at:]
            while "[" not in text and len(text) < LONGEST and (block := read()):
                text += block
            return text.partition("[")[2]
    return None


def _entries(text: str, read: Callable[[], str]) -> Iterator[Row]:
    at = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] != "{":
            return
        try:
            entry, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            block = read() if len(text) - at < LONGEST else ""
            if not block:
                return
            text, at = text[at:] + block, 0
            continue
        values = numbers(entry)
        step = values.get("step", -1.0)
        yield Row(int(step) if 0.0 <= step < 2.0**63 else None, values)
