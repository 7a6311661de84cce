"""What other tools say of logs; a plain script for their environment, which has no Keel.

Standard input has a run a line: `{"trainer": …, "rows": [{"step": 1, …}, …]}`, in the names of the
trainer. The answer is a line each: findings by tool, without those that only inform.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, float]]
SAME = {
    "sb3": {
        "rollout/ep_rew_mean": "reward_mean",
        "train/approx_kl": "kl",
        "train/clip_fraction": "clip_fraction",
        "train/loss": "loss",
        "train/value_loss": "value_loss",
        "train/explained_variance": "explained_variance",
        "rollout/ep_len_mean": "length",
        "train/learning_rate": "lr",
    },
    "cleanrl": {
        "charts/episodic_return": "reward_mean",
        "losses/approx_kl": "kl",
        "losses/entropy": "entropy",
        "losses/clipfrac": "clip_fraction",
        "losses/policy_loss": "loss",
        "losses/value_loss": "value_loss",
        "losses/explained_variance": "explained_variance",
        "charts/learning_rate": "lr",
    },
    "trl": {
        "reward": "reward_mean",
        "reward_std": "reward_std",
        "kl": "kl",
        "entropy": "entropy",
        "clip_ratio/region_mean": "clip_fraction",
        "loss": "loss",
        "grad_norm": "grad_norm",
        "learning_rate": "lr",
    },
}
"""Names that all of these tools have, by those of the trainers."""


def common(trainer: str, row: dict[str, float]) -> dict[str, float]:
    """Return a row in the common names; SB3 logs the negative entropy."""
    found = {SAME[trainer][k]: v for k, v in row.items() if k in SAME[trainer]}
    if trainer == "sb3" and "train/entropy_loss" in row:
        found["entropy"] = -row["train/entropy_loss"]
    return found


def rldoctor(trainer: str, rows: Rows) -> Iterable[str]:
    """`rldoctor` maps names itself; where it knows none it is given its own."""
    tool = importlib.import_module("rl_doctor")
    own = {"reward_mean": "reward", "lr": "learning_rate", "length": "completion_length"}
    if trainer != "trl":
        rows = [
            {"step": r["step"], **{own.get(k, k): v for k, v in common(trainer, r).items()}}
            for r in rows
        ]
    result = tool.diagnose(tool.run_from_records(rows))
    return [f.detector for f in result.problems if f.severity >= tool.Severity.WARNING]


def rlprobe(trainer: str, rows: Rows) -> Iterable[str]:
    """`rlprobe` records a run, and diagnoses the recording."""
    recorder, doctor = (importlib.import_module(f"rlprobe.{n}") for n in ("recorder", "doctor"))
    own = {
        "kl": "kl_mean",
        "entropy": "entropy_mean",
        "length": "completion_len_mean",
        "explained_variance": "value_explained_variance",
    }
    extra = {
        "frac_reward_zero_std": "zero_variance_group_frac",
        "completions/mean_length": "completion_len_mean",
        "completions/clipped_ratio": "truncation_rate",
    }
    with tempfile.TemporaryDirectory() as folder:
        record = recorder.Recorder(folder, capture_env=False, install_handlers=False)
        for row in rows:
            values = {own.get(k, k): v for k, v in common(trainer, row).items()}
            values |= {extra[k]: v for k, v in row.items() if k in extra and trainer == "trl"}
            record.log_step(int(row["step"]), **values)
        record.close()
        found = doctor.diagnose(folder)
    return [f.signature_id for f in found if str(f.severity).lower() != "info"]


def rlwatch(trainer: str, rows: Rows) -> Iterable[str]:
    """`rlwatch` looks at every step as it comes."""
    detectors = importlib.import_module("rlwatch.detectors")
    config = importlib.import_module("rlwatch.config").RLWatchConfig()
    suite = detectors.DetectorSuite(config)
    names = {"kl": "kl_divergence"}
    known = ("entropy", "kl_divergence", "reward_mean", "reward_std", "loss", "grad_norm")
    found = []
    for row in rows:
        values = {names.get(k, k): v for k, v in common(trainer, row).items()}
        values = {k: v for k, v in values.items() if k in known}
        found += [alert.detector for alert in suite.check_step(int(row["step"]), **values)]
    return found


def zen(trainer: str, rows: Rows) -> Iterable[str]:
    """`zen-rl` reads SB3's names only."""
    detect = importlib.import_module("zen.detect.rules").detect
    names = {name for row in rows for name in row if name != "step"}
    series = {n: [(int(r["step"]), r[n]) for r in rows if n in r] for n in names}
    return [issue["mode"] for issue in detect(series)]


TOOLS: dict[str, tuple[tuple[str, ...], Callable[[str, Rows], Iterable[str]]]] = {
    "rldoctor": (("sb3", "cleanrl", "trl"), rldoctor),
    "rlprobe": (("sb3", "cleanrl", "trl"), rlprobe),
    "rlwatch": (("sb3", "cleanrl", "trl"), rlwatch),
    "zen-rl": (("sb3",), zen),
}
"""Trainers whose logs each tool can be given, and how."""


def main() -> None:
    """Answer every line."""
    for line in sys.stdin:
        job = json.loads(line)
        said: dict[str, Any] = {}
        for name, (trainers, tool) in TOOLS.items():
            if job["trainer"] not in trainers:
                continue
            try:
                said[name] = sorted(set(tool(job["trainer"], job["rows"])))
            except Exception as error:
                said[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
        sys.__stdout__.write(json.dumps(said) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    with Path("/dev/null").open("w") as nowhere:
        sys.stdout = nowhere
        main()
