"""Command-line words as tyro wants them: aliases resolved, 1e6 for whole numbers."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import tyro

from keel.config import read
from keel.config.common import SINKS
from keel.config.reading import setting_name, setting_value
from keel.errors import InputError, check_choice
from keel.printing import printable
from keel.tracking.record import warn_if_changed
from keel.trust import require_trust

T = TypeVar("T")

HELP = ("-h", "--help")
SCIENTIFIC = re.compile(r"^\d+(\.\d+)?[eE]\+?\d+$")


def translate(args: Sequence[str], aliases: Mapping[str, str] | None = None) -> list[str]:
    """Return words with `--flag=value` split, aliases and old names resolved, 1e6 written out.

    Args:
        args: Words of the command line.
        aliases: Settings by their other names, with hyphens.
    """
    names = aliases or {}
    words = [_write_out(names.get(x.replace("_", "-"), x)) for x in split_flags(args)]
    return join_lists(rename_flags(words))


def rename_flags(words: Sequence[str]) -> list[str]:
    """Return words with flags, and values after them, as they are called today.

    Args:
        words: Of a command line, flags and values apart.

    Examples:
        >>> rename_flags(["--network.kind", "items", "--bc.demos", "DIR"])
        ['--network.kind', 'pointer', '--demos.path', 'DIR']
    """
    renamed: list[str] = []
    setting = ""
    for word in words:
        if word.startswith("--"):
            renamed.append(f"--{setting_name(word[2:])}")
            setting = renamed[-1][2:].replace("-", "_")
        else:
            renamed.append(setting_value(setting, word))
    return renamed


LISTS: Mapping[str, Callable[[str], bool]] = {
    "--log": lambda word: word in SINKS,
    "--envs.options": lambda word: "=" in word,
    "--task-options": lambda word: "=" in word,
    "--reward.functions": lambda word: ":" in word or word.startswith("task"),
}
"""Flags of several values, and what a further value looks like; other words are not theirs."""


def join_lists(words: Sequence[str]) -> list[str]:
    """Return words with the values of such a flag as one word, separated by commas.

    Examples:
        >>> join_lists(["--log", "tensorboard", "wandb", "CartPole-v1"])
        ['--log', 'tensorboard,wandb', 'CartPole-v1']
    """
    joined: list[str] = []
    for word in words:
        flag = joined[-2].replace("_", "-") if len(joined) > 1 else ""
        if flag in LISTS and LISTS[flag](word):
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


def split_flags(args: Sequence[str]) -> list[str]:
    """Return words with each `--flag=value` as two."""
    return [
        part for word in args for part in (word.split("=", 1) if word.startswith("--") else (word,))
    ]


def take_list(args: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Return the values of `--flag A B C`, however often it is given, and the other words.

    Args:
        args: Words of the command line, flags and values apart.
        flag: Flag that ends at the next one.
    """
    values: list[str] = []
    rest: list[str] = []
    inside = False
    for word in args:
        inside = word == flag or (inside and not word.startswith("--"))
        if not inside:
            rest.append(word)
        elif word != flag:
            values.append(word)
    return values, rest


def _write_out(text: str) -> str:
    """Return 1e6 written out, where it is a whole number."""
    if SCIENTIFIC.match(text) and float(text).is_integer():
        return str(int(float(text)))
    return text


def check_file(config: Any, args: Sequence[str], trust_code: bool) -> None:
    """Check the file of `--config` before anything is trained.

    Says on stderr if the environment on the command line replaces that of the file, warns if a run
    wrote the file and it is no longer as it was, and raises if it names code that is not trusted.

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
    warn_if_changed(Path(file))
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


Actions = Mapping[str, tuple[type[Any], Callable[[Any], int]]]
"""Actions of a command by name: their options, and what runs them."""


def run_action(
    command: str,
    args: Sequence[str],
    actions: Actions,
    usage: str,
    kind: str = "",
) -> int:
    """Run the action that the first word names, or print the usage, and return the exit status.

    Args:
        command: The command whose actions these are.
        args: Words after its name.
        actions: Of the command.
        usage: Help of the command itself.
        kind: What errors call an action; by default as the command is called.
    """
    if not args or args[0] in HELP:
        print(usage)  # noqa: T201
        return 0
    options, run = actions[check_choice(kind or command, args[0], actions)]
    return run(read_options(options, args[1:], f"keel {command} {args[0]}"))


def default_action(args: Sequence[str], action: str) -> list[str]:
    """Return words with an action in front, where they name none and ask for no help."""
    named = bool(args) and (not args[0].startswith("-") or args[0] in HELP)
    return list(args) if named else [action, *args]


def describe_actions(kinds: Mapping[str, type]) -> str:
    """Return names with the first line of what documents their options, for the help above them."""
    width = max(map(len, kinds))
    return "\n".join(
        f"  {name:<{width}}  {(kind.__doc__ or '').splitlines()[0]}" for name, kind in kinds.items()
    )


def _tyro(kind: type[T], args: Sequence[str], prog: str, options: Mapping[str, Any]) -> Any:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=list(args), prog=prog, **options)
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
    suggestions = [
        hint.split()[0].rstrip(",")
        for title, *hints in rest
        if title.startswith(SUGGESTIONS)
        for hint in hints
        if hint.startswith("-")
    ]
    if suggestions:
        problem += f"; did you mean {' or '.join(dict.fromkeys(suggestions))}?"
    return problem[:1].lower() + problem[1:] if problem else "the options cannot be understood"
