"""What the writing half of the calibration corpus taught: false alarms that are quiet, and gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from firing import FLAT, RISING
from logs import findings_of, make_log

from keel.doctor.api import all_rules

Columns = Mapping[str, Sequence[float] | float]
KL, CLIP, EV, LOSS = "approx_kl", "clip_fraction", "explained_variance", "value_loss"
QUIET = {f"train/{KL}": [0.004, 0.005] * 10, f"train/{CLIP}": 0.05}


def train(**columns: Any) -> dict[str, Any]:
    return {f"train/{name}": values for name, values in columns.items()}


def test_every_rule_that_is_named_exists() -> None:
    known = {entry.id for entry in all_rules()}
    for entry in all_rules():
        assert set(entry.suppresses) <= known, entry.id
        assert entry.id not in entry.suppresses


@pytest.mark.parametrize("count", [1, 2])
def test_one_bad_evaluation_is_no_lost_normalizer(count: int) -> None:
    """The likeliest action of a young policy is often bad: Acrobot, LunarLander, land."""
    evaluated = [float("nan")] * (20 - count) + [20.0] * count
    columns = RISING | {"eval/return_mean": evaluated}
    assert findings_of("evaluation-far-below-training", make_log(columns)) is None
    columns = RISING | {"eval/return_mean": [float("nan")] * 17 + [20.0] * 3}
    finding = findings_of("evaluation-far-below-training", make_log(columns))
    assert finding is not None
    assert finding.level == "sick"


def test_one_leap_that_the_return_survives_means_nothing() -> None:
    kl = [0.002] * 10 + [0.6] + [0.002] * 9
    assert findings_of("kl-spikes", make_log(RISING | train(approx_kl=kl))) is None
    lost = {"rollout/return_mean": [20.0] * 3 + [300.0] * 8 + [30.0] * 9}
    finding = findings_of("kl-spikes", make_log(RISING | lost | train(approx_kl=kl)))
    assert finding is not None
    assert finding.level == "sick"


def test_adaptive_rates_may_leap_in_the_beginning() -> None:
    kl = [0.002, 0.4, 0.3, 0.002, 0.5, *[0.002] * 15]
    assert findings_of("kl-spikes", make_log(FLAT | train(approx_kl=kl))) is None


def test_a_policy_that_is_decided_makes_small_steps() -> None:
    small = FLAT | train(approx_kl=1e-7, clip_fraction=0.0)
    assert findings_of("steps-too-small", make_log(small | train(entropy=0.001))) is None
    finding = findings_of("steps-too-small", make_log(small | train(entropy=0.5)))
    assert finding is not None


def test_explained_variance_may_be_low_while_the_return_rises() -> None:
    nothing = train(explained_variance=0.02, value_loss=30.0)
    assert findings_of("explained-variance-zero", make_log(RISING | nothing)) is None
    assert findings_of("explained-variance-zero", make_log(FLAT | nothing)) is not None


def test_the_mean_ratio_follows_from_both_estimates_of_cleanrl() -> None:
    """mean r = 1 + k3 − k1, of the same minibatch: 1 + 0.9 − 0.4 = 1.5."""
    log = make_log(train(kl_k1=0.4, approx_kl=0.9), framework="cleanrl")
    finding = findings_of("ratio-mean-off", log)
    assert finding is not None
    assert finding.evidence[0].value == pytest.approx(1.5)
    same = make_log(train(kl_k1=0.39, approx_kl=0.4), framework="cleanrl")
    assert findings_of("ratio-mean-off", same) is None
    others = make_log(train(kl_k1=0.4, approx_kl=0.9), framework="rllib")
    assert findings_of("ratio-mean-off", others) is None  # of other rows, as far as we know


def test_a_kl_that_is_a_sum_is_a_constant_factor_too_large() -> None:
    """5 % beyond 1 ± 0.2: σ = 0.2/1.96 = 0.102, so the KL is about 0.0052; 128 rows make 0.67."""
    clip = np.linspace(0.04, 0.06, 20)
    kl = 128 * 0.0052 * (clip / 0.05)
    log = make_log(RISING | train(approx_kl=kl.tolist(), clip_fraction=clip.tolist()))
    finding = findings_of("kl-beyond-clip", log)
    assert finding is not None
    assert "about 1.3e+02 times what 5 % clipped ratios imply" in finding.cause
    mean = train(approx_kl=(kl / 128).tolist(), clip_fraction=clip.tolist())
    assert findings_of("kl-beyond-clip", make_log(RISING | mean)) is None


def test_a_few_huge_ratios_are_no_sum() -> None:
    kl = [0.005] * 12 + [3.0, 0.01, 40.0, 0.005, 2.0, 0.01, 7.0, 0.02]
    log = make_log(RISING | train(approx_kl=kl, clip_fraction=0.05))
    assert findings_of("kl-beyond-clip", log) is None


def test_a_critic_that_stands_still_shows_in_its_loss() -> None:
    still = train(explained_variance=[0.002, -0.004] * 10, value_loss=[27.0, 28.5] * 10)
    finding = findings_of("critic-stands-still", make_log(RISING | still))
    assert finding is not None
    assert finding.level == "watch"
    assert finding.fix.changes[0].times == 30.0
    learning = still | train(value_loss=np.linspace(28.0, 4.0, 20).tolist())
    assert findings_of("critic-stands-still", make_log(RISING | learning)) is None
    held_back = still | train(explained_variance=[0.012, 0.06] * 10)
    assert findings_of("critic-stands-still", make_log(RISING | held_back)) is None
    known = still | train(value_mean=0.0)
    assert findings_of("critic-stands-still", make_log(RISING | known)) is None
