"""Runs side by side: aligned curves, honest intervals, and a verdict by fixed criteria.

Only reads: runs of Keel, and the logs of SB3, CleanRL, RLlib or any CSV.
"""

from keel.compare.comparison import Comparison, Group, Pair, as_json, compare
from keel.compare.sources import Run, load_runs
from keel.compare.verdict import Criteria, Effect, Verdict

__all__ = [
    "Comparison",
    "Criteria",
    "Effect",
    "Group",
    "Pair",
    "Run",
    "Verdict",
    "as_json",
    "compare",
    "load_runs",
]
