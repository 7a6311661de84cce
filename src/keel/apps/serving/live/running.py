"""Start and shutdown of the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Callable

from aiohttp import web

from keel.apps.serving.live.server import Router
from keel.errors import InputError

log = logging.getLogger("keel.route")

SPARE_DESCRIPTORS = 64
"""Open files and sockets besides two for each connection: to its client and to a backend."""


async def serve(router: Router, host: str, port: int, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal, finish the responses under way, and return the signal's number.

    Args:
        router: The proxy.
        host: Where to listen.
        port: Where to listen; 0: any that is free.
        on_ready: Called with the address once it accepts requests.
    """
    allow_descriptors(2 * router.options.max_connections + SPARE_DESCRIPTORS)
    router.open()
    runner = router.runner()
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, OverflowError) as error:
            raise InputError(_listen_error(host, port, error)) from error
        await (
            router.probe_backends()
        )  # after a taken port is told: backends that are silent take seconds
        where, bound_port = runner.addresses[0][:2]
        on_ready(f"http://{f'[{where}]' if ':' in where else where}:{bound_port}")
        return await _wait_for_signal()
    finally:
        await runner.cleanup()
        await router.close()


def _listen_error(host: str, port: int, error: Exception) -> str:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"--port {port}: is taken on {host}; choose another one, or 0 for any that is free"
    return f"--host {host} --port {port}: cannot listen there ({error})"


async def _wait_for_signal() -> int:
    """Wait for SIGINT or SIGTERM and return its number; a second one ends at once."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Queue[int] = asyncio.Queue()
    signals = (signal.SIGINT, signal.SIGTERM)
    with contextlib.suppress(NotImplementedError):  # elsewhere Ctrl-C is an exception
        for each in signals:
            loop.add_signal_handler(each, stop.put_nowait, int(each))
    number = await stop.get()
    log.warning("stopping: responses under way are finished")
    with contextlib.suppress(NotImplementedError):
        for each in signals:
            loop.remove_signal_handler(each)
    return number


def allow_descriptors(needed: int) -> None:
    """Raise the limit on open files as far as the system lets us; say so if that is not enough.

    Args:
        needed: Files and sockets that may be open at a time.
    """
    try:
        import resource
    except ImportError:  # not a Unix: there is no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # macOS says that there is no limit, and has one
        most = soft
    if most < needed:
        log.warning(
            "%d files may be open, --max-connections may need %d: lower it, or raise `ulimit -n`",
            most, needed,
        )  # fmt: skip
