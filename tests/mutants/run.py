"""`make mutants`: change the code in small ways, and list the changes that no test notices.

Every module has test files of its own, so that a mutant costs seconds and not the whole suite. The
code is changed in a copy below `build/mutants`, never in the working tree. Cosmic Ray changes the
text of a file, which compiled loops need: a tool that wraps functions would not reach them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
TREE = BUILD / "tree"
LIKELY = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul",
    "BitOr_BitAnd", "BitAnd_BitOr", "Delete_USub", "Delete_Not", "Delete_Invert",
    "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt",
    "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is", "In_NotIn", "NotIn_In",
)  # fmt: skip
"""Slips of the pen, one or two for every operator; all that the tool knows, eleven for each, would
take days and say the same."""
UNLIKELY = [rf"core/Replace(Binary|Unary|Comparison)Operator_(?!({'|'.join(LIKELY)})$)"]
UNIT, LAWS = "tests/unit", "tests/properties"
FUNCTIONAL = {
    "_shapes": [f"{UNIT}/functional/test_reduce.py", f"{UNIT}/functional/test_advantage.py"],
    "advantage": [f"{UNIT}/functional/test_advantage.py", f"{LAWS}/test_advantage_laws.py"],
    "certificate": [f"{UNIT}/functional/test_certificate.py", f"{LAWS}/test_remaining_laws.py"],
    "cloning": [f"{UNIT}/functional/test_cloning.py", f"{LAWS}/test_remaining_laws.py"],
    "divergence": [f"{UNIT}/functional/test_divergence.py", f"{LAWS}/test_divergence_laws.py"],
    "estimators": [f"{UNIT}/functional/test_estimators.py", f"{LAWS}/test_estimator_laws.py"],
    "natural": [f"{UNIT}/functional/test_natural.py", f"{LAWS}/test_natural_laws.py"],
    "ratio": [f"{UNIT}/functional/test_ratio.py", f"{LAWS}/test_ratio_laws.py"],
    "reduce": [f"{UNIT}/functional/test_reduce.py", f"{LAWS}/test_reduce_laws.py"],
    "statistics": [f"{UNIT}/functional/test_statistics.py", f"{LAWS}/test_statistics_laws.py"],
    "surrogate": [f"{UNIT}/functional/test_surrogate.py", f"{LAWS}/test_surrogate_laws.py"],
    "value": [f"{UNIT}/functional/test_value.py", f"{LAWS}/test_value_laws.py"],
    "vocabulary": [f"{UNIT}/functional/test_vocabulary.py", f"{LAWS}/test_vocabulary_laws.py"],
    "walk_back": [f"{UNIT}/functional/test_walk_back.py"],
}
REGIONS = {
    "balance": ["test_imitation.py"],
    "certify": ["test_certified_numbers.py", "test_certified.py"],
    "constraint": ["test_constraint.py", "test_stabiliser.py"],
    "controllers": ["../tokens/test_token_controller.py", "../training/test_note_001.py"],
    "critic": ["test_constraint.py", "test_dense_critic.py"],
    "dense": ["test_dense.py"],
    "dense_critic": ["test_dense_critic.py"],
    "diagnosis": ["test_certified.py", "test_many_agents.py"],
    "faults": ["test_proximal.py"],
    "gate": ["test_certified.py", "test_many_agents.py"],
    "imitation": ["test_imitation.py"],
    "ladder": ["test_ladder.py"],
    "measure": ["test_certified_numbers.py", "test_certified.py", "test_many_agents.py"],
    "objective": ["test_proximal.py", "test_dense.py"],
    "penalties": ["test_penalties.py"],
    "proximal": ["test_early_stop.py", "test_proximal.py"],
    "sequential": ["test_many_agents.py"],
    "stepper": ["test_proximal.py", "test_dense.py"],
    "supervised": ["test_imitation.py"],
    "token_objective": ["../tokens/test_token_objective.py"],
}
SERVING = f"{UNIT}/apps/serving"
MODULES: dict[str, list[str]] = {
    **{f"functional/{name}.py": tests for name, tests in FUNCTIONAL.items()},
    **{
        f"regions/{name}.py": [os.path.normpath(f"{UNIT}/regions/{test}") for test in tests]
        for name, tests in REGIONS.items()
    },
    "rollout/targets.py": [
        f"{UNIT}/rollout/test_{name}.py"
        for name in ("target_statistics", "inserted_rows", "collect", "sampled_targets")
    ],
    "apps/language/advantages.py": [f"{UNIT}/tokens/test_token_advantages.py"],
    **{
        f"apps/serving/{name}.py": [
            f"{SERVING}/test_serving_numbers.py",
            f"{SERVING}/test_replica.py",
            f"{SERVING}/test_routers.py",
        ]
        for name in ("kernels", "kernels_batch", "kernels_cache", "kernels_route")
    },
    "apps/serving/kernels_draw.py": [f"{SERVING}/test_routers.py"],
    "apps/serving/kernels_many.py": [
        f"{SERVING}/test_serving_numbers.py",
        f"{SERVING}/test_serving_envs.py",
    ],
}
"""Modules below `src/keel`, and the test files that are theirs, the quickest first."""


Place = tuple[int, int]
"""Line and column."""


class Mutant(NamedTuple):
    """One change, and what the tests said."""

    operator: str
    place: Place
    outcome: str
    diff: str


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tool", type=Path, required=True, help="folder of cosmic-ray")
    arguments.add_argument("--only", default="", help="part of a module's path")
    arguments.add_argument("--timeout", type=float, default=300.0, help="seconds of a mutant")
    given = arguments.parse_args()
    chosen = [name for name in MODULES if given.only in name]
    if not chosen:
        sys.exit(f"mutants: no module of {len(MODULES)} has {given.only!r} in its path")
    for name in chosen:
        report(name, mutate(name, given.tool.absolute(), given.timeout))


def mutate(module: str, tool: Path, timeout: float) -> list[Mutant]:
    """All mutants of one module, each tried against the tests of that module."""
    fresh_tree()
    session = BUILD / f"{module.replace('/', '.')}.sqlite"
    config = session.with_suffix(".toml")
    tests = MODULES[module]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    config.write_text(
        "[cosmic-ray]\n"
        f'module-path = "src/keel/{module}"\n'
        f"timeout = {timeout}\n"
        "excluded-modules = []\n"
        f"test-command = {json.dumps(' '.join(command))}\n"
        '[cosmic-ray.distributor]\nname = "local"\n'
        "[cosmic-ray.filters.operators-filter]\n"
        f"exclude-operators = {json.dumps(UNLIKELY)}\n"
    )
    session.unlink(missing_ok=True)
    call(command, "the tests fail without any mutant")
    call([tool / "cosmic-ray", "init", config, session])
    call([tool / "cr-filter-operators", session, config])
    call([tool / "cosmic-ray", "exec", config, session])
    dump = call([tool / "cosmic-ray", "dump", session])
    mutants = [mutant for line in dump.splitlines() for mutant in read(json.loads(line))]
    ignored = annotations(ROOT / "src" / "keel" / module)
    return [x for x in mutants if not any(begin <= x.place < end for begin, end in ignored)]


def annotations(path: Path) -> list[tuple[Place, Place]]:
    """Where annotations begin and end: they are never evaluated, so nothing could notice."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [
        ((x.lineno, x.col_offset), (x.end_lineno or 0, x.end_col_offset or 0))
        for x in found
        if isinstance(x, ast.expr)
    ]


