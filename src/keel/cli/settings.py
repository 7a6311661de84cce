"""Settings in force and their sources, for `--print-config` and `--help` of `keel train`."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import shutil
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from tyro.conf import FlagCreatePairsOff, Positional, arg

from keel.cli.arguments import HELP, check_file, find_option
from keel.cli.strict_json import print_json
from keel.config import read
from keel.config.origins import (
    DEFAULT,
    Layer,
    Setting,
    as_yaml,
    dotted,
    flagged,
    leaves,
    one_line_yaml,
    settings_of,
)
from keel.data import read_beside
from keel.errors import KeelError
from keel.trust import require_trust

HELP_ALL = "--help-all"


@dataclass(frozen=True)
class TrainOptions:
    """Options of `keel train`; each kind of run adds its settings as `config`."""

    env: Annotated[Positional[str], arg(metavar="ENV")]
    """A Gymnasium id such as CartPole-v1, an alias such as Breakout, or module:Class; by default
    the environment that the file of --config names."""
    preset: str | None = None
    """Settings to start from; by default those of the environment, or of the task, and the
    algorithm. `keel presets` lists them."""
    config_file: Annotated[Path | None, arg(name="config", metavar="FILE.yaml")] = None
    """A YAML file of settings; flags go before it, it goes before the preset."""
    runs: Path = Path("runs")
    """Folder of the runs."""
    name: str | None = None
    """Name of the run; by default environment or task, algorithm and time."""
    seeds: tuple[int, ...] = ()
    """Train several seeds, as many at a time as there are cores for."""
    trust_code: Annotated[bool, FlagCreatePairsOff] = False
    """Import code that FILE names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object at the end, and nothing else."""
    quiet: Annotated[bool, FlagCreatePairsOff] = False
    """Show no progress."""
    print_config: Annotated[bool, FlagCreatePairsOff] = False
    """Print the settings in force and where each comes from, as a YAML file; train nothing."""
    config: Any = None
    """Settings of the run."""


@dataclass(frozen=True)
class ShortHelp:
    """Settings of the short help, those that most runs change, and all options of their own."""

    environments: tuple[str, ...]
    language: tuple[str, ...]
    options: dict[str, str]


SHORT_HELP = read_beside(__file__, "short_help.yaml", ShortHelp)


class Resolved(NamedTuple):
    """Options of a command line together with the layers their settings came from."""

    options: Any
    layers: tuple[Layer, ...]

    @property
    def settings(self) -> list[Setting]:
        """Return every setting in force."""
        return settings_of(self.options.config, self.layers)


class Grammar(NamedTuple):
    """Settings, help and summaries of one kind of run."""

    presets: Callable[[], list[str]]
    translate: Callable[[Sequence[str]], list[str]]
    """words of the user to words with the settings' own names"""
    settle: Callable[[list[str]], list[str]]
    """the same without flags whose meaning depends on other settings"""
    resolve: Callable[[list[str]], Resolved]
    check: Callable[[Any], None]
    """raises for a configuration that cannot be trained"""
    help: Callable[[list[str]], str]
    """the short help, for words without the flag that asks for it"""
    title: Callable[[Any], str]
    """the command without flags, for a configuration"""
    opening: Callable[[Any, Mapping[str, object], bool], list[str]]
    """lines that say that training begins: of a configuration, what was decided automatically, and
    whether there is a terminal"""
    progress_line: Callable[[Any, dict[str, float]], str]
    """Line for work before the first update, or after the last."""
    draw: Callable[[Path, Any], list[tuple[str, Path]]]
    """draws pictures of a run: what they are, and where"""
    summary: Callable[[Any], dict[str, Any]]
    """more entries for the summary of a run, from its last progress"""
    outcome: Callable[[dict[str, Any]], list[str]]
    """lines about what was learned, of a summary"""
    acceleration: Callable[[Any], dict[str, str]]
    """what computes the parts of a run, in words; opens what it needs to know it"""
    evaluate: Callable[[Any], tuple[dict[str, Any], str]]
    """evaluates with the options of `keel evaluate`: the result, and the same as text"""
    unit: str = "nats"
    """Unit of the exact KL."""


def prepare(words: list[str], grammar: Grammar, typed: Sequence[str] | None = None) -> Any:
    """Return checked options to train with; None where help or settings were asked for and printed.

    Args:
        words: The command line, translated.
        grammar: What it is read with.
        typed: What the user typed of it, where `words` repeats settings of a file; code that is
            named there is trusted.
    """
    if set(HELP) & set(words):
        print(grammar.help([word for word in words if word not in HELP]))  # noqa: T201
        return None
    resolved = grammar.resolve([HELP[-1] if word == HELP_ALL else word for word in words])
    config = resolved.options.config
    grammar.check(config)
    if resolved.options.print_config:
        print_settings(resolved, grammar.title(config))
        if not resolved.options.json:
            print_acceleration(resolved.options, grammar, words if typed is None else typed)
        return None
    check_file(config, words if typed is None else typed, resolved.options.trust_code)
    return resolved.options


