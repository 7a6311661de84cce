"""A trained router in front of real servers: `keel route`.

* `prompts`: what a request asks to be read;
* `backends`: what is known of every server, and whether it answers;
* `choosing`: the policy's choice, and the guards that may overrule it;
* `metrics`: what happened, for Prometheus;
* `server`: the reverse proxy itself; `running`: from its start to its end.
"""

from __future__ import annotations

from keel.errors import need

need("aiohttp", "serving")
