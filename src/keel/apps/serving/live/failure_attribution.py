"""Attribution of failed requests: to a backend, or to the request itself.

A backend is not judged by one request. Another backend that serves the same request shows that the
first one failed; two that fail in the same way show that the request is to blame, and neither of
them is.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

FAILURES = 3
"""Failures of different requests, with no answer between them, that take a backend out."""
QUARANTINE = 30.0
"""Seconds for which a request that failed on two backends is not sent to any other."""
MOST_QUARANTINED = 1024
LARGE = 1 << 20
"""Bytes of a body that is hashed in a thread."""
UNREACHABLE = "cannot be reached"
"""Failure that is always the backend's own."""
BUSY = "answered 503"
"""Failure that two backends may report at the same time, whatever the request."""

_unique = itertools.count()


@dataclass(frozen=True)
class Failure:
    """Failed attempt of which the client has seen nothing.

    Args:
        kind: How the backend failed; two of one kind have failed in the same way.
        status: What a client is told if no other backend does better.
        sent: The backend has seen the request.
        again: The request may be sent to another backend.
    """

    kind: str
    status: int
    sent: bool = True
    again: bool = True


@dataclass
class FailureRecord:
    """Failures of a backend since its last answer."""

    failures: set[Hashable] = field(default_factory=set)
    """different requests that count against it"""
    suspicions: int = 0
    """failures of any request, its own fault or not: retries go where there are fewest"""

    def fail(self, request: Hashable) -> bool:
        """Count a failure, and return whether different requests have failed often enough.

        Args:
            request: Identifier of the request.
        """
        self.failures.add(request)
        return len(self.failures) >= FAILURES

    def answer(self) -> None:
        """Forget the failures: the backend has answered a request."""
        self.failures.clear()
        self.suspicions = 0


async def fingerprint(method: str, path: str, body: bytes) -> bytes:
    """Return 16 bytes that differ between different requests.

    Args:
        method: The HTTP method.
        path: Path and query, as received.
        body: The whole body; a large one is hashed in a thread.
    """
    start = hashlib.blake2b(f"{method} {path}\n".encode(errors="replace"), digest_size=16)
    if len(body) < LARGE:
        start.update(body)
    else:
        await asyncio.to_thread(start.update, body)  # which releases the interpreter's lock
    return start.digest()


def shared_failures(failures: Sequence[Failure]) -> set[str]:
    """Return the kinds in which at least two backends that saw a request have failed."""
    kinds = Counter(failure.kind for failure in failures if failure.sent)
    return {kind for kind, count in kinds.items() if count > 1}


def request_at_fault(failures: Sequence[Failure]) -> bool:
    """Return whether to stop sending a request: two backends have failed in the same way.

    Backends that say that they are busy (503) speak of themselves: others may still be asked.
    """
    return bool(shared_failures(failures) - {BUSY})


def attribute_failures(
    failures: Sequence[Failure], served: bool, request: bytes
) -> list[Hashable | None]:
    """Return what each failure counts as against its backend; None: nothing.

    Where another backend has served the request, the failure counts even if the same request has
    failed before. Where none has, it counts once for each different request, and not at all where
    two backends have failed in the same way.

    Args:
        failures: Of one request, one for each backend that was tried.
        served: Another backend has answered it.
        request: Its fingerprint.
    """
    shared = set() if served else shared_failures(failures)
    key: Hashable = next(_unique) if served else request
    return [key if x.sent and x.kind not in shared else None for x in failures]


class Quarantine:
    """Requests that have failed on two backends, for a while.

    Args:
        clock: Source of seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        while self._until and next(iter(self._until.values())) <= self._clock():
            self._until.popitem(last=False)
        return len(self._until)

    def __contains__(self, request: bytes) -> bool:
        return len(self) > 0 and request in self._until

    def add(self, request: bytes) -> None:
        """Keep a request from the backends from now on."""
        self._until[request] = self._clock() + QUARANTINE
        self._until.move_to_end(request)
        if len(self._until) > MOST_QUARANTINED:
            self._until.popitem(last=False)
