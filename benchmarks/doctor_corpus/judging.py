"""Ask the doctor about every log of a half, and count what it says."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keel
from benchmarks.doctor_corpus.keeping import unpacked
from benchmarks.doctor_corpus.making import RESULT, ROOT
from benchmarks.doctor_corpus.table import HEALTHY, faults, jobs
from keel.doctor.examine import Diagnosis, examine
from keel.errors import KeelError
from keel.integrations.speaking import log_of
from keel.tracking.logs.log import Row
from keel.tracking.logs.settings import of_cleanrl

LOGS = {
    "keel": "",
    "sb3": "progress.csv",
    "cleanrl": "log.jsonl",
    "trl": "trainer_state.json",
}
"""The log of each trainer in the folder of a run."""
CALLBACK, ALONE = "callback", "log"
WITH_CALLBACK = ("sb3", "trl")
FIRST = 3
RULES = ("src/keel/doctor", "src/keel/tracking/catalogue", "src/keel/tracking/logs")
"""Where rules, and what they read, stand."""


@dataclass(frozen=True)
class Judged:
    """What the doctor said of one log."""

    kind: str
    setup: str
    trainer: str
    seed: int
    source: str
    """`log`: the file that the trainer wrote; `callback`: what Keel's callback collected"""
    verdict: str
    sentence: str
    findings: tuple[tuple[str, str], ...]
    """(rule, level), in their order"""
    rules: tuple[str, ...]
    """that name the planted cause"""
    commit: str
    """that the run was made with"""

    @property
    def place(self) -> int:
        """The place of the planted cause, from 1; 0: it was not named."""
        hits = (n for n, (rule, _) in enumerate(self.findings, 1) if rule in self.rules)
        return next(hits, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"place": self.place}


def judge(half: str) -> tuple[list[Judged], float]:
    """Diagnose every log of a half; returns what was said, and the seconds that it took.

    Args:
        half: Name of the half.
    """
    known, wanted = faults(), {(job.kind, job.setup.name, job.seed) for job in jobs(half)}
    begin = time.perf_counter()
    with unpacked(half) as folders:
        there = [folder for folder in folders if _counts(folder, wanted)]
        judged = [one for folder in there for one in _judge(folder, known)]
    return judged, time.perf_counter() - begin


def _counts(folder: Path, wanted: Container[tuple[str, str, int]]) -> bool:
    """Return whether a run is one of the tables still, and did not fail."""
    job = json.loads((folder / RESULT).read_text())
    return job["status"] == 0 and (job["kind"], job["setup"], job["seed"]) in wanted


def _judge(folder: Path, known: Mapping[str, Any]) -> Iterable[Judged]:
    job = json.loads((folder / RESULT).read_text())
    kind = job["kind"]
    rules = () if kind == HEALTHY else known[kind].rules
    for source, diagnosis in _diagnoses(folder, job["trainer"]):
        yield Judged(
            kind,
            job["setup"],
            job["trainer"],
            job["seed"],
            source,
            diagnosis.verdict,
            diagnosis.sentence,
            tuple((f.rule, f.level) for f in diagnosis.findings),
            rules,
            job["commit"],
        )


def _diagnoses(folder: Path, trainer: str) -> Iterable[tuple[str, Diagnosis]]:
    """Yield the diagnoses of a run: of its log, and of what a callback collected beside it."""
    settings = _settings(folder, trainer)
    try:
        diagnosis = keel.diagnose(folder / LOGS[trainer], settings=settings)
        assert isinstance(diagnosis, Diagnosis)
        yield ALONE, diagnosis
    except KeelError as error:
        print(f"{folder}: {error}")
        return
    rows = folder / "callback.jsonl"
    if rows.exists():
        yield CALLBACK, examine(log_of(_rows(rows), trainer, diagnosis.log.settings))


def _settings(folder: Path, trainer: str) -> dict[str, Any]:
    file = folder / "settings.json"
    if not file.exists():
        return {}
    data = json.loads(file.read_text())
    return of_cleanrl(data) if trainer == "cleanrl" else data


def _rows(file: Path) -> list[Row]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        Row(int(line.pop("step")), {k: float("nan") if v is None else v for k, v in line.items()})
        for line in lines
    ]


def is_main(trainer: str, source: str) -> bool:
    """Whether a diagnosis counts: that of the callback where there is one."""
    return source == (CALLBACK if trainer in WITH_CALLBACK else ALONE)


def shares(judged: Iterable[Judged]) -> dict[str, Any]:
    """Return the shares that the bars are about.

    Args:
        judged: Of some logs.
    """
    judged = list(judged)
    healthy = [one for one in judged if one.kind == HEALTHY]
    sick = [one for one in judged if one.kind != HEALTHY]
    levels = [{level for _, level in one.findings} for one in healthy]
    return {
        "healthy": len(healthy),
        "false_sick": sum("sick" in found for found in levels),
        "false_watch": sum(found == {"watch"} for found in levels),
        "faults": len(sick),
        "kinds": len({one.kind for one in sick}),
        "first": sum(one.place == 1 for one in sick),
        "among_three": sum(1 <= one.place <= FIRST for one in sick),
    }


def commit_of_rules() -> str:
    """Return the last commit that changed rules, or what they read."""
    return _git("log", "-1", "--format=%H", "--", *RULES)


def check_order(judged: Iterable[Judged], rules: str) -> None:
    """Refuse a judged half of which a run is older than the rules, or the rules have changed.

    Args:
        judged: Of the judged half.
        rules: Commit that froze the rules.
    """
    if _git("status", "--porcelain", "--", *RULES):
        raise SystemExit("the rules are not committed: what would the table name?")
    for commit in sorted({one.commit.rstrip("+") for one in judged}):
        older = subprocess.run(
            ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", rules, commit], check=False
        )
        if older.returncode:
            raise SystemExit(f"runs of {commit[:12]} were made before the rules of {rules[:12]}")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
