"""Client side of the reverse proxy: every request is read to its end, then forwarded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from keel.apps.serving.live.backends import Backend
from keel.apps.serving.live.connections import Connections, Runner, error_body
from keel.apps.serving.live.forwarding import Call, Forwarder, Refusal
from keel.apps.serving.live.guarded_policy import GuardedPolicy
from keel.apps.serving.live.headers import check_hosts, host_allowed
from keel.apps.serving.live.metrics import Metrics, gauges
from keel.apps.serving.proxy_options import Options

__all__ = ["Options", "Router"]

log = logging.getLogger("keel.route")
silence = logging.getLogger("keel.route.http")
silence.disabled = True  # the HTTP library quotes what it cannot parse

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """Reverse proxy with its policy and metrics; `open` it inside of a running loop.

    Args:
        backends: The servers.
        guarded_policy: Chooses a backend for each prompt.
        options: Settings of the proxy.
    """

    def __init__(
        self, backends: list[Backend], guarded_policy: GuardedPolicy, options: Options
    ) -> None:
        self.backends, self.guarded_policy, self.options = backends, guarded_policy, options
        self.metrics, self._hosts = Metrics(), check_hosts(options.allowed_hosts)
        self.connections = Connections(
            options.max_connections, options.header_seconds, self.metrics.count
        )
        self.app = web.Application(client_max_size=options.max_body, middlewares=[self._admit])
        self.app.router.add_get("/keel/metrics", self._tell_metrics)
        self.app.router.add_get("/keel/health", self._tell_health)
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    def open(self) -> None:
        """Get ready for requests, before anything is known of the backends."""
        self.forwarder = Forwarder(self.backends, self.guarded_policy, self.options, self.metrics)

    async def probe_backends(self) -> None:
        """Find the backends that answer."""
        await self.forwarder.start_monitoring()

    async def close(self) -> None:
        """Release all resources, after the last response."""
        await self.forwarder.close()

    def runner(self) -> web.AppRunner:
        """Return the server; a client that hangs up ends its request at the backend as well."""
        return Runner(
            self.app,
            self.connections,
            access_log=None,
            logger=silence,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=self.options.grace,
        )

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit a request once its headers are complete."""
        connection = self.connections.of(request)
        if connection is not None:
            connection.begin_request()
        try:
            if not host_allowed(request.headers, self._hosts):
                return self._refuse(421, "this host is not served here (--allowed-hosts)")
            return await handler(request)
        finally:
            if connection is not None:
                connection.end_request()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith("/") or request.path.startswith("/keel/"):
            return self._refuse(404, "there is no such path")
        try:
            body = await self._read_body(request)
            if isinstance(body, web.Response):
                return body
            answer = await self.forwarder.forward(Call(request, body))
        except Exception as error:  # the message may quote the request
            log.error("a request failed inside of the router: %s", type(error).__name__)
            return self._refuse(500, "failed at this request")
        if isinstance(answer, Refusal):
            return self._refuse(answer.status, answer.why)
        self.metrics.count("responses_total", status=str(answer.status))
        return answer

    async def _read_body(self, request: web.Request) -> bytes | web.Response:
        """Return the whole body, or the answer to a client whose body does not come."""
        try:
            return await asyncio.wait_for(request.read(), self.options.body_seconds)
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, f"bodies end at {self.options.max_body} bytes (--max-body)")
        except asyncio.TimeoutError:
            response = self._refuse(408, "the body took too long (--body-seconds)")
            response.force_close()
            return response
        except (web.RequestPayloadError, ConnectionError):
            return self._refuse(400, "the body broke off")

    def _refuse(self, status: int, why: str) -> web.Response:
        """Return an error in the format of OpenAI's servers."""
        self.metrics.count("responses_total", status=str(status))
        headers = {"Retry-After": "1"} if status == 503 else {}
        return web.json_response(error_body(status, why), status=status, headers=headers)

    async def _tell_metrics(self, request: web.Request) -> web.Response:
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        now = [
            *gauges(self.backends, self.guarded_policy),
            ("connections", {}, len(self.connections)),
        ]
        return web.Response(text=self.metrics.render(now), headers=kind)

    async def _tell_health(self, request: web.Request) -> web.Response:
        up = sum(own.up for own in self.backends)
        health = {"status": "ok" if up else "down", "up": up, "backends": len(self.backends)}
        return web.json_response(health, status=200 if up else 503)
