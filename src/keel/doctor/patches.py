"""Fixes in the words of the framework that wrote the log: patches, snippets, configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.doctor.dialects import SAME, Dialect, There, dialect_of
from keel.doctor.finding import Change, Fix

_YAML = ("keel", "yaml")
DIGITS = 2
"""Significant digits of a value that was multiplied: 0.3 × 0.0025 is 0.00075."""


@dataclass(frozen=True)
class Patch:
    """One setting before and after, by its name in the framework."""

    setting: str
    """Keel's dotted name"""
    name: str | None
    """the name there; None where it has no such setting"""
    old: Any
    """None where it is not known"""
    new: Any
    """None where `times` is all that is known"""
    times: float | None = None
    """factor on the value there, where that is not known"""
    where: str = ""
    """call or section"""
    style: str = "keel"
    note: str = ""

    @property
    def value(self) -> str:
        """The new value as text, or the factor."""
        if self.new is None and self.times is not None:
            return f"{self.times:g} × its value"
        return _literal(self.new, self.style)

    def line(self, value: str) -> str:
        """Return the setting with a value as it is written there."""
        name = self.name or self.setting
        if self.style == "flag":
            return f"--{name} {value}"
        between = ": " if self.style in ("keel", "yaml") else "="
        in_section = self.style == "yaml" and self.where
        return f"{self.where}.{name}{between}{value}" if in_section else f"{name}{between}{value}"

    def lines(self) -> list[str]:
        """Return the patch as lines that begin with `-` and `+`."""
        if self.name is None:
            return [f"  {self.setting} → {self.value} (there is no setting for it)"]
        note = f"  # {self.note}" if self.note else ""
        scope = f"  # {self.where}(…)" if self.style == "call" and self.where else ""
        new = f"+ {self.line(self.value)}{note or scope}"
        if self.old is None:
            return [new]
        return [f"- {self.line(_literal(self.old, self.style))}", new]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "setting": self.setting,
            "name": self.name,
            "where": self.where or None,
            "old": self.old,
            "new": self.new,
            "times": self.times if self.new is None else None,
            "note": self.note or None,
        }


def patch(fix: Fix, framework: str, settings: Mapping[str, Any]) -> tuple[Patch, ...]:
    """Return the changes of a fix in the words of a framework.

    Args:
        fix: What to do.
        framework: As in `RunLog.framework`; Keel's own names where it is not known.
        settings: Those that are known, by Keel's dotted names.

    Examples:
        >>> fix = Fix("lower the learning rate", (Change("region.learning_rate", times=0.3),))
        >>> for change in patch(fix, "sb3", {"region.learning_rate": 0.01}):
        ...     print(*change.lines(), sep="\\n")
        - learning_rate=0.01
        + learning_rate=0.003  # PPO(…)
    """
    dialect = dialect_of(framework, settings)
    patches = (_patch(change, dialect, settings) for change in fix.changes)
    return tuple(p for p in patches if p.times is not None or p.old is None or p.new != p.old)


def _patch(change: Change, dialect: Dialect | None, settings: Mapping[str, Any]) -> Patch:
    setting = _known_as(change.setting, settings)
    old = settings.get(setting)
    new = change.to if change.times is None else _times(old, change.times)
    if dialect is None:
        return Patch(setting, setting, old, new, change.times)
    there = dialect.names.get(setting) or dialect.names.get(SAME.get(setting, ""))
    if there is None:
        return Patch(setting, None, old, new, change.times, style=dialect.style)
    return Patch(
        setting,
        there.name,
        _converted(there, old, settings),
        _converted(there, new, settings),
        _factor(there, change.times),
        there.where or dialect.where,
        dialect.style,
        there.note,
    )


def _known_as(setting: str, settings: Mapping[str, Any]) -> str:
    """Return the name under which a setting is known; kinds of runs differ."""
    other = SAME.get(setting)
    return other if other in settings and setting not in settings else setting  # type: ignore[return-value]


def _times(old: Any, times: float) -> Any:
    if isinstance(old, bool) or not isinstance(old, int | float):
        return None
    if isinstance(old, int):
        return max(1, round(old * times))
    return float(f"{old * times:.{DIGITS}g}")


def _converted(there: There, value: Any, settings: Mapping[str, Any]) -> Any:
    if value is None or there.convert is None:
        return value
    return there.convert(value, settings)


def _factor(there: There, times: float | None) -> float | None:
    """Return the factor there: the number of minibatches falls where their size rises."""
    if times is None or there.convert is None:
        return times
    return 1.0 / times if there.name in ("num-minibatches", "num_mini_batches") else times


def patched(settings: Mapping[str, Any], patches: Iterable[Patch]) -> dict[str, Any]:
    """Return settings with the changes of patches whose new value is known.

    Args:
        settings: By Keel's dotted names.
        patches: Of a run of Keel.
    """
    changes = {one.setting: one.new for one in patches if one.new is not None or one.times is None}
    return {**settings, **changes}


def snippet(patches: Sequence[Patch], framework: str, settings: Mapping[str, Any]) -> list[str]:
    """Return what to write in a script or on a command line of a framework, as lines.

    Args:
        patches: Of a fix.
        framework: As in `RunLog.framework`.
        settings: Those that are known, by Keel's dotted names.
    """
    dialect = dialect_of(framework, settings)
    there = [one for one in patches if one.name is not None]
    lines = [f"# {one.setting}: {one.value}: no setting for it" for one in patches if not one.name]
    if dialect is None:
        return lines + [one.line(one.value) for one in there]
    if dialect.style in ("flag", "override"):
        words = " ".join(one.line(_word(one)) for one in there)
        return [*lines, f"{dialect.where} {words} …"] if there else lines
    sections = dict.fromkeys(one.where for one in there)
    return lines + [line for where in sections for line in _section(where, there, dialect.style)]


def _section(where: str, patches: Sequence[Patch], style: str) -> list[str]:
    own = [one for one in patches if one.where == where]
    if style == "yaml":
        return [f"{where}:", *(f"  {one.name}: {one.value}" for one in own)]
    arguments = ", ".join(f"{one.name}={one.value}" for one in own)
    return [f"{where}({arguments}, …)"]


def _word(one: Patch) -> str:
    """Return a value as one word of a command line."""
    return f"'{one.value}'" if " " in one.value else one.value


def _literal(value: Any, style: str) -> str:
    """Return a value as it is written in Python, YAML or on a command line."""
    if isinstance(value, bool) or value is None:
        text = str(value)
        return (
            text
            if style in ("call", "flag", "override")
            else {"None": "null"}.get(text, text.lower())
        )
    if isinstance(value, float):
        text = f"{value:.6g}"
        # YAML 1.1 takes 3e-05 for a word
        return text.replace("e", ".0e") if style in _YAML and "." not in text else text
    if isinstance(value, str):
        return repr(value) if style == "call" else value
    return str(value)