def fresh_tree() -> None:
    """Copy what tests need; in their copy files may break."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, TREE / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", TREE)


def call(command: list[str | Path], reason: str = "failed") -> str:
    """Run in the copy, whose code goes before what is installed; return its output."""
    environment = os.environ | {
        "PYTHONPATH": str(TREE / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(BUILD / "numba"),
    }
    done = subprocess.run(
        list(map(str, command)), cwd=TREE, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"mutants: {reason}: {command[0]}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def read(pair: list[dict[str, object]]) -> list[Mutant]:
    """A work item of the tool and its result; nothing for what was filtered out."""
    item, result = pair
    if result is None or result["worker_outcome"] == "skipped":
        return []
    (mutation,) = item["mutations"]  # type: ignore[misc]
    line, column = mutation["start_pos"]  # type: ignore[index]
    return [
        Mutant(
            operator=str(mutation["operator_name"]).removeprefix("core/"),  # type: ignore[index]
            place=(int(line), int(column)),
            outcome=str(result["test_outcome"]),
            diff=str(result["diff"]),
        )
    ]


def report(module: str, mutants: list[Mutant]) -> None:
    """Print the survivors with what was changed, and how many there were."""
    alive = sorted((x for x in mutants if x.outcome == "survived"), key=lambda x: x.place)
    for mutant in alive:
        changed = [
            line
            for line in mutant.diff.splitlines()
            if line[:1] in "+-" and line[:3] not in ("+++", "---")
        ]
        print(f"\n{module}:{mutant.place[0]} {mutant.operator}", *changed, sep="\n  ")
    print(f"\n{module}: {len(alive)} of {len(mutants)} mutants survived", flush=True)


if __name__ == "__main__":
    main()
