"""Every entry of the research list of these families has a rule, or a reason why it has none."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from logs import make_log

import keel.doctor.rules  # noqa: F401  (fills the registry)
from keel.config.schema import Config
from keel.doctor.finding import Finding
from keel.doctor.rule import RULES, SETTING
from keel.doctor.run_log import RunLog

FAMILIES = ("critic", "exploration", "reward", "language", "statistics")
OWN = {entry.id: entry for entry in RULES.values() if entry.family in FAMILIES}

COVERED = {
    21: "explained-variance-negative",
    22: "entropy-collapsed",  # residual variance → 0 together with entropy → 0, as evidence
    23: "value-targets-large",
    24: "critic-dominates",
    25: "critic-too-slow",
    26: "targets-impossible",
    27: "value-clip-active",
    28: "critic-too-slow",  # a raw advantage of mean ≠ 0 is a target that values do not follow
    30: "advantages-vanish",
    31: "agents-unequal",
    33: "entropy-stuck",
    34: "entropy-collapsed",
    35: "entropy-oscillates",
    36: "action-share-high",
    37: "actions-unused",
    38: "rewards-sparse",
    39: "suicide-incentive",
    40: "rewards-clipped",
    41: "component-dominates",
    42: "action-without-effect",
    43: "below-baseline",
    44: "observations-dead",
    45: "component-dead",
    46: "truncations-not-bootstrapped",
    47: "autoreset-rows",
    48: "resets-synchronized",
    49: "horizon-beyond-discount",
    50: "imitation-dominates",
    51: "pulses-dead",
    53: "units-dead",
    54: "rollouts-tiny",
    55: "few-seeds",
    56: "reference-kl-high",
    57: "entropy-grows",
    59: "coefficient-runs-away",
    60: "demonstrations-wrong",
}
ELSEWHERE = {
    29: "thermometer: whether advantages are normalized over the rows of the loss is an identity "
    "between two metrics (advantages-not-normalized)",
    32: "no log shows which rows an estimator joins; `keel probe --trainer` does, with two agents "
    "whose returns are known; its symptom is explained-variance-zero or -negative",
    52: "numerics: gradients that are clipped or vanish",
}
"""Entries without a rule here, and why."""
FURTHER = {
    "rewards equal within groups": "groups-uninformative",
    "completions all cut": "completions-cut",
    "end token unknown": "end-token-unknown",
    "reward reads a missing column": "rewards-constant",
    "training reward up, held-out down": "reward-hacked",
    "normalizer not saved": "evaluation-far-below-training",
    "terminations bootstrapped": "terminations-bootstrapped",
    "entropy spike": "entropy-leaps",
    "std grows without bound": "action-std-exploded",
    "std vanishes": "action-std-vanished",
    "no noise from the start": "action-std-none",
    "observations without scale": "observations-unscaled",
    "critic too fast": "critic-too-fast",
    "penalties that leave no say": "penalty-dominates",
    "signs of rewards and advantages": "objective-against-return",
    "critic too slow, in its loss": "critic-stands-still",
    "value loss of 1e5": "value-loss-exploded",
    "length grows": "length-grows",
    "length collapses": "length-collapsed",
    "returns collapse": "returns-collapsed",
    "returns flat": "returns-flat",
    "micro-batches that matter": "minibatches-tiny",
    "usual: falling entropy": "entropy-falls",
    "usual: a new critic": "critic-starts-at-zero",
    "usual: a solved task": "critic-idle",
    "usual: solved groups": "groups-solved",
}
"""Families of causes that the list does not number."""
METRICS = sorted({need for entry in OWN.values() for n in entry.needs for need in n.split("|")})
FACTS = {
    "total_steps": 50_000, "rollout_steps": 2, "envs.num": 8, "facts.actions": 4,
    "facts.horizon": 200, "facts.seeds": 1, "advantage.gamma": 0.5, "explore.pulses": True,
    "explore.entropy_floor": 0.5, "envs.clip_reward": 1.0, "envs.normalize_reward": False,
    "network.share": True, "network.kind": "cnn", "region.minibatch": 4, "kl.high": 10.0,
    "kl.controller": "adaptive",
}  # fmt: skip


@pytest.mark.parametrize("number", [*range(21, 58), 59, 60])
def test_entry_of_the_list_has_a_rule_or_a_reason(number: int) -> None:
    assert (number in COVERED) != (number in ELSEWHERE)
    if number in COVERED:
        assert COVERED[number] in OWN, COVERED[number]


def test_other_families_of_causes_have_rules() -> None:
    assert set(FURTHER.values()) <= set(OWN)


def test_every_rule_is_named_here() -> None:
    named = {*COVERED.values(), *FURTHER.values()}
    assert set(OWN) - named <= {"explained-variance-zero", "entropy-below-floor"}


def test_suppressed_rules_exist() -> None:
    for entry in OWN.values():
        assert entry.id not in entry.suppresses
        unknown = set(entry.suppresses) - set(RULES)
        assert not unknown, f"{entry.id} suppresses {unknown}"


values = st.one_of(
    st.floats(-1e6, 1e6),
    st.sampled_from([0.0, 1.0, 0.5, -1.0, 1e-9, float("inf"), float("-inf"), 500.0]),
)


@st.composite
def logs(draw: st.DrawFn) -> RunLog:
    """Draw a log of some metrics that these rules read, finite or not, of 1 to 50 rows."""
    rows = draw(st.integers(1, 50))
    metrics = [name for name in METRICS if not name.startswith(SETTING)]
    extra = ["env/share_A", "env/share_B", "rollout/reward/accuracy", "rollout/reward/format",
             "rollout/return_std", "train/entropy_coef", "train/advantage_raw_std/a",
             "train/advantage_raw_std/b", "train/bc_cosine"]  # fmt: skip
    names = draw(st.lists(st.sampled_from(metrics + extra), min_size=1, max_size=25, unique=True))
    column = st.one_of(st.lists(values, min_size=rows, max_size=rows), values)
    known = draw(st.lists(st.sampled_from(sorted(FACTS)), unique=True))
    return make_log(
        {name: draw(column) for name in names},
        rows,
        draw(st.sampled_from(["keel", "trl", "sb3", "cleanrl"])),
        {name: FACTS[name] for name in known},
    )


@settings(deadline=None)
@given(logs())
def test_no_rule_raises_on_any_log(log: RunLog) -> None:
    for entry in OWN.values():
        if entry.missing(log):
            continue
        finding = entry.check(log)
        if finding is not None:
            _check_form(finding)


def _check_form(finding: Finding) -> None:
    """Check that a finding can be printed and applied."""
    assert finding.cause
    assert "\n" not in finding.cause
    assert finding.fix.text
    assert 0.0 < finding.confidence <= 1.0
    finding.as_dict()
    for change in finding.fix.changes:
        assert _is_setting(change.setting), change.setting


def _is_setting(name: str) -> bool:
    """Return whether a dotted name is a setting of Keel, of environments or of tokens."""
    from keel.apps.language.config import Language

    for whole in (Config(), Language()):
        part: object = whole
        for word in name.split("."):
            part = getattr(part, word, _MISSING)
        if part is not _MISSING:
            return True
    return False


_MISSING = object()


@pytest.mark.parametrize("rule", sorted(OWN))
def test_rule_names_the_settings_of_its_fixes(rule: str) -> None:
    """The names stand in the source as text: each `Change(...)` and `scaled(...)` is a setting."""
    import inspect
    import re

    source = inspect.getsource(OWN[rule].check)
    for name in re.findall(r'(?:Change|scaled)\(\s*(?:log,\s*)?"([a-z_.]+)"', source):
        assert _is_setting(name), name
