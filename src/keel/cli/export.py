"""`keel export RUN --onnx FILE.onnx`: the policy, for use without Keel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options
from keel.cli.strict_json import print_json
from keel.printing import printable


@dataclass(frozen=True)
class Export:
    """Write the policy of a run as ONNX, run the file, and compare it with the original.

    Raw observations go in: their normalization is part of the file. Out come the likeliest action,
    squashed or clipped into its bounds, and the logits or log standard deviations.

    Example: keel export runs/NAME --onnx policy.onnx
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of the run, such as runs/NAME/seed-0, or runs/NAME if it has one seed."""
    onnx: Annotated[Path, arg(metavar="FILE.onnx")]
    """The file to write."""
    checkpoint: Annotated[str | None, arg(metavar="best|last|STEP")] = None
    """Checkpoint to export; by default the best, or the last where there is no best."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that the run's file names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """Export."""
    options = read_options(Export, args, "keel export")
    from keel.training.export import export_onnx
    from keel.training.policy import open_policy

    policy = open_policy(options.run, options.checkpoint, trust_code=options.trust_code)
    written = export_onnx(policy, options.onnx)
    result = {
        "run": str(policy.path),
        "env": policy.config.env,
        "checkpoint": policy.step,
        "onnx": str(written.path),
        "inputs": written.inputs,
        "outputs": written.outputs,
        "normalized": policy.normalizer is not None,
        "max_abs_difference": written.difference,
        "rows": written.rows,
    }
    if options.json:
        print_json(result)
        return 0
    inside = "with" if policy.normalizer is not None else "without"
    text = (
        f"{written.path}: {policy.config.env}, checkpoint of step {policy.step:,}, "
        f"{inside} observation normalizer\n"
        f"{', '.join(written.inputs)} → {', '.join(written.outputs)}\n"
        f"checked on {written.rows} random observations: largest difference from torch "
        f"{written.difference:.1e}"
    )
    print(printable(text))  # noqa: T201
    return 0
