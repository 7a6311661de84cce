"""All rules, for people: what each reads, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence

from keel.doctor.api import all_rules
from keel.doctor.dialects import DIALECTS
from keel.doctor.rule import FAMILIES, SETTING, Rule
from keel.doctor.text import shortened

OF_LANGUAGE = ("trl", "verl", "openrlhf")
"""Frameworks that train language models."""


def needs_of(entry: Rule) -> str:
    """Return what a rule reads, in words."""
    parts = [shortened(need.replace("|", " or ").replace(SETTING, "")) for need in entry.needs]
    if entry.rows > 1:
        parts.append(f"{entry.rows} rows")
    return ", ".join(parts)


def rule_rows() -> list[tuple[str, str, str, str]]:
    """Return name, family, needs and source of every rule, in the order of thought."""
    return [(r.id, r.family, needs_of(r), r.source) for r in all_rules()]


def documentation() -> str:
    """Return the table of all rules, in Markdown, a section a family."""
    sections = []
    for family in FAMILIES:
        rules = [entry for entry in all_rules() if entry.family == family]
        if rules:
            rows = [[f"`{r.id}`", _sentence(r), _code(needs_of(r)), r.source] for r in rules]
            sections += [f"### {family.capitalize()}", "", *_markdown(RULES, rows), ""]
    return "\n".join(sections)


RULES = ("rule", "what it does", "what it reads", "source")


def settings_documentation() -> str:
    """Return tables of settings and their names in each framework, in Markdown.

    One for trainers in environments and one for those of language models: together they would be
    wider than a page.
    """
    variants = ("sb3-trpo", "trl-ppo", "swift")
    others = [name for name in DIALECTS if name not in (*variants, *OF_LANGUAGE)]
    return "\n\n".join(_settings_table(names) for names in (others, OF_LANGUAGE))


def _settings_table(frameworks: Sequence[str]) -> str:
    shown = [DIALECTS[name] for name in frameworks]
    names = dict.fromkeys(name for dialect in shown for name in dialect.names)
    rows = [
        [f"`{name}`", *(f"`{there.name}`" if (there := d.names.get(name)) else "" for d in shown)]
        for name in names
    ]
    return "\n".join(_markdown(("Keel", *(d.title for d in shown)), rows))


def _sentence(entry: Rule) -> str:
    """Return the first line of a rule's documentation."""
    return (entry.check.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _code(needs: str) -> str:
    return ", ".join(
        " or ".join(
            f"`{name}`" if "/" in name or "." in name else name for name in part.split(" or ")
        )
        for part in needs.split(", ")
        if part
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
