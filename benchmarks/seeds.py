"""Training one seed of a benchmark by the command that a user would type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KEEL = str(Path(sys.executable).with_name("keel"))


def train_seed(run: Path, env: str, seed: int, *options: str) -> None:
    """One seed below `run`, or the rest of it; nothing if it is finished."""
    folder = run / f"seed-{seed}"
    if (folder / "checkpoints").is_dir():
        if json.loads((folder / "run.json").read_text()).get("status") == "finished":
            return
        command = [KEEL, "resume", str(folder)]
    else:
        command = [KEEL, "train", env, "--seed", str(seed), "--runs", str(run.parent)]
        command += ["--name", run.name, *options]
    subprocess.run(command, check=True)
