"""Prompts of requests, and the prefixes that a backend has probably cached."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

PIECE = 256
"""Characters of a piece of a prompt, the unit of the prefix index."""
CHARACTERS = 4
"""Approximate characters of a token: a tokenizer would be too slow."""
READ_PROMPT = ("tools", "prompt", "input", "messages")
READ_MESSAGE = ("role", "name", "content", "text", "tool_calls", "function", "arguments")


@dataclass(frozen=True)
class Prompt:
    """Features of a prompt for routing; the text itself is not stored."""

    tokens: int
    characters: int = 0
    pieces: tuple[int, ...] = ()
    """names of its whole pieces, each made of the one before and its own text"""


def read_prompt(body: bytes) -> Prompt:
    """Parse the prompt of a request to an OpenAI-compatible server.

    Args:
        body: Of the request; a body in another format counts by its length.
    """
    texts: list[str] = []
    try:
        request = json.loads(body)
        ids, written = _gather([request[key] for key in READ_PROMPT if key in request], texts)
    except (ValueError, TypeError, RecursionError):
        return count_by_length(body)
    text = "".join(texts)
    name = _chain(0, str(request.get("model"))) if isinstance(request, dict) else 0
    pieces = []
    for at in range(0, len(text) - PIECE + 1, PIECE):
        name = _chain(name, text[at : at + PIECE])
        pieces.append(name)
    return Prompt(max(1, ids + written // CHARACTERS), len(text), tuple(pieces))


def count_by_length(body: bytes) -> Prompt:
    """Return a prompt of as many tokens as the bytes of a body that nothing else is known of."""
    return Prompt(max(1, len(body) // CHARACTERS))


def _chain(name: int, text: str) -> int:
    """Name a piece by its text and the name before it; the same in every process."""
    key = name.to_bytes(8, "little", signed=True)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little", signed=True)


def _gather(value: Any, texts: list[str]) -> tuple[int, int]:
    """Collect texts and ids of tokens in their order; pictures and settings are left out.

    Args:
        value: A part of a request.
        texts: Where to collect them; ids are written out.

    Returns:
        How many ids, and how many characters of texts there were.
    """
    if isinstance(value, str):
        texts.append(value)
        return 0, len(value)
    if isinstance(value, int):
        texts.append(f"{value} ")
        return 1, 0
    if isinstance(value, list) and set(map(type, value)) == {int}:  # millions, perhaps
        texts.append(" ".join(map(str, value)) + " ")
        return len(value), 0
    parts = value if isinstance(value, list) else []
    if isinstance(value, dict):
        parts = [value[key] for key in READ_MESSAGE if key in value]
    ids = written = 0
    for part in parts:
        more = _gather(part, texts)
        ids, written = ids + more[0], written + more[1]
    return ids, written


class Prefixes:
    """LRU index of the pieces of prompts that a server has probably cached.

    Args:
        capacity: Most pieces.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._known: OrderedDict[int, None] = OrderedDict()

    def hit(self, prompt: Prompt) -> int:
        """Return the cached tokens at the begin of a prompt; the last token is always read."""
        cached_characters = 0
        for name in prompt.pieces:
            if name not in self._known:
                break
            cached_characters += PIECE
        share = cached_characters / prompt.characters if cached_characters else 0.0
        return min(int(prompt.tokens * share), prompt.tokens - 1)

    def add(self, prompt: Prompt) -> None:
        """Add the pieces of a prompt; its end is evicted first."""
        for name in reversed(prompt.pieces[: self.capacity]):
            self._known[name] = None
            self._known.move_to_end(name)
        while len(self._known) > self.capacity:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Clear the index, after the server was down."""
        self._known.clear()
