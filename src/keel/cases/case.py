"""What a case is made of: settings that make a run sick, and what its author believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMS = ("short", "usual", "full")
"""Lengths of a case: for tests and the impatient, for a look, as long as the original asks for."""
Prepare = Callable[[Path, Mapping[str, Any], int], Mapping[str, Any]]
"""Makes what both runs begin with: folder, settings, seed → settings by dotted names."""


@dataclass(frozen=True)
class Shown:
    """A metric that the page shows, before and after."""

    metric: str
    label: str
    """name and unit, for people"""
    better: Literal["lower", "higher"]
    form: str = ".3g"
    """format of its values"""
    over: Literal["end", "run"] = "end"
    """what is compared: the median of the last fifth, or the mean of the whole run"""


@dataclass(frozen=True)
class Case:
    """One run that was sick for somebody."""

    name: str
    title: str
    note: str
    """number of the working note that it comes from"""
    symptom: str
    """what was seen"""
    belief: str
    """what the note's author believed, in our words"""
    lesson: str
    """what it was, and what this case does not show"""
    settings: Mapping[str, Any]
    """of the sick run, by dotted names, `env` among them"""
    forms: Mapping[str, Mapping[str, Any]]
    """settings of each of `FORMS`, on top"""
    minutes: Mapping[str, str]
    """about how long each form takes on a free core, for people"""
    shown: tuple[Shown, ...]
    """what is drawn and compared; the first is what the cure is judged by"""
    family: str
    """family of the rule that should speak first; for tests, the doctor does not see it"""
    preset: str = ""
    repair: Mapping[str, Any] = field(default_factory=dict)
    """what no fix by settings undoes: a planted bug is switched off, a reward mended"""
    repaired: str = ""
    """what that means, as a sentence"""
    rounds: int = 1
    """how often the doctor is asked, at most, one cause at a time; the short form asks once"""
    stops: bool = False
    """whether the fix by settings alone, without the repair, stops the run with an error that names
    the cause; it is tried, and what it said is shown"""
    prepare: Prepare | None = None
