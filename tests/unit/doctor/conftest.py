"""Two rules in place of all, so that tests of reports do not depend on the rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import keel.doctor.rules
from keel.doctor.finding import Change, Finding, Fix, Suspect, evidence
from keel.doctor.rule import RULES, rule
from keel.doctor.run_log import RunLog

BOUND = 0.03
assert keel.doctor.rules


@pytest.fixture
def two_rules() -> Iterator[None]:
    """Let two rules speak: one of the trust region, which fires, and one of the reward."""
    saved = dict(RULES)
    RULES.clear()
    rule("far", "trust region", needs=("train/kl_exact|train/approx_kl",), source="a test")(_far)
    rule("earns", "reward", needs=("rollout/return_mean",), source="a test")(lambda _: None)
    rule("horizon", "reward", needs=("setting:facts.horizon",), source="a test")(lambda _: None)
    yield
    RULES.clear()
    RULES.update(saved)


def _far(log: RunLog) -> Finding | None:
    kl = log.get("train/kl_exact") or log["train/approx_kl"]
    if (log.setting("region.learning_rate") or 1.0) < 0.1:
        return None
    return Finding(
        cause="steps are too large: <script>alert(1)</script> \x1b[31m",
        level="sick",
        evidence=(
            evidence(kl, "above the bound", threshold=BOUND, source="a <b>", onset=int(kl.step[0])),
        ),
        fix=Fix("Lower the learning rate.", (Change("region.learning_rate", times=0.01),)),
        others=(Suspect("too many epochs", "train with one"),),
    )
