"""Options that every topic of `keel explain` has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg


@dataclass(frozen=True)
class Output:
    """Form of the answer."""

    plot: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Draw a picture into FILE (.png, .svg or .pdf)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text; an infinite number becomes null."""


Answer = Annotated[Output, arg(name="")]


def split_names(names: str | None) -> list[str] | None:
    """Return the names of a comma-separated list, or None where none are given."""
    return None if names is None else names.split(",")
