"""Settings of the proxy in `live`, as flags of `keel route`.

They stand outside of `live`, so that `keel route --help` works without the extra.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from keel.errors import InputError


@dataclass(frozen=True)
class Options:
    """Settings of the proxy."""

    retries: int = 2
    """Other backends to try, as long as a client has seen nothing of an answer."""
    connect_seconds: float = 2.0
    """Seconds for a connection to a backend."""
    silent_seconds: float = 300.0
    """Seconds without any byte from a backend; without streaming there is none before the end."""
    max_body: int = 32 << 20
    """Largest body of a request in bytes."""
    poll: float = 0.0
    """Seconds between reading the backends' /metrics (vLLM's names); 0: never."""
    grace: float = 30.0
    """Seconds for responses under way when the router is stopped."""
    header_seconds: float = 10.0
    """Seconds for the headers of a request; a slower client is answered 408."""
    body_seconds: float = 60.0
    """Seconds for the body of a request after its headers; a slower client is answered 408."""
    max_connections: int = 1_000
    """Open connections of clients; one more is answered 503."""
    allowed_hosts: Annotated[tuple[str, ...], arg(metavar="HOST HOST…")] = ()
    """Names in the Host header that are served, others are answered 421; by default all."""

    def __post_init__(self) -> None:
        for name in ("retries", "poll", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"--{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("connect_seconds", "silent_seconds", "header_seconds", "body_seconds",
                     "max_body", "max_connections"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: expected more than 0, got {getattr(self, name)}")
