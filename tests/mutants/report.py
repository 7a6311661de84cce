"""What `make mutants` keeps: `docs/data/mutants.json`, and its table in `docs/data/mutants.md`.

The report has the samples of every module by the seed that drew them, in the order of the seeds.
Tests are written for the survivors of a sample: how many mutants the tests of today notice is
estimated by the last sample, as it was when first tried.
"""

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
Sample = dict[str, Any]
"""Mutants of one module that were drawn together, and which of them survive."""
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
    def first(self) -> int:
        """How many a test noticed when they were first tried."""
        return self.tried - self.survived_first

    @property
    def now(self) -> int:
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


def write_report(path: Path, module: str, samples: dict[str, Sample]) -> None:
    """Put one module's samples into the report, modules in the order of `MODULES`."""
    samples = {seed: samples[seed] for seed in sorted(samples, key=int)}
    report = {**read_report(path), module: samples}
    ordered = {name: report[name] for name in MODULES if name in report}
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tally(module: str, sample: Sample) -> Tally:
    survivors = sample["survivors"]
    equivalent = sum(is_equivalent(module, mutant) for mutant in survivors)
    counts = (sample[name] for name in ("mutants", "tried", "timeouts", "survived_first"))
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


def table(report: dict[str, dict[str, Sample]]) -> str:
    """Return the groups, then the modules, as a table of Markdown."""
    tallies = {
        module: [tally(module, sample) for sample in samples.values()]
        for module, samples in report.items()
    }
    groups = {
        group: [x for module, x in tallies.items() if group_of(module) == group] for group in GROUPS
    }
    rows = [
        *(row(f"**{group}**", x) for group, x in groups.items() if x),
        row("**all**", list(tallies.values())),
        *(row(f"`{module}`", [x]) for module, x in tallies.items()),
    ]
    head = (
        "| | mutants | tried | survived at first | survive | equivalent"
        " | first sample | last sample | now |"
    )
    return "\n".join([head, "|---" + "|---:" * 8 + "|", *rows]) + "\n"


def row(name: str, modules: list[list[Tally]]) -> str:
    """Return a row of modules, each with its samples: counts of all samples, then three shares.

    They are of the mutants that a test could notice: of the first samples and of the last ones when
    these were tried first, and of all samples now. A module that was sampled once has no last.
    """
    every = sum((x for samples in modules for x in samples), Tally())
    first = sum((samples[0] for samples in modules), Tally())
    last = sum((samples[-1] for samples in modules if len(samples) > 1), Tally())
    mutants = sum(samples[-1].mutants for samples in modules)
    counts = (mutants, every.tried, every.survived_first, every.survived, every.equivalent)
    now = f"{every.now / every.able:.1%}" if every.able else "–"
    cells = [name, *(f"{n:,}" for n in counts), share_at_first(first), share_at_first(last), now]
    return "| " + " | ".join(cells) + " |"


def share_at_first(x: Tally) -> str:
    """Return the share killed when first tried, with its interval where not all were tried."""
    if not x.able:
        return "–"
    low, high = wilson(x.first, x.able)
    interval = f" ({low:.0%}–{high:.0%})" if x.tried < x.mutants else ""
    return f"{x.first / x.able:.1%}{interval}"
