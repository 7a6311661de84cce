"""Searching settings with Optuna, among those that keep to the trust region."""

from keel.tune.space import DEFAULT, Range, read_space
from keel.tune.study import TrialResult, Tuning, best_of, end_of, open_study, take_over, work

__all__ = [
    "DEFAULT",
    "Range",
    "TrialResult",
    "Tuning",
    "best_of",
    "end_of",
    "open_study",
    "read_space",
    "take_over",
    "work",
]
