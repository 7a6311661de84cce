"""What `make mutants` keeps: `docs/data/mutants.json`, and its table in `docs/data/mutants.md`."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from modules import MODULES, group_of

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
NORMAL_95 = 1.959963984540054
GROUPS = list(dict.fromkeys(map(group_of, MODULES)))


class Tally(NamedTuple):
    """Mutants of one module or of several."""

    mutants: int = 0
    tried: int = 0
    timeouts: int = 0
    survived_first: int = 0
    survived: int = 0
    equivalent: int = 0

    def __add__(self, other: Tally) -> Tally:  # type: ignore[override]
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def killed(self) -> int:
        return self.tried - self.survived

    @property
    def able(self) -> int:
        """How many of those tried a test could notice."""
        return self.tried - self.equivalent


@functools.cache
def equivalents() -> dict[str, dict[tuple[str, str], str]]:
    """Return by module and change why no test can notice it."""
    recorded = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or {}
    return {
        module: {(x["before"], x["after"]): x["reason"] for x in changes}
        for module, changes in recorded.items()
    }


def is_equivalent(module: str, mutant: dict[str, Any]) -> bool:
    return (mutant["before"], mutant["after"]) in equivalents().get(module, {})


def read_report(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_report(path: Path, module: str, entry: dict[str, Any]) -> None:
    """Put one module's entry into the report, modules in the order of `MODULES`."""
    report = {**read_report(path), module: entry}
    ordered = {name: report[name] for name in MODULES if name in report}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tally(module: str, entry: dict[str, Any]) -> Tally:
    survivors = entry["survivors"]
    equivalent = sum(is_equivalent(module, mutant) for mutant in survivors)
    counts = (entry[name] for name in ("mutants", "tried", "timeouts", "survived_first"))
    return Tally(*counts, len(survivors), equivalent)


def wilson(killed: int, tried: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    if not tried:
        return 0.0, 1.0
    share, square = killed / tried, NORMAL_95**2
    middle = (share + square / (2 * tried)) / (1 + square / tried)
    spread = math.sqrt(share * (1 - share) / tried + square / (4 * tried**2))
    half = NORMAL_95 * spread / (1 + square / tried)
    return middle - half, middle + half


def table(report: dict[str, Any]) -> str:
    """Return the groups, then the modules, as a table of Markdown."""
    tallies = {module: tally(module, entry) for module, entry in report.items()}
    groups = {
        group: sum((x for name, x in tallies.items() if group_of(name) == group), Tally())
        for group in GROUPS
    }
    rows = [
        *(row(f"**{group}**", x) for group, x in groups.items() if x.tried),
        row("**all**", sum(tallies.values(), Tally())),
        *(row(f"`{module}`", x) for module, x in tallies.items()),
    ]
    head = "| | mutants | tried | survived at first | survive | equivalent | killed first | now |"
    return "\n".join([head, "|---" + "|---:" * 7 + "|", *rows]) + "\n"


def row(name: str, x: Tally) -> str:
    """Return a row, with both shares of the mutants that a test could notice.

    Only the first is a sample of the module, and has an interval where not all were tried: tests
    that were added since were written for these very mutants.
    """
    killed = x.tried - x.survived_first
    first, now = (f"{n / x.able:.1%}" if x.able else "–" for n in (killed, x.killed))
    if x.able and x.tried < x.mutants:
        low, high = wilson(killed, x.able)
        first += f" ({low:.0%}–{high:.0%})"
    counts = (x.mutants, x.tried, x.survived_first, x.survived, x.equivalent)
    return f"| {name} | " + " | ".join(f"{n:,}" for n in counts) + f" | {first} | {now} |"
