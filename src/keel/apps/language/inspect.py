"""Evaluation of what a run on tokens has learned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from keel.apps.language.build import open_source
from keel.apps.language.config import Reward, decoding, from_dict
from keel.apps.language.judge import judge
from keel.apps.language.tasks import held_out
from keel.errors import InputError
from keel.tracking.directory import find_run
from keel.tracking.record import read_config
from keel.training.checkpoint import check_shapes
from keel.training.policy import load_checkpoint


def judge_run(
    path: Path, checkpoint: str | int | None, prompts: int, *, greedy: bool
) -> dict[str, Any]:
    """Evaluate the policy of a run on held-out prompts.

    Args:
        path: of the run.
        checkpoint: "best", "last" or a step; by default the best.
        prompts: number of prompts, at least 1.
        greedy: whether the likeliest token is taken in place of a sample.
    """
    if prompts < 1:
        raise InputError(f"prompts: expected at least 1, got {prompts}")
    path = find_run(path)
    stored = from_dict(read_config(path))
    # held-out prompts are judged by the task alone: functions that reward are not even imported
    config = dataclasses.replace(stored, preflight=False, reward=Reward())
    loaded = load_checkpoint(path, checkpoint)
    source = open_source(config)
    params = loaded.tensors["opt_state/params"].to(source.device)
    check_shapes(str(loaded.path), {"params": params}, {"params": source.agent.initial})
    verdict = judge(source, params, held_out(source.task, prompts), greedy=greedy)
    return {
        "run": str(path),
        "env": f"{config.env} {config.task}",
        "checkpoint": loaded.step,
        "deterministic": greedy,
        "decoding": decoding(config, greedy),
        **{name.removeprefix("eval/"): value for name, value in verdict.metrics().items()},
        "completions": verdict.texts,
        "scores": verdict.scores.tolist(),
    }
