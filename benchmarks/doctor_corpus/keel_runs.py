"""Runs of Keel for the corpus: its own command of training, with settings and wrappers changed."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import keel
from benchmarks.doctor_corpus.serving import serve
from benchmarks.doctor_corpus.wrappers import INSIDE, OUTSIDE
from keel.config import nested
from keel.tracking.directory import METRICS

KEPT = (METRICS, "config.yaml", "environment.json", "run.json")
STATE = "state.json"


def run(job: dict[str, Any], folder: Path) -> None:
    """Train as a job says."""
    inject = [(name, value) for name, value in job["inject"]]
    makers = {**INSIDE, **OUTSIDE}
    wrappers = [partial(_wrapped, name=name, value=v) for name, v in inject if name in makers]
    settings = dict(job["settings"])
    preset = settings.pop("preset", None)
    keel.train(
        job["env"],
        runs=folder / "runs",
        name="run",
        preset_name=preset,
        progress=False,
        wrappers=wrappers,
        **nested({"total_steps": job["steps"], "seed": job["seed"], "threads": 1, **settings}),
    )
    done = folder / "runs" / "run" / f"seed-{job['seed']}"
    for name in KEPT:
        if (done / name).exists():
            shutil.move(done / name, folder / name)
    newest = done / "checkpoints" / "last.json"
    if newest.exists():
        _keep_interface(newest, folder)
    shutil.rmtree(folder / "runs")


def _wrapped(env: Any, name: str, value: Any) -> Any:
    return {**INSIDE, **OUTSIDE}[name](env, value)


def _keep_interface(newest: Path, folder: Path) -> None:
    """Keep the two files of a checkpoint that say how many actions there are."""
    import json

    name = Path(json.loads(newest.read_text())["checkpoint"]).name
    state = newest.parent / name / STATE
    if state.exists():
        target = folder / "checkpoints" / name
        target.mkdir(parents=True)
        interface = json.loads(state.read_text()).get("interface")
        (target / STATE).write_text(json.dumps({"interface": interface}))
        shutil.copy(newest, folder / "checkpoints" / "last.json")


if __name__ == "__main__":
    serve(run)
