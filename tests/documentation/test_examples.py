"""Every script of `examples/` is short, and runs; so does the notebook."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STEPS = {"image_and_vector": "512", "own_language_task": "64", "sweep_and_compare": "512"}
"""Arguments that make a script quick, where 1,024 steps are too many."""
LONGEST = 40
NOTEBOOK = ROOT / "examples" / "walk_through.ipynb"
CELLS = """
import json, sys

names = {"__name__": "__main__"}
for k, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {k}", "exec"), names)
"""
"""The program that runs the cells of a notebook in one namespace, as a kernel would."""


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs_and_prints_what_came_of_it(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), STEPS.get(script.stem, "1024")])
    runpy.run_path(str(script), run_name="__main__")
    assert capfd.readouterr().out
    assert list((tmp_path / "runs").glob("*/seed-*/checkpoints/last.json"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_screen(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_there_is_one_for_every_part_that_can_be_plugged_in() -> None:
    """A surrogate, a network, a controller, an environment, a task; acting, loops, comparisons."""
    assert {path.stem for path in EXAMPLES} >= {
        "own_environment",
        "own_network",
        "image_and_vector",
        "own_surrogate",
        "own_controller",
        "load_and_act",
        "own_loop",
        "two_agents",
        "own_language_task",
        "sweep_and_compare",
    }


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    small = {"KEEL_STEPS": "1024", "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "ignore", "-c", CELLS, str(NOTEBOOK)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **small}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 updates, the last one at step 1,024" in done.stdout
    runs = list((tmp_path / "runs").glob("*/seed-*/checkpoints/last.json"))
    assert len(runs) == 4


def test_the_notebook_holds_no_large_output_and_no_error() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert NOTEBOOK.stat().st_size < 60_000
