"""Limits on the connections of clients: how many there are, and how slowly headers may come.

aiohttp parses requests but waits for their headers as long as a client likes. Each connection is
therefore watched from outside, between the transport and aiohttp's own protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

log = logging.getLogger("keel.route")

LINGER = 0.5
"""Seconds that a refused client has to read its answer before the connection is closed."""
MOST_LINGERING = 64
"""Refused connections that linger at a time; more are closed at once."""
KEEP_ALIVE = 75.0
"""Seconds that an idle connection of a client stays open."""


def error_body(status: int, why: str) -> dict[str, object]:
    """Return an error in the format of OpenAI's servers.

    Args:
        status: The HTTP status.
        why: One line for the client.
    """
    return {"error": {"message": f"keel route: {why}", "type": "router", "code": status}}


def raw_error(status: int, why: str) -> bytes:
    """Return a complete HTTP answer for a connection that no request was read from.

    Args:
        status: The HTTP status.
        why: One line for the client.
    """
    body = json.dumps(error_body(status, why)).encode()
    retry = "Retry-After: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n"
    )
    return head.encode() + body


class Connections:
    """Open connections of clients, and their limits.

    Args:
        most: Connections at a time; one more is answered 503 and closed.
        header_seconds: Seconds from the first byte of a request to the end of its headers, and
            from the opening of a connection to the first of them.
        count: Called with the name of a metric for each refused connection.
    """

    def __init__(self, most: int, header_seconds: float, count: Callable[[str], None]) -> None:
        self.most, self.header_seconds, self.count = most, header_seconds, count
        self.lingering = 0
        self._open: dict[asyncio.BaseTransport, Connection] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, transport: asyncio.BaseTransport, connection: Connection) -> bool:
        """Remember a connection, and return True; where there is no room for it, return False.

        It is asked for each connection that is made, not when its protocol is: of connections that
        come together, the loop makes all protocols first.
        """
        if len(self) < self.most:
            self._open[transport] = connection
            return True
        self.count("refused_connections_total")
        if self.lingering == 0:
            log.warning("refusing connections: %d are open (--max-connections)", len(self))
        return False

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        self._open.pop(transport, None)

    def of(self, request: web.BaseRequest) -> Connection | None:
        """Return the connection of a request; None once it is closed."""
        transport = request.transport
        return None if transport is None else self._open.get(transport)


class Connection(asyncio.Protocol):
    """Connection of a client: passes data on to aiohttp, and closes when headers do not come.

    Args:
        connections: All of them.
        make: Makes the protocol of aiohttp that serves it, if there is room.
    """

    def __init__(self, connections: Connections, make: Callable[[], asyncio.Protocol]) -> None:
        self._all, self._make = connections, make
        self._timer: asyncio.TimerHandle | None = None
        self._busy = self._receiving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._all.admit(transport, self):
            refused = Refused(self._all)
            transport.set_protocol(refused)
            refused.connection_made(transport)
            return
        self._transport, self._inner = transport, self._make()
        self._wait_for_headers()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._receiving = True
        if not self._busy and self._timer is None:
            self._wait_for_headers()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._all.closed(self._transport)
        self._inner.connection_lost(exc)

    def begin_request(self) -> None:
        """Note that all headers of a request are there."""
        self._busy = True
        self._stop_waiting()

    def end_request(self) -> None:
        """Note that the answer is on its way: the next byte begins another request."""
        self._busy = self._receiving = False

    def _wait_for_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._all.header_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._all.count("slow_headers_total")
        if self._receiving and not self._transport.is_closing():
            self._transport.write(raw_error(408, "the headers took too long (--header-seconds)"))
        self._transport.close()


class Refused(asyncio.Protocol):
    """Connection above the limit: answered 503, and closed."""

    def __init__(self, connections: Connections) -> None:
        self._all = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._all.lingering += 1
        transport.write(raw_error(503, "too many connections (--max-connections)"))
        # Closed with unread bytes of a request, the kernel would reset the connection and the
        # client might never see the answer.
        soon = LINGER if self._all.lingering <= MOST_LINGERING else 0.0
        asyncio.get_running_loop().call_later(soon, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.lingering -= 1


class Runner(web.AppRunner):
    """Runs the application behind the limits of its connections."""

    def __init__(self, app: web.Application, connections: Connections, **settings: Any) -> None:
        super().__init__(app, keepalive_timeout=KEEP_ALIVE, **settings)
        self._connections = connections

    @property
    def server(self) -> Any:
        """Factory that a site calls for each new connection."""
        inner = super().server
        return None if inner is None else lambda: Connection(self._connections, inner)
