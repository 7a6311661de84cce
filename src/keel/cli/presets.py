"""`keel presets`: settings that come with Keel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import Actions, default_action, run_action
from keel.cli.settings import first_sentence
from keel.cli.strict_json import print_json
from keel.config import read
from keel.config.values import read_text
from keel.errors import check_choice

USAGE = """\
usage: keel presets [list] [--json]
       keel presets show NAME [--json]

Settings that come with Keel. `keel train ENV` starts from the one of its environment,
`keel train ENV --preset NAME` from another."""


@dataclass(frozen=True)
class List:
    """List the presets: what they train, and what is known of them."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON list in place of a table."""


@dataclass(frozen=True)
class Show:
    """Show what a preset sets, as a YAML file; everything else is as it is by default.

    Example: keel presets show HalfCheetah
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A preset; `keel presets` lists them."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of YAML."""


def run(args: Sequence[str]) -> int:
    """List the presets, or show one."""
    actions: Actions = {"list": (List, _list), "show": (Show, _show)}
    return run_action("presets", default_action(args, "list"), actions, USAGE)


def _files() -> dict[str, Path]:
    """Return the file of every preset: those of environments, then those of language tasks."""
    from keel import presets
    from keel.apps.language import presets as language

    return {name: module.path_of(name) for module in (presets, language) for name in module.names()}


def _list(options: List) -> int:
    rows = [describe_preset(name, path) for name, path in _files().items()]
    if options.json:
        print_json(rows)
        return 0
    from keel.cli.render import print_table

    titles = ("name", "trains", "algorithm", "what is known of it")
    cells = [tuple(str(row[key]) for key in ("name", "trains", "algo", "note")) for row in rows]
    print_table(titles, cells, left=range(len(titles)))
    return 0


def describe_preset(name: str, path: Path) -> dict[str, Any]:
    """Return what a preset trains, its algorithm, and the first sentence of its comment.

    Args:
        name: The preset.
        path: Its file.
    """
    settings = read(path)
    task = settings.get("task")
    lines = [x[1:].strip() for x in read_text(path).splitlines() if x.startswith("#")]
    note = first_sentence(" ".join(lines))
    return {
        "name": name,
        "trains": f"language --task {task}" if task else settings.get("env", "any environment"),
        "algo": settings.get("algo", "ppo"),
        "note": note,
    }


def _show(options: Show) -> int:
    files = _files()
    path = files[check_choice("preset", options.name, files)]
    if options.json:
        print_json(describe_preset(options.name, path) | {"settings": read(path)})
    else:
        print(read_text(path).rstrip())  # noqa: T201
    return 0
