"""What the machine has: looked up before something large is made."""

from __future__ import annotations

from pathlib import Path

from keel.errors import InputError


def free_bytes() -> int | None:
    """What the operating system says is available; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def expect_memory(what: str, needed: float, hint: str) -> None:
    """Refuse, before anything is allocated, what this machine cannot hold."""
    free = free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"{what}: needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; {hint}"
        )
