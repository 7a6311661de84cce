"""Every number of the research list about updates has a rule, or a reason why it has none."""

from __future__ import annotations

import pytest

import keel.doctor.rules  # noqa: F401
from keel.doctor.rule import RULES

COVERED = {
    1: ("replay-differs",),
    2: ("clipped-before-first-step", "ratio-mean-off"),
    3: ("illegal-actions",),
    4: ("samples-not-from-policy", "replay-differs", "sampler-gap-constant"),
    5: ("ratios-non-finite",),
    6: (
        "kl-negative",
        "k1-beyond-k3",
        "clip-without-kl",
        "kl-k1-stops",
        "k1-negative-is-usual",
    ),
    7: ("rejected-logged-as-zero", "kl-zero", "nothing-moves"),
    8: ("learning-rate-too-high", "kl-over-target"),
    9: ("kl-spikes",),
    10: ("steps-too-small",),
    11: ("clip-fraction-high", "clip-does-not-bound"),
    12: ("ratios-extreme", "k3-explodes"),
    13: ("ratios-extreme",),
    14: ("too-many-epochs",),
    15: ("loss-non-finite", "gradients-non-finite", "rewards-non-finite"),
    16: ("line-search-fails",),
    17: ("step-vanishes",),
    18: ("curvature-not-positive", "conjugate-gradient-stops"),
    19: ("trpo-batch-small",),
    20: ("gain-ratio-off",),
    29: ("advantages-not-normalized",),
    52: ("gradient-clip-heavy", "gradient-vanishes"),
    56: ("kl-reference-negative",),
    58: ("penalty-without-effect", "entropy-constant"),
}
"""Rules by number in the research list."""
FAMILIES = {
    "stale sampler weights": ("sampler-stale",),
    "weights never sent, positions": ("sampler-gap-grows",),
    "raw against processed log-probs": ("sampler-gap-constant", "sampler-ratio-off"),
    "samples that no sampler scored": ("samples-surprising",),
    "learning rates of language models": ("parameters-leap", "rate-too-low"),
    "bf16": ("sampler-gap-is-usual",),
    "fractions above 1": ("share-outside-0-1",),
    "negative standard deviations": ("magnitude-negative", "action-std-negative"),
    "explained variance above 1": ("explained-variance-over-1",),
    "units": ("entropy-over-maximum", "kl-units"),
    "signs": ("entropy-negative", "kl-penalty-sign"),
    "sums where means are meant": ("kl-summed-over-tokens", "kl-beyond-clip", "loss-parts-differ"),
    "means with padding": ("token-means-pad",),
    "groups": ("informative-contradicts-std",),
    "zero or constant by construction": ("explained-variance-constant", "entropy-constant"),
    "last minibatch": ("last-minibatch-is-usual",),
    "two runs in one log": ("counter-goes-back",),
    "walk-backs": ("walk-backs-miscounted", "walk-backs-frequent"),
    "healthy and reported": ("loss-zero-is-usual", "clip-zero-is-usual"),
    "optimizer without parameters": ("optimizer-empty",),
    "gradients that never arrive": ("gradient-without-effect", "reference-kl-zero"),
    "learning rate 0": ("learning-rate-zero",),
    "β not forwarded": ("beta-not-forwarded",),
    "another reference": ("reference-differs-at-start",),
    "nothing bounds the updates": ("nothing-bounds-updates",),
    "certificate": ("certificate-broken", "kl-estimated"),
    "few samples left": ("sample-size-low", "region-drifts"),
    "early stops": ("early-stop-at-once",),
}
"""Rules by the families of causes that the numbers do not cover."""
PARTS_LEFT_OUT = {
    "7, NaN after a rejection": "Keel logs NaN (train/kl_step); the others' zero is named",
    "10, 0.2 × target": "healthy runs fall below it late in a schedule, and in a solved task: "
    "the rule looks at 1e-4 nats in the first half of a run",
    "11, below 0.05": "small clip fractions are healthy: all steps at the end of a schedule, most "
    "of them with few epochs",
    "14, 2 × alone": "the last epoch is further than the first in every healthy run of several "
    "epochs; the rule asks that the first is inside of the limit and the last is not",
    "12, 5 nats once": "single samples of healthy runs reach it; half of the updates must",
    "19, pixels": "no log says that observations are pixels; the rule goes by rows",
    "explained variance always NaN": "a log keeps no NaN; the rules that read it are skipped",
    "loss identity of SB3": "it logs the loss of the last minibatch and the means of its parts",
    "results that depend on the micro-batch": "one log cannot tell; two runs can (`keel compare`)",
    "routing of experts, kernels": "suspects of the gap of the sampler, with their tests",
    "return exactly constant": "`rewards-constant` and `rewards-sparse` tell why",
    "tiny rollouts": "`rollouts-tiny` of the family statistics, beside what became of the return",
}
"""What of the list has no rule here, and why."""


@pytest.mark.parametrize("number", [*range(1, 21), 29, 52, 56, 58])
def test_every_number_has_a_rule(number: int) -> None:
    assert COVERED[number]
    assert set(COVERED[number]) <= RULES.keys()


def test_every_family_of_causes_has_a_rule() -> None:
    for rules in FAMILIES.values():
        assert set(rules) <= RULES.keys()


def test_every_rule_is_there_for_a_number_or_a_family_of_causes() -> None:
    ours = ("thermometer", "consistency", "numerics", "trust region")
    named = {rule for rules in (*COVERED.values(), *FAMILIES.values()) for rule in rules}
    assert named == {entry.id for entry in RULES.values() if entry.family in ours}


def test_numbers_of_rules_are_those_of_the_list() -> None:
    for entry in RULES.values():
        if entry.number in COVERED and entry.id in {r for rules in COVERED.values() for r in rules}:
            assert entry.id in COVERED[entry.number]


def test_what_is_left_out_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in PARTS_LEFT_OUT.values())
