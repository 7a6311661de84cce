"""Explanations with numbers: what KL, clipping, penalties and trust regions do to *your* values.

Each function returns an `Explanation`: the idea, the formula, tables, one sentence of meaning, the
same numbers as data, and a picture. `keel explain` prints them; the documentation is built of them.
"""

from keel.explain.advantage import explain_advantage
from keel.explain.clip import explain_clip
from keel.explain.code_length import explain_code_length
from keel.explain.estimators import explain_estimators
from keel.explain.explanation import Explanation, Table
from keel.explain.kl import explain_gaussian_kl, explain_kl
from keel.explain.landscape import explain_landscape
from keel.explain.penalty import explain_penalty
from keel.explain.projection import explain_projection
from keel.explain.sequence import explain_sequence
from keel.explain.states import explain_states
from keel.explain.trust_region import explain_trust_region

__all__ = [
    "Explanation",
    "Table",
    "explain_advantage",
    "explain_clip",
    "explain_code_length",
    "explain_estimators",
    "explain_gaussian_kl",
    "explain_kl",
    "explain_landscape",
    "explain_penalty",
    "explain_projection",
    "explain_sequence",
    "explain_states",
    "explain_trust_region",
]
