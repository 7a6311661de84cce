"""Trained router in front of real servers: `keel route`.

* `prompts`: prompts of requests, and their prefixes; `parsing`: large bodies, in a child process;
* `backends`: state of every server, and health checks;
* `guarded_policy`: the policy's choice, and the guards that may overrule it;
* `metrics`: counters and gauges for Prometheus;
* `server`: the reverse proxy towards clients; `connections`, `headers`: limits and filters;
* `forwarding`: the reverse proxy towards backends; `failure_attribution`: failures of backends or
  of requests;
* `running`: start and shutdown of the proxy.
"""

from __future__ import annotations

from keel.errors import import_extra

import_extra("aiohttp", "serving")
