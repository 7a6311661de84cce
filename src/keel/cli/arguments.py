"""Command-line words as tyro wants them: notes' flag names, 1e6 for whole numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ALIASES = {
    "--max-kl": "--region.max-kl",
    "--target-kl": "--region.target-kl",
    "--kl-coef": "--region.kl-coef",
    "--clip-range": "--region.clip",
    "--clip-ratio": "--region.clip",
    "--max-log-ratio": "--region.max-log-ratio",
    "--epochs": "--region.epochs",
    "--batch-size": "--region.minibatch",
    "--learning-rate": "--region.learning-rate",
    "--max-grad-norm": "--region.max-grad-norm",
    "--entropy-coef": "--explore.entropy-coef",
    "--entropy-decay": "--explore.entropy-decay",
    "--min-entropy-coef": "--explore.entropy-coef-min",
    "--entropy-min": "--explore.entropy-floor",
    "--gamma": "--advantage.gamma",
    "--gae-lambda": "--advantage.lam",
    "--normalize-advantage": "--advantage.normalise",
    "--n-envs": "--envs.num",
    "--damping": "--natural.damping",
    "--cg-iters": "--natural.cg-iters",
    "--backtrack-iters": "--natural.backtrack-iters",
    "--backtrack-coeff": "--natural.backtrack-coeff",
    "--critic-lr": "--region.learning-rate",
    "--critic-train-iters": "--region.epochs",
    "--ls-fail-threshold": "--stabiliser.ls-fail-threshold",
    "--max-kl-decay": "--stabiliser.max-kl-decay",
    "--min-max-kl": "--stabiliser.min-max-kl",
    "--damping-growth": "--stabiliser.damping-growth",
    "--max-damping": "--stabiliser.max-damping",
    "--normalize-rewards": "--envs.normalise-reward",
    "--pulse-interval": "--explore.pulse-interval",
    "--pulse-magnitude": "--explore.pulse-magnitude",
    "--stagnation-threshold": "--explore.stagnation-threshold",
    "--stagnation-memory": "--explore.stagnation-memory",
}
"""The notes' names (underscores or hyphens) for the dotted ones."""

SCIENTIFIC = re.compile(r"^\d+(\.\d+)?[eE]\+?\d+$")


def translate(args: Sequence[str], aliases: Mapping[str, str] = ALIASES) -> list[str]:
    """Aliases resolved, `--flag=value` split, and 1e6 written out where it is a whole number."""
    result = []
    for arg in args:
        flag, equals, value = arg.partition("=") if arg.startswith("--") else (arg, "", "")
        if flag.startswith("--"):
            flag = aliases.get(flag.replace("_", "-"), flag)
        elif SCIENTIFIC.match(flag) and float(flag).is_integer():
            flag = str(int(float(flag)))
        result += [flag, value] if equals else [flag]
    return [_whole(word) for word in result]


def _whole(word: str) -> str:
    if SCIENTIFIC.match(word) and float(word).is_integer():
        return str(int(float(word)))
    return word


def find_option(args: Sequence[str], name: str) -> str | None:
    """The value of `--name VALUE` before tyro has seen the arguments."""
    for index, arg in enumerate(args[:-1]):
        if arg == name:
            return args[index + 1]
    return None
