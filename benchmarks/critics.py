"""What a distributional critic costs: iterations of HalfCheetah with each, in turn, in one process.

python -m benchmarks.critics [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

from keel.config import from_dict
from keel.presets import preset_for
from keel.training.loop import iterate
from keel.training.session import initial_state, open_session

ENV = "HalfCheetah-v5"
CRITICS: Mapping[str, Mapping[str, Any]] = {
    "scalar": {"kind": "scalar"},
    "quantile (32)": {"kind": "quantile"},
    "ordered (32)": {"kind": "quantile", "ordered": True},
    "two-hot (101)": {"kind": "two_hot"},
    "HL-Gauss (101)": {"kind": "hl_gauss"},
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    base = preset_for(ENV)[1]
    sessions = {
        name: open_session(from_dict({"env": ENV, "critic": dict(critic), "threads": 1}, base))
        for name, critic in CRITICS.items()
    }
    states = {name: initial_state(session) for name, session in sessions.items()}
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for repeat in range(repeats + 2):
        for name, session in sessions.items():
            start = time.perf_counter()
            states[name], _, _ = iterate(session, states[name])
            if repeat >= 2:  # the first compile
                taken[name].append(time.perf_counter() - start)
    plain = statistics.median(taken["scalar"])
    for name, seconds in taken.items():
        typical = statistics.median(seconds)
        print(f"{name:<16} {1e3 * typical:7.1f} ms an iteration, {typical / plain - 1:+.1%}")
    for session in sessions.values():
        session.source.close()


if __name__ == "__main__":
    main()
