"""`keel route`: a trained router in front of real servers."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from keel.apps.serving.proxy_options import Options
from keel.cli.arguments import read_options
from keel.errors import InputError, import_extra

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Route:
    """Send requests to OpenAI-compatible servers by a trained policy, inside of guards.

    The policy is overruled by a heuristic where it strays, fails or is late. `/keel/metrics` tells
    what happened, `/keel/health` whether anybody is there to answer.

    Examples: keel route --policy runs/NAME --backends http://10.0.0.1:8000 http://10.0.0.2:8000
              keel route --backends http://127.0.0.1:8001 http://127.0.0.1:8002
    """

    backends: Annotated[tuple[str, ...], arg(metavar="URL URL…")] = ()
    """The servers."""
    policy: Annotated[Path | None, arg(metavar="RUN")] = None
    """The folder of a run on `serving`; without one, the reference alone decides."""
    checkpoint: Annotated[str | None, arg(metavar="best|last|STEP")] = None
    """Checkpoint of the run; by default the best, or the last where there is no best."""
    host: str = "127.0.0.1"
    """Address to listen on; by default for this machine alone."""
    port: int = 8080
    """0: any that is free."""
    reference: str = "least-by-speed"
    """The heuristic that the policy is compared with, and that decides in its place."""
    max_kl: float = 0.5
    """Largest KL, in nats, between the policy's traffic and the reference's, over the window."""
    max_share: float = 0.6
    """Largest share of the decisions in the window that one backend may get."""
    window: int = 200
    """Number of decisions that both bounds look back on."""
    deadline_ms: float = 2.0
    """Milliseconds for a decision of the policy."""
    kv_tokens: int = 100_000
    """Tokens that the cache of a backend holds, about."""
    options: Annotated[Options, arg(name="")] = field(default_factory=Options)


def run(args: Sequence[str]) -> int:
    """Route until a signal; return 128 plus its number: 130 for Ctrl-C, 143 for SIGTERM."""
    chosen = read_options(Route, args, "keel route")
    import_extra("aiohttp", "serving")
    from keel.apps.serving.live.backends import make_backends
    from keel.apps.serving.live.guarded_policy import GuardedPolicy, Guards
    from keel.apps.serving.live.running import serve
    from keel.apps.serving.live.server import Router

    if not 0 <= chosen.port <= 65_535:
        raise InputError(f"--port: expected 0 to 65535, got {chosen.port}")
    if chosen.kv_tokens < 1:
        raise InputError(f"--kv-tokens: expected at least 1, got {chosen.kv_tokens}")
    backends = make_backends(chosen.backends, chosen.kv_tokens)
    guards = Guards(chosen.max_kl, chosen.max_share, chosen.deadline_ms / 1e3, chosen.window)
    guarded_policy = GuardedPolicy(len(backends), None, chosen.reference, guards)
    if chosen.policy is not None:
        from keel.apps.serving import load_scorer

        guarded_policy.policy = load_scorer(chosen.policy, chosen.checkpoint)
    _log_to_stderr()
    router = Router(backends, guarded_policy, chosen.options)
    return 128 + asyncio.run(serve(router, chosen.host, chosen.port, partial(_tell, chosen)))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s keel route: %(message)s"))
    log = logging.getLogger("keel.route")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def _tell(chosen: Route, address: str) -> None:
    who = (
        f"policy {chosen.policy}, held to {chosen.reference}" if chosen.policy else chosen.reference
    )
    count = len(chosen.backends)
    print(f"{address} → {count} backend{'s' * (count > 1)}, by {who}", flush=True)  # noqa: T201
    if chosen.host not in LOOPBACK:
        logging.getLogger("keel.route").warning(
            "listening on %s: whoever reaches it can use the backends, without a password",
            chosen.host,
        )
