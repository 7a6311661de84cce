"""A trained router in front of real servers: `keel route`.

* `prompts`: what a request asks to be read; `parsing`: the same for large bodies, elsewhere;
* `backends`: what is known of every server, and whether it answers;
* `guarded_policy`: the policy's choice, and the guards that may overrule it;
* `metrics`: what happened, for Prometheus;
* `server`: the reverse proxy towards clients; `connections`, `headers`: what it lets in;
* `forwarding`: the reverse proxy towards backends; `failure_attribution`: whose fault a failure is;
* `running`: from the start of the proxy to its end.
"""

from __future__ import annotations

from keel.errors import import_extra

import_extra("aiohttp", "serving")
