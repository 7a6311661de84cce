"""Settings of the proxy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keel.apps.serving.live.headers import check_hosts
from keel.errors import InputError


@dataclass(frozen=True)
class Options:
    """Settings of the proxy."""

    retries: int = 2
    """other backends to try"""
    connect_seconds: float = 2.0
    silent_seconds: float = 300.0
    """without any byte from a backend, before an answer or within it"""
    max_body: int = 32 << 20
    """bytes of a request"""
    poll: float = 0.0
    """seconds between reports of the backends; 0: none"""
    grace: float = 30.0
    """seconds for responses under way when the router stops"""
    header_seconds: float = 10.0
    """for the headers of a request"""
    body_seconds: float = 60.0
    """for the body of a request, after its headers"""
    max_connections: int = 1_000
    """of clients, at a time"""
    allowed_hosts: tuple[str, ...] = ()
    """names by which requests may address the router; none: any"""

    def __post_init__(self) -> None:
        for name in ("retries", "poll", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"--{name}: expected 0 or more, got {getattr(self, name)}")
        for name in ("connect_seconds", "silent_seconds", "header_seconds", "body_seconds",
                     "max_body", "max_connections"):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: expected more than 0, got {getattr(self, name)}")
        object.__setattr__(self, "allowed_hosts", check_hosts(self.allowed_hosts))
