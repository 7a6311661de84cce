"""The proxy from its first to its last response."""

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


async def serve(router: Router, host: str, port: int, told: Callable[[str], None]) -> None:
    """Until a signal says to stop; responses under way are finished."""
    await router.start()
    runner = router.runner()
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, OverflowError) as error:
            raise InputError(_why_not(host, port, error)) from error
        where, given = runner.addresses[0][:2]
        told(f"http://{f'[{where}]' if ':' in where else where}:{given}")
        await _stopped()
    finally:
        await runner.cleanup()
        await router.close()


def _why_not(host: str, port: int, error: Exception) -> str:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"--port {port}: is taken on {host}; choose another one, or 0 for any that is free"
    return f"--host {host} --port {port}: cannot listen there ({error})"


async def _stopped() -> None:
    """By Ctrl-C or SIGTERM; a second one does not wait for responses."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    with contextlib.suppress(NotImplementedError):  # elsewhere Ctrl-C is an exception
        for number in signals:
            loop.add_signal_handler(number, stop.set)
    await stop.wait()
    log.warning("stopping: responses under way are finished")
    with contextlib.suppress(NotImplementedError):
        for number in signals:
            loop.remove_signal_handler(number)