def resolved(
    options: Any, args: list[str], preset: Path | None, typed: Collection[str] = ()
) -> Resolved:
    """Return options with the layers of their settings: preset, file and flags.

    Args:
        options: What the command line was read into; the first of `seeds` becomes the seed.
        args: The command line.
        preset: File of the preset below everything else, if there is one.
        typed: More settings that the command line names, without a flag.
    """
    flags = flagged(args, dict(leaves(options.config))) | frozenset(typed)
    if options.seeds:
        config = dataclasses.replace(options.config, seed=options.seeds[0])
        options, flags = dataclasses.replace(options, config=config), flags | {"seed"}
    layers = []
    if preset is not None:
        layers.append(Layer(f"preset {preset.stem}", dotted(read(preset))))
    if file := find_option(args, "--config"):
        layers.append(Layer(f"file {file}", dotted(read(Path(file)))))
    return Resolved(options, (*layers, Layer("flag", flags)))


def print_settings(resolved: Resolved, title: str) -> None:
    """Print the settings in force as YAML that `--config` reads, or as JSON with `--json`.

    Args:
        resolved: What the command line comes to.
        title: The command, for the comment above.
    """
    settings = resolved.settings
    if resolved.options.json:
        print_json({name: {"value": value, "source": source} for name, value, source in settings})
        return
    sources = " before ".join([*(layer.source for layer in reversed(resolved.layers)), DEFAULT])
    print(f"# {title}: settings in force, {sources}")  # noqa: T201
    print(as_yaml(settings))  # noqa: T201


def print_acceleration(options: TrainOptions, grammar: Grammar, typed: Sequence[str]) -> None:
    """Print what computes the run, as comments below its settings.

    Args:
        options: What the command line was read into.
        grammar: What it was read with.
        typed: The command line: code that only a file names is not imported for this.
    """
    choices = {"optimizer_step": "decided when the environment is known"}
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # both are told again when training begins
        with contextlib.suppress(KeelError):
            require_trust(
                dataclasses.asdict(options.config), "--config", options.trust_code, typed=typed
            )
            choices = grammar.acceleration(options.config)
    for name, choice in choices.items():
        words = name.replace("_", " ").replace("fisher", "Fisher")
        print(f"# {words}: {choice}")  # noqa: T201


def short_help(resolved: Resolved, usage: str, about: str, fields: Sequence[str]) -> str:
    """Return help on the settings that matter most, with the values in force as defaults.

    Args:
        resolved: What the command line comes to without further flags.
        usage: The command with its positional words.
        about: One or more lines below it.
        fields: Dotted names of the settings to list.
    """
    config = resolved.options.config
    values, helps = dict(leaves(config)), field_help(type(config))
    rows = [
        (_flag(name, type(config)), one_line_yaml(values[name]), helps[name]) for name in fields
    ]
    own = [(flag, "", text) for flag, text in SHORT_HELP.options.items()]
    total = len(values)
    return "\n".join(
        [
            f"usage: {usage}",
            "",
            about,
            "",
            f"settings, with their defaults here ({HELP_ALL} lists all {total}):",
            *_table(rows),
            "",
            "options:",
            *_table(own),
        ]
    )


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Flags, values and help in columns; long help goes on below."""
    flags, values = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    values += bool(values)
    columns = min(100, max(60, shutil.get_terminal_size().columns))
    indent = " " * (flags + values + 4)
    lines = []
    for flag, value, text in rows:
        head = f"  {flag:<{flags}} {value:>{values}} "
        first = head.ljust(len(indent))
        lines += textwrap.wrap(text or "–", columns, initial_indent=first, subsequent_indent=indent)
    return lines


def _flag(name: str, kind: type) -> str:
    """`--region.max-kl`, with the choices where there are few."""
    hint = _hint(kind, name)
    flag = f"--{name.replace('_', '-')}"
    if typing.get_origin(hint) is Literal:
        choices = "|".join(map(str, typing.get_args(hint)))
        return f"{flag} {choices}" if len(choices) < 20 else flag
    return flag


def _hint(kind: type, name: str) -> Any:
    first, _, rest = name.partition(".")
    hint = typing.get_type_hints(kind)[first]
    return _hint(hint, rest) if rest else hint


def field_help(kind: type) -> dict[str, str]:
    """Return the first sentence of the text below each field of a dataclass, by dotted name."""
    hints = typing.get_type_hints(kind)
    helps: dict[str, str] = {}
    texts = dict.fromkeys(hints, "")
    for defined in reversed(kind.__mro__[:-1]):  # a field that is given again keeps its text
        texts |= _own_texts(defined)
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            helps |= {f"{name}.{inner}": text for inner, text in field_help(hint).items()}
        else:
            helps[name] = texts[name]
    return helps


def _own_texts(kind: type) -> dict[str, str]:
    """Return the first sentence of the text below each field that a class itself defines."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(statement.target): first_sentence(after.value.value)
        for statement, after in itertools.pairwise(body.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop, on one line."""
    flat = " ".join(text.split())
    end = flat.find(". ")
    return flat if end < 0 else flat[: end + 1]
