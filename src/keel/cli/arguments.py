"""Command-line words as tyro wants them: notes' flag names, 1e6 for whole numbers."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import tyro

from keel.config import read
from keel.errors import InputError
from keel.printing import printable
from keel.trust import require_trust

T = TypeVar("T")

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


def check_file(config: Any, args: Sequence[str], trust_code: bool) -> None:
    """Check the file of `--config` before anything is trained.

    Says on stderr if the environment on the command line replaces that of the file, and raises if
    the file names code that is not trusted.

    Args:
        config: settings in force, of environments or of tokens.
        args: words of the command line: code that is typed there is the user's own.
        trust_code: whether `--trust-code` was given.
    """
    file = find_option(args, "--config")
    if file is None:
        return
    named = read(Path(file)).get("env", config.env)
    if named != config.env:
        text = printable(f"keel: training on {config.env}, as asked, not on {named} of {file}")
        print(text, file=sys.stderr)  # noqa: T201
    require_trust(asdict(config), file, trust_code, typed=args)


def find_option(args: Sequence[str], name: str) -> str | None:
    """Return the value of `--name VALUE` before tyro sees the arguments; the last one counts."""
    values = [value for arg, value in itertools.pairwise(args) if arg == name]
    return values[-1] if values else None


def read_options(kind: type[T], args: Sequence[str], prog: str, default: T | None = None) -> T:
    """Parse the words of a command line into a dataclass of options.

    Args:
        kind: The dataclass; its fields are the options.
        args: Words after the name of the command.
        prog: The command as the user types it, for `--help` and error messages.
        default: Values of options that are not given; by default those of the dataclass.

    Raises:
        InputError: In one line, what could not be understood, with the nearest option.
    """
    result: T = _tyro(kind, args, prog, {} if default is None else {"default": default})
    return result


def read_known_options(kind: type[T], args: Sequence[str], prog: str) -> tuple[T, list[str]]:
    """Parse like `read_options`, and return the words that are none of these options as well."""
    result: tuple[T, list[str]] = _tyro(kind, args, prog, {"return_unknown_args": True})
    return result


def _tyro(kind: type[T], args: Sequence[str], prog: str, more: Mapping[str, Any]) -> Any:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=list(args), prog=prog, **more)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        command = prog.removeprefix("keel ")  # the line begins with "keel: " already
        raise InputError(f"{command}: {one_line(complaint.getvalue())}") from None


COLOR = re.compile(r"\x1b\[[0-9;]*m")
RULE = re.compile(r"^[│| ]*[-─]{8,}[│| ]*$")
MISSING = re.compile("^Missing from [^:]*: ")
SUGGESTIONS = ("Perhaps you meant", "Arguments similar to")


def one_line(box: str) -> str:
    """Return the complaint of tyro, which is a box of several lines, as one line of text."""
    parts: list[list[str]] = [[]]
    lines = COLOR.sub("", box).splitlines()
    for line in lines[1:-1]:  # between the title, which the text repeats, and the end
        if RULE.match(line):
            parts.append([])
        elif text := line.strip("│| "):
            parts[-1].append(text)
    first, *rest = [part for part in parts if part] or [[]]
    problem = MISSING.sub("missing: ", " ".join(first)).removesuffix(" (required)")
    near = [
        hint.split()[0].rstrip(",")
        for title, *hints in rest
        if title.startswith(SUGGESTIONS)
        for hint in hints
        if hint.startswith("-")
    ]
    if near:
        problem += f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    return problem[:1].lower() + problem[1:] if problem else "the options cannot be understood"
