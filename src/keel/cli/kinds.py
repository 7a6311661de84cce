"""The grammar of each kind of run, by the name that stands in place of an environment."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keel.cli.arguments import find_option, translate
from keel.config import read

if TYPE_CHECKING:
    from keel.cli.settings import Grammar

GRAMMARS = {"language": "keel.cli.language"}
OTHERS = "keel.cli.environments"


def grammar_for(args: Sequence[str]) -> Grammar:
    """Return the grammar that the first word asks for, or else the file of --config."""
    if args and not args[0].startswith("-"):
        return grammar_of(args[0])
    file = find_option(translate(args), "--config")
    return grammar_of(None if file is None else read(Path(file)).get("env"))


def grammar_of(env: object) -> Grammar:
    """Return the grammar of runs on an environment, by its name."""
    name = GRAMMARS.get(env, OTHERS) if isinstance(env, str) else OTHERS
    grammar: Grammar = importlib.import_module(name).GRAMMAR
    return grammar
