"""`keel envs [PATTERN]`: what can be trained here, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options
from keel.cli.strict_json import print_json
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.envs.catalog import Entry


@dataclass(frozen=True)
class ListEnvs:
    """List what can be trained here: environments and language tasks, and what each needs.

    Environments of your own are trained as well: registered ones as module:Name-v0, those with
    several agents as module:parallel_env.

    Examples: keel envs
              keel envs mujoco
    """

    pattern: Annotated[Positional[str], arg(metavar="PATTERN")] = ""
    """Part of a name or of a family, such as Hopper, atari or Half*v5; by default everything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON list in place of a table."""


def run(args: Sequence[str]) -> int:
    """List what can be trained."""
    options = read_options(ListEnvs, args, "keel envs")
    from keel.envs.catalog import catalog, matching

    entries = matching([*catalog(), *_language_tasks()], options.pattern)
    if not entries:
        raise InputError(
            f"nothing is called {options.pattern!r}; `keel envs` lists all, and environments of "
            "your own are trained as module:Name-v0"
        )
    rows = [_row(entry) for entry in entries]
    if options.json:
        print_json(rows)
    else:
        _print_table(rows)
    return 0


def _language_tasks() -> list[Entry]:
    """Return the tasks of `keel train language`, as entries beside the environments."""
    import importlib.util

    from keel.apps.language.registries import TASKS
    from keel.envs.catalog import Entry

    ready = importlib.util.find_spec("transformers") is not None
    return [
        Entry(f"language --task {x}", "language task", "language", ready) for x in TASKS.names()
    ]


def _row(entry: Entry) -> dict[str, Any]:
    from keel.apps.language.presets import name_for
    from keel.presets import preset_for

    task = entry.name.removeprefix("language --task ")
    preset = name_for(task, None) if task != entry.name else preset_for(entry.name)[0]
    return {
        "name": entry.name,
        "family": entry.family,
        "ready": entry.ready,
        "extra": entry.extra or None,
        "preset": preset or "default",
    }


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from keel.cli.render import print_table

    def needs(row: dict[str, Any]) -> str:
        return "ready" if row["ready"] else f'pip install "keel-rl[{row["extra"]}]"'

    titles = ("keel train …", "family", "preset", "")
    cells = [(row["name"], row["family"], row["preset"], needs(row)) for row in rows]
    print_table(titles, cells, left=range(len(titles)))
