"""`make mutants`: change the code in small ways, and list the changes that no test notices.

Every module has test files of its own, so that a mutant costs a second and not the whole suite. The
code is changed in a copy below `build/mutants`, never in the working tree. Cosmic Ray makes the
mutants, `forked.py` tries them. A survivor that no test could notice stands with its reason in
`equivalent.yaml`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from modules import MODULES, without_jit
from report import Sample, is_equivalent, read_report, table, write_report

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "mutants"
TREE = BUILD / "tree"
DATA = ROOT / "docs" / "data"


def main() -> None:
    given = arguments().parse_args()
    report_file = DATA / "mutants.json"
    chosen = [name for part in given.only.split(",") for name in MODULES if part in name]
    if not chosen:
        sys.exit(f"mutants: no module of {len(MODULES)} has {given.only!r} in its path")
    if not given.table:
        with Forks() as forks:
            for module in chosen:
                samples = mutate(module, given, forks, read_report(report_file).get(module, {}))
                write_report(report_file, module, samples)
                tell(module, samples)
    text = table(read_report(report_file))
    (DATA / "mutants.md").write_text(text, encoding="utf-8")
    print(text)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", type=Path, required=True, help="folder of cosmic-ray")
    parser.add_argument("--only", default="", help="parts of modules' paths, with commas between")
    parser.add_argument("--sample", type=int, help="mutants of a module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--again", action="store_true", help="try recorded survivors only")
    parser.add_argument("--slowest", type=float, default=3.0, help="seconds of a test to be run")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    return parser


def mutate(
    module: str, given: argparse.Namespace, forks: Forks, samples: dict[str, Sample]
) -> dict[str, Sample]:
    """Try mutants of one module, and return its samples by seed, as the report keeps them."""
    path = ROOT / "src" / "keel" / module
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    current = {seed: x for seed, x in samples.items() if x["sha256"] == digest}
    again = given.again and bool(samples)
    if again and not current:
        sys.exit(f"mutants: {module} has changed since its survivors were recorded")
    recorded = [x for sample in current.values() for x in sample["survivors"]]
    only = [place(x) for x in recorded if not is_equivalent(module, x)] if again else None
    if only == []:
        return samples
    generated = generate(given.tool, path, module, given.sample, given.seed, only)
    began = time.perf_counter()
    outcomes = forks.try_all(module, generated["mutants"], given.slowest)
    survivors = [
        {key: mutant[key] for key in ("operator", "occurrence", "line", "before", "after")}
        for mutant, outcome in zip(generated["mutants"], outcomes, strict=True)
        if outcome == "survived"
    ]
    print(f"{module}: {len(outcomes)} mutants in {time.perf_counter() - began:.0f} s", flush=True)
    if again:
        killed = [x for x in only or [] if x not in map(place, survivors)]
        return {**samples, **{seed: without(x, killed) for seed, x in current.items()}}
    fresh = {
        "sha256": digest,
        "mutants": generated["count"],
        "tried": len(outcomes),
        "timeouts": outcomes.count("timeout"),
        "survived_first": len(survivors),
        "survivors": survivors,
    }
    return {**samples, str(given.seed): fresh}


def place(mutant: dict[str, Any]) -> list[Any]:
    """Return what names a mutant of a module."""
    return [mutant["operator"], mutant["occurrence"]]


def without(sample: Sample, killed: list[list[Any]]) -> Sample:
    """Return a sample without those of its survivors that are killed by now."""
    return {**sample, "survivors": [x for x in sample["survivors"] if place(x) not in killed]}


def generate(
    tool: Path, path: Path, module: str, sample: int | None, seed: int, only: list[Any] | None
) -> dict[str, Any]:
    """Return how many mutants a file has, and those to try."""
    # Without numba a decorator of numba's does nothing, so nothing could notice that it is gone.
    without = ["RemoveDecorator"] if without_jit(module) else []
    job = {"path": str(path), "sample": sample, "seed": f"{seed} {module}", "only": only,
           "without": without}  # fmt: skip
    command = [str(tool / "python"), str(HERE / "generate.py")]
    text = json.dumps(job)
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class Forks:
    """The process that tries mutants, and the copy of the code that it changes."""

    def __enter__(self) -> Forks:
        fresh_tree()
        environment = os.environ | {
            "PYTHONPATH": str(TREE / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "mutants",
            "OMP_NUM_THREADS": "1",
            "NUMBA_CACHE_DIR": str(BUILD / "numba"),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "forked.py")], cwd=TREE, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self

    def try_all(self, module: str, mutants: list[dict[str, Any]], slowest: float) -> list[str]:
        """Return the outcome of every mutant."""
        path = TREE / "src" / "keel" / module
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # a mutant may have the date and size of the original
        job = {
            "path": str(path),
            "tests": MODULES[module],
            "mutants": mutants,
            "slowest": slowest,
            "scratch": str(BUILD / "scratch"),
            "without_jit": without_jit(module),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"mutants: {module}: the process that tries them has ended; see above")
        answers = json.loads(line)
        (BUILD / f"{module.replace('/', '.')}.json").write_text(json.dumps(answers, indent=1))
        return [answer["outcome"] for answer in answers]

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def fresh_tree() -> None:
    """Copy what tests need; in their copy files may break."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    for folder in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, TREE / folder)
    shutil.copy(ROOT / "pyproject.toml", TREE)


def tell(module: str, samples: dict[str, Sample]) -> None:
    """Print the survivors with what was changed, and how many there were of each sample."""
    for seed, sample in samples.items():
        survivors = sample["survivors"]
        unexplained = [mutant for mutant in survivors if not is_equivalent(module, mutant)]
        for mutant in unexplained:
            print(f"\n{module}:{mutant['line']} {mutant['operator']}")
            print("  -", mutant["before"], "\n  +", mutant["after"])
        print(
            f"\n{module}, seed {seed}: {len(survivors)} of {sample['tried']} mutants survived,"
            f" {len(survivors) - len(unexplained)} of them equivalent\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
