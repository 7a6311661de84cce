"""The same logs through other tools that read symptoms, and through ours, without callbacks."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.doctor_corpus.judging import ALONE, FIRST, LOGS, Judged
from benchmarks.doctor_corpus.keeping import unpacked
from benchmarks.doctor_corpus.making import RESULT
from benchmarks.doctor_corpus.table import HEALTHY, HERE

OURS = "Keel"
TRAINERS = {
    "rldoctor": ("sb3", "cleanrl", "trl"),
    "rlprobe": ("sb3", "cleanrl", "trl"),
    "rlwatch": ("sb3", "cleanrl", "trl"),
    "zen-rl": ("sb3",),
}
"""Whose logs a tool can be given."""
STEPS = {"sb3": "time/total_timesteps", "cleanrl": "global_step", "trl": "step"}


def beside(half: str, python: str, judged: Iterable[Judged]) -> list[dict[str, Any]]:
    """Return, of every tool, its alarms on healthy runs and the faults it named, ours beside.

    Args:
        half: Name of the half.
        python: Of the environment of the other tools.
        judged: What our doctor said of the half.
    """
    names = yaml.safe_load((HERE / "others.yaml").read_text())
    ours = [one for one in judged if one.source == ALONE]
    with unpacked(half) as folders:
        said = _ask(folders, python)
    return [_row(tool, said, names[tool], ours) for tool in TRAINERS]


def _ask(folders: list[Path], python: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the jobs of all runs that others can read, with what each tool said."""
    script = HERE / "others_runs.py"
    jobs = [json.loads((folder / RESULT).read_text()) for folder in folders]
    known = [(job, f) for job, f in zip(jobs, folders, strict=True) if job["trainer"] in STEPS]
    lines = [
        json.dumps({"trainer": j["trainer"], "rows": _rows(j["trainer"], f)}) for j, f in known
    ]
    done = subprocess.run(
        [python, str(script)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return [(job, answer) for (job, _), answer in zip(known, answers, strict=True)]


def _row(
    tool: str, said: list[tuple[dict[str, Any], dict[str, Any]]], names: Any, ours: list[Judged]
) -> dict[str, Any]:
    """Return the counts of one tool, with ours on the same logs."""
    own = {(o.trainer, o.kind, o.setup, o.seed): o for o in ours}
    row = {"tool": tool, "logs": ", ".join(TRAINERS[tool]), "errors": 0}
    row |= dict.fromkeys(("healthy", "alarms", "faults", "named", "our_alarms", "our_named"), 0)
    for job, answer in said:
        if tool not in answer:
            continue
        one = own.get((job["trainer"], job["kind"], job["setup"], job["seed"]))
        found = answer[tool]
        if one is None:
            continue
        if isinstance(found, dict):
            row["errors"] += 1
            found = []
        if job["kind"] == HEALTHY:
            row["healthy"] += 1
            row["alarms"] += bool(found)
            row["our_alarms"] += bool(one.findings)
        else:
            row["faults"] += 1
            row["named"] += any(job["kind"] in names.get(name, ()) for name in found)
            row["our_named"] += 1 <= one.place <= FIRST
    return row


def _rows(trainer: str, folder: Path) -> list[dict[str, float]]:
    """Return the log of a trainer as rows with their steps."""
    text = (folder / LOGS[trainer]).read_text()
    if trainer == "sb3":
        table = csv.DictReader(text.splitlines())
        rows = [{k: float(v) for k, v in row.items() if v} for row in table]
    elif trainer == "cleanrl":
        rows = [json.loads(line) for line in text.splitlines()]
    else:
        rows = json.loads(text)["log_history"]
    return [{**row, "step": row[STEPS[trainer]]} for row in rows if STEPS[trainer] in row]
