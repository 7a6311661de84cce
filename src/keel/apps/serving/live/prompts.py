"""What a request asks to be read, and which backend has probably read its begin before."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PIECE = 256
"""Characters of a piece of a prompt that may be cached."""
CHARACTERS = 4
"""Of a token, about: no router has time for a tokenizer."""
LARGE = 1 << 17
"""Bytes of a body that is read in a thread: it would hold up others' tokens."""
READ_PROMPT = ("tools", "prompt", "input", "messages")
READ_MESSAGE = ("role", "name", "content", "text", "tool_calls", "function", "arguments")


@dataclass(frozen=True)
class Prompt:
    """What routing needs to know of a request; the text itself is not kept."""

    tokens: int
    characters: int = 0
    pieces: tuple[int, ...] = ()
    """names of its whole pieces, each made of the one before and its own text"""


async def prompt_of(body: bytes) -> Prompt:
    """`read_prompt`, without holding up others."""
    return read_prompt(body) if len(body) < LARGE else await asyncio.to_thread(read_prompt, body)


def read_prompt(body: bytes) -> Prompt:
    """Of a request to an OpenAI-compatible server; whatever else it may be counts by its length."""
    try:
        asked = json.loads(body)
        texts = list(_texts([asked[key] for key in READ_PROMPT if key in asked]))
    except (ValueError, TypeError, RecursionError):
        return Prompt(max(1, len(body) // CHARACTERS))
    ids = sum(1 for text in texts if isinstance(text, int))
    whole = "".join(text if isinstance(text, str) else f"{text} " for text in texts)
    written = sum(len(text) for text in texts if isinstance(text, str))
    name = hash(str(asked.get("model"))) if isinstance(asked, dict) else 0
    pieces = []
    for at in range(0, len(whole) - PIECE + 1, PIECE):
        name = hash((name, whole[at : at + PIECE]))
        pieces.append(name)
    return Prompt(max(1, ids + written // CHARACTERS), len(whole), tuple(pieces))


def _texts(value: Any) -> Iterator[str | int]:
    """Texts and numbers of tokens, in their order; pictures and settings are left out."""
    if isinstance(value, str | int):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for key in READ_MESSAGE:
            if key in value:
                yield from _texts(value[key])


class Prefixes:
    """Pieces of prompts that a server has probably cached; the least recently used go first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._known: OrderedDict[int, None] = OrderedDict()

    def hit(self, prompt: Prompt) -> int:
        """Tokens at the begin of a prompt that need not be read; the last one always is."""
        found = 0
        for name in prompt.pieces:
            if name not in self._known:
                break
            found += PIECE
        share = found / prompt.characters if found else 0.0
        return min(int(prompt.tokens * share), prompt.tokens - 1)

    def keep(self, prompt: Prompt) -> None:
        """Known from now on, its end first to go."""
        for name in reversed(prompt.pieces[: self.room]):
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self.room:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """All of it: the server was away."""
        self._known.clear()
