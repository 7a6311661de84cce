"""The cases that come with Keel, by name."""

from __future__ import annotations

from keel.cases.case import Case
from keel.cases.demos_dominate import CASE as DEMOS_DOMINATE
from keel.cases.kl_explosion import CASE as KL_EXPLOSION
from keel.cases.line_search_collapse import CASE as LINE_SEARCH_COLLAPSE
from keel.cases.replica_collapse import CASE as REPLICA_COLLAPSE
from keel.cases.reward_hacking import CASE as REWARD_HACKING
from keel.errors import check_choice

CASES = {
    case.name: case
    for case in (
        KL_EXPLOSION,
        DEMOS_DOMINATE,
        LINE_SEARCH_COLLAPSE,
        REWARD_HACKING,
        REPLICA_COLLAPSE,
    )
}
"""In the order of the working notes."""


def case_named(name: str) -> Case:
    """Return a case, or raise an `InputError` with the nearest name."""
    return CASES[check_choice("case", name, CASES)]
