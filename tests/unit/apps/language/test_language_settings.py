"""Settings of runs on tokens: the names that the estimators know, and no others."""

from __future__ import annotations

from typing import get_args

import pytest

from keel.apps.language.config import Estimator, KLLoss, from_dict
from keel.errors import InputError
from keel.functional.estimators import ALIASES, ESTIMATORS, EXACT, LOSS_FORMS, LOW_VAR_KL


def test_the_forms_of_the_kl_are_those_of_the_estimators() -> None:
    assert set(get_args(Estimator)) == {*ESTIMATORS, LOW_VAR_KL, *ALIASES}
    assert set(get_args(KLLoss)) == {*ESTIMATORS, LOW_VAR_KL, *ALIASES, *LOSS_FORMS, EXACT}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl": {"loss": "foo"}}, "kl.loss: 'foo' is not one of weighted_k2"),
        ({"kl": {"loss": "weighted_k3"}}, "did you mean 'weighted_k2'"),
        ({"kl": {"reward": "full"}}, "kl.reward: 'full' is not one of k1"),
        ({"kl": {"low": 2.0, "high": 1.0}}, "kl.low: expected at most kl.high"),
        ({"sample": {"top_p": 1.5}}, "sample.top_p: expected a number from 0 to 1"),
        ({"reward": {"max_failures": 2.0}}, "reward.max_failures: expected a number from 0 to 1"),
        ({"region": {"covariance_share": 0.0}}, "covariance_share: expected a number above 0"),
        ({"advantage": {"gamma": -0.1}}, "advantage.gamma: expected no negative number"),
        (
            {"algo": "grp"},
            "algo: 'grp' is not one of ppo, grpo, rloo, reinforce_pp, remax, dr_grpo",
        ),
        ({"algo": "grp"}, "did you mean 'grpo'?"),
        ({"log": "tensorbord"}, "did you mean 'tensorboard'"),
        ({"kl_ctrl": {"type": "fixed"}, "kl": 3}, "kl: expected keys and values, got 3"),
        ({"state_masking": True, "sample": []}, "sample: expected keys and values"),
    ],
)
def test_a_setting_is_checked_when_it_is_read(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        from_dict(changes)
    assert message in str(caught.value)
