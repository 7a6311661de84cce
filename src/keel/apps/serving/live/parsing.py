"""Parsing of large bodies in a child process.

A thread would not do: the JSON parser holds the interpreter's lock from the first to the last byte,
for a quarter of a second with 20 MB, and no tokens would be passed on meanwhile.

The child reads from its stdin until that is closed, so it never outlives the router:

    request: length (u64), body      answer: tokens (i64), characters (i64), count (u64), pieces
"""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
from array import array
from typing import BinaryIO

from keel.apps.serving.live.prompts import Prompt, count_by_length, read_prompt
from keel.processes import same_path

log = logging.getLogger("keel.route")

LARGE = 1 << 16
"""Bytes from which on a body is parsed in the child: less takes about a millisecond."""
CHUNK = 1 << 18
"""Bytes that are written to the child at a time."""
PATIENCE = 20.0
"""Timeout in seconds for one body; the first one also waits for the child to start."""
MOST_WAITING = 16
"""Bodies in the queue; more are counted by their length."""
REQUEST, ANSWER = struct.Struct("<Q"), struct.Struct("<qqQ")


class PromptParser:
    """Parser of prompts that does not block the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._tasks: set[asyncio.Task[Prompt]] = set()

    async def read(self, body: bytes) -> Prompt:
        """Return the prompt of a body; one that the child fails at counts by its length.

        Args:
            body: Of a request, in any format.
        """
        if len(body) < LARGE:
            return read_prompt(body)
        if len(self._tasks) >= MOST_WAITING:
            return count_by_length(body)
        # Shielded: a client that hangs up must not leave the child in the middle of a body.
        task = asyncio.ensure_future(self._read_elsewhere(body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the child."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()

    async def _read_elsewhere(self, body: bytes) -> Prompt:
        async with self._lock:
            try:
                return await asyncio.wait_for(self._ask(body), PATIENCE)
            except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                log.warning("a large body could not be parsed: %s", type(error).__name__)
                await self._end()
                return count_by_length(body)

    async def _ask(self, body: bytes) -> Prompt:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, *same_path(), "-m", "keel.apps.serving.live.parsing",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # a traceback might quote a body
                start_new_session=True,  # Ctrl-C is for the router
            )  # fmt: skip
        writer, reader = self._child.stdin, self._child.stdout
        assert writer is not None
        assert reader is not None
        writer.write(REQUEST.pack(len(body)))
        content = memoryview(body)
        for at in range(0, len(body), CHUNK):
            writer.write(content[at : at + CHUNK])
            await writer.drain()
        tokens, characters, count = ANSWER.unpack(await reader.readexactly(ANSWER.size))
        return Prompt(tokens, characters, _unpack(await reader.readexactly(8 * count)))

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()


def _pack(prompt: Prompt) -> bytes:
    head = ANSWER.pack(prompt.tokens, prompt.characters, len(prompt.pieces))
    return head + array("q", prompt.pieces).tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    pieces = array("q")
    pieces.frombytes(data)
    return tuple(pieces)


def answer_all(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more: the main loop of the child.

    Args:
        requests: Stream of bodies.
        answers: Stream of prompts.
    """
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        (length,) = REQUEST.unpack(head)
        answers.write(_pack(read_prompt(requests.read(length))))
        answers.flush()


if __name__ == "__main__":
    answer_all(sys.stdin.buffer, sys.stdout.buffer)
