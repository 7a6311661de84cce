"""Headers that a proxy passes on, and hosts that it answers to."""

from __future__ import annotations

from collections.abc import Sequence

from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from keel.errors import InputError

HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
OF_THE_ROUTER = frozenset(("host", "content-length", "expect"))
"""Headers of a request that the router writes itself."""


def end_to_end(
    headers: CIMultiDictProxy[str], drop: frozenset[str] = frozenset()
) -> CIMultiDict[str]:
    """Return the headers without those that are meant for the next neighbor only (RFC 9110, 7.6.1).

    Args:
        headers: As received; the names in every `Connection` header are dropped too.
        drop: More names to drop, in lower case.
    """
    listed = ",".join(headers.getall("Connection", ()))
    gone = HOP_BY_HOP | drop | {name.strip().lower() for name in listed.split(",")}
    return CIMultiDict((name, x) for name, x in headers.items() if name.lower() not in gone)


def host_allowed(headers: CIMultiDictProxy[str], allowed: Sequence[str]) -> bool:
    """Return whether a request names, exactly once, a host that the router answers to.

    Args:
        headers: Of the request.
        allowed: Names or addresses in lower case, without port; none allow every host.
    """
    if not allowed:
        return True
    hosts = headers.getall("Host", ())
    return len(hosts) == 1 and _name_of(hosts[0]) in allowed


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return host names for `host_allowed`, or raise an `InputError` for what is none.

    Args:
        hosts: Values of `--allowed-hosts`: names or addresses, without scheme, port or path.
    """
    names = []
    for host in hosts:
        name = _name_of(f"[{host}]" if host.count(":") > 1 and host[0] != "[" else host)
        if name is None or ":" in host.replace(name, "") or "*" in host:
            raise InputError(
                f"--allowed-hosts: {host!r} is no host; expected a name or an address, for example "
                "router.example.org, without scheme, port or path"
            )
        names.append(name)
    return tuple(names)


def _name_of(host: str) -> str | None:
    """Return the name in `name:port`, in lower case; None where there is none."""
    try:
        url = URL(f"//{host}")
        plain = url.host and url.user is None and not url.raw_path.strip("/")
        return url.host.lower() if plain and url.host and not url.query_string else None
    except ValueError:
        return None
