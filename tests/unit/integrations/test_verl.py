"""Keel inside verl: its own numbers where verl is right, other ones where it is known to err."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keel.errors import EstimatorWarning, InputError
from keel.functional import kl_estimate
from keel.integrations import verl as ours

try:
    core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
except ImportError as error:
    core, REASON = None, f"verl is not installed: {error}"
else:
    REASON = ""
with_verl = pytest.mark.skipif(core is None, reason=REASON)

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1]]).bool()
MODES = tuple(ours.MODES)


def config(**changes: Any) -> SimpleNamespace:
    """The fields of verl's `ActorConfig` that losses read."""
    fields: dict[str, Any] = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 3.0,
        "global_batch_info": {},
        "policy_loss": SimpleNamespace(ppo_kl_coef=0.5),
    }
    return SimpleNamespace(**fields | changes)


def batch(seed: int = 0, scale: float = 0.5) -> dict[str, Tensor]:
    """Log-probs that differ enough for every clip to act, `[3, 4]`."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(3, 4, generator=rng, dtype=torch.float64) * 3
    new = old + scale * torch.randn(3, 4, generator=rng, dtype=torch.float64)
    score = torch.randn(3, 1, generator=rng, dtype=torch.float64)
    return {
        "old_log_prob": old,
        "log_prob": new.requires_grad_(),
        "advantages": score.expand(3, 4) * MASK,
        "response_mask": MASK,
    }


def gradient(loss: Tensor, log_prob: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, log_prob, retain_graph=True)
    return found


# --- by hand, without verl ----------------------------------------------------------------------


def test_clip_by_hand():
    """r = 2 and A = 1: the loss is −1.28 and has no gradient; r = ½ and A = 1: −½, with one."""
    log_prob = torch.tensor([[2.0, 0.5]]).log().requires_grad_()
    loss, metrics = ours.policy_loss(
        "clip",
        torch.zeros(1, 2),
        log_prob,
        torch.ones(1, 2),
        torch.ones(1, 2),
        config=config(),
    )
    assert loss.item() == pytest.approx((-1.28 - 0.5) / 2)
    assert gradient(loss, log_prob).tolist() == [[0.0, pytest.approx(-0.25)]]
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)  # k1 sees no step at all
    assert metrics["actor/keel_kl"] == pytest.approx((2.0 - 1.0 + 0.5 - 1.0) / 2)
    assert metrics["actor/keel_ratio_max"] == pytest.approx(2.0)
    assert metrics["actor/keel_effective_sample_size"] == pytest.approx(2.5**2 / (2 * 4.25))


def test_penalty_by_hand():
    """r = 2, A = 1, coefficient ½: −2 + ½·(2 − 1 − log 2); gradient −2 + ½·(2 − 1)."""
    log_prob = torch.tensor([[2.0]]).log().requires_grad_()
    one = torch.ones(1, 1)
    loss, _ = ours.policy_loss("penalty", 0 * one, log_prob, one, one, config=config())
    assert loss.item() == pytest.approx(-2.0 + 0.5 * (1.0 - math.log(2.0)))
    assert gradient(loss, log_prob).item() == pytest.approx(-1.5)


def test_the_penalty_descends_the_kl_it_claims():
    """Over all three actions of the old policy, weighted by it, the gradient is ∇KL(old‖new)."""
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = torch.tensor([0.1, 0.4, -0.2], dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(-1)
    weight = old / old.sum()
    loss, _ = ours.policy_loss(
        "penalty",
        old.log()[None],
        new[None],
        torch.zeros(1, 3, dtype=torch.float64),
        torch.ones(1, 3),
        loss_agg_mode="token-sum",
        config=config(policy_loss=SimpleNamespace(ppo_kl_coef=1.0)),
        rollout_is_weights=weight[None],
    )
    kl = (old * (old.log() - new)).sum()
    torch.testing.assert_close(loss, kl)
    torch.testing.assert_close(gradient(loss, logits), gradient(kl, logits))


def test_a_missing_bound_is_the_common_one():
    loose = config(clip_ratio=9.0, clip_ratio_low=None, clip_ratio_high=None)
    arguments = batch()
    clipped, metrics = ours.policy_loss("clip", **arguments, config=loose)
    free, _ = ours.policy_loss("unclipped", **arguments, config=loose)
    assert metrics["actor/pg_clipfrac"] == 0.0
    torch.testing.assert_close(clipped, free)


@pytest.mark.parametrize("mode", MODES)
@given(cut=st.integers(1, 2))
def test_micro_batches_add_up(mode: str, cut: int):
    """With the size of the whole batch given, parts of any size sum to the whole."""
    loss = torch.arange(12.0).reshape(3, 4)
    info = {"batch_num_tokens": 8, "global_batch_size": 3, "loss_scale_factor": 7}
    weight = MASK.float()
    whole = ours.mean_loss(loss, weight, weight, mode, info)
    parts = sum(
        ours.mean_loss(loss[rows], weight[rows], weight[rows], mode, info)
        for rows in (slice(0, cut), slice(cut, 3))
    )
    torch.testing.assert_close(torch.as_tensor(parts), whole)


def test_ranks_are_averaged_back():
    """Two ranks, each with half of the batch: the mean of what they return is the whole's."""
    loss, weight = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)
    info = {"dp_size": 2, "batch_num_tokens": 8}
    ranks = [
        ours.mean_loss(loss[i : i + 1], weight[i : i + 1], weight[i : i + 1], "token-mean", info)
        for i in (0, 1)
    ]
    assert torch.stack(ranks).mean().item() == pytest.approx(3.5)


def test_a_batch_without_tokens_is_zero():
    arguments = batch() | {"response_mask": torch.zeros(3, 4)}
    for mode in MODES:
        loss, _ = ours.policy_loss("clip", **arguments, loss_agg_mode=mode, config=config())
        assert loss.item() == 0.0


def test_advantages_by_hand():
    """Prompt a has scores 1, 0, 2; prompt b a single one."""
    reward = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 5.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    index = np.array(["a", "a", "a", "b"], dtype=object)
    expected = {
        "grpo": [0.0, -1.0, 1.0, 0.0],
        "dr_grpo": [0.0, -1.0, 1.0, 0.0],
        "rloo": [0.0, -1.5, 1.5, 0.0],
    }
    for name, values in expected.items():
        found, again = ours.advantage(name, reward, mask, index=index)
        assert again is found
        assert found[:, 0].tolist() == pytest.approx(values)
        assert found[1, 1].item() == 0.0
    (found, _) = ours.advantage("reinforce_pp", reward, mask, index=index)
    spread = np.std([1.0, 0.0, 2.0, 5.0], ddof=1)
    assert found[:, 0].tolist() == pytest.approx(list(np.array([-1.0, -2.0, 0.0, 3.0]) / spread))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.policy_loss("clop", **batch(), config=config()), "did you mean 'clip'"),
        (lambda: ours.policy_loss("clip", **batch()), "keel_clip: config is missing"),
        (
            lambda: ours.policy_loss("clip", **batch(), loss_agg_mode="token", config=config()),
            "loss_agg_mode: 'token' is not one of token-mean",
        ),
        (
            lambda: ours.policy_loss(
                "clip", **batch(), config=config(global_batch_info={"dp_size": 2})
            ),
            "with 2 ranks the size of the whole batch is needed",
        ),
        (
            lambda: ours.advantage("grpo", torch.ones(2, 2), torch.ones(2, 2)),
            "keel_grpo: needs the prompt of every answer",
        ),
        (
            lambda: ours.advantage("grpp", torch.ones(2, 2), torch.ones(2, 2)),
            "advantage: 'grpp' is not one of .* did you mean 'grpo'",
        ),
        (lambda: ours.kl("k4", MASK.float(), MASK.float()), "KL estimate: 'k4' is not one of k1"),
        (
            lambda: ours.kl("straight_through", MASK.float(), MASK.float()),
            "'straight_through' is no sample estimate",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")
def test_what_cannot_be_used_is_named(call: Callable[[], object], message: str):
    with pytest.raises(InputError, match=message):
        call()


def test_without_verl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", None)
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(InputError, match=r"verl cannot be imported .*: pip install verl"):
        ours.register()


def test_another_verl_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(
        InputError, match=r"register_policy_loss, register_adv_est, .* Keel knows verl 0.9"
    ):
        ours.register()


@pytest.mark.parametrize("name", ["k2", "ratio_k3", "straight_through"])
def test_kl_in_the_loss_has_the_gradient_of_kl(name: str):
    """Over all actions, weighted by the policy that sampled them."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.4, 0.0], dtype=torch.float64).log_softmax(-1)
    log_prob = logits.log_softmax(-1)
    found = (log_prob.detach().exp() * ours.kl(name, log_prob, ref)).sum()
    truth = (log_prob.exp() * (log_prob - ref)).sum()
    torch.testing.assert_close(gradient(found, logits), gradient(truth, logits))


def test_wrong_places_warn():
    log_prob = torch.full((1, 2), -1.0)
    with pytest.warns(EstimatorWarning, match="'k3' in the reward"):
        ours.kl("k3", log_prob, log_prob - 1)
    for name in ("k1", "k3"):
        with pytest.warns(EstimatorWarning, match=f"'{name}' in the loss"):
            ours.kl(name, log_prob.clone().requires_grad_(), log_prob - 1)
    assert ours.kl("k1", log_prob, log_prob - 1).tolist() == [[1.0, 1.0]]


# --- beside verl --------------------------------------------------------------------------------


def actor(**changes: Any) -> Any:
    """verl's own configuration of an actor."""
    actor_config = importlib.import_module("verl.workers.config").ActorConfig
    fields = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "clip_ratio_high": 0.28,
    }
    return actor_config(**fields | changes)


PAIRS = [("dual_clip", "vanilla"), ("sequence", "gspo"), ("cispo", "cispo")]
INFOS: list[dict[str, Any]] = [
    {},
    {"dp_size": 2, "batch_num_tokens": 20, "global_batch_size": 6, "loss_scale_factor": 9},
]


@with_verl
def test_all_names_are_known_to_verl():
    names = ours.register()
    assert len(set(names)) == 6 + 5 + 5
    for name in ours.POLICY_LOSSES:
        assert callable(core.get_policy_loss_fn(f"keel_{name}"))
    for name in ours.ADVANTAGES:
        assert callable(core.get_adv_estimator_fn(f"keel_{name}"))
    assert ours.register() == names  # twice is once


@with_verl
@pytest.mark.parametrize("info", INFOS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_losses_are_verls(mine: str, theirs: str, mode: str, info: dict[str, Any]):
    """Value, gradient and metrics, with and without the sampler's weights."""
    for seed in range(3):
        arguments = batch(seed, scale=1.5) | {"loss_agg_mode": mode}
        for weights in (None, torch.rand(3, 4, dtype=torch.float64)):
            given = arguments | {"rollout_is_weights": weights}
            configuration = actor(global_batch_info=dict(info))
            loss, metrics = core.get_policy_loss_fn(f"keel_{mine}")(**given, config=configuration)
            expected, told = core.get_policy_loss_fn(theirs)(**given, config=configuration)
            torch.testing.assert_close(loss, expected)
            log_prob = arguments["log_prob"]
            torch.testing.assert_close(gradient(loss, log_prob), gradient(expected, log_prob))
            assert {name: metrics[name] for name in told} == pytest.approx(told, abs=1e-6)


@with_verl
def test_clip_is_verls_without_the_second_clip():
    arguments = batch(1, scale=1.5)
    loss, _ = ours.policy_loss("clip", **arguments, config=actor())
    expected, _ = core.compute_policy_loss_vanilla(**arguments, config=actor(clip_ratio_c=1e9))
    torch.testing.assert_close(loss, expected)


@with_verl
@pytest.mark.parametrize("mode", MODES)
def test_nan_on_a_masked_token_stays_outside(mode: str):
    """verl multiplies by the mask in its sequence reductions: NaN · 0 = NaN."""
    arguments = batch()
    broken = arguments["log_prob"].detach().clone()
    broken[~MASK] = math.nan
    given = arguments | {"log_prob": broken.requires_grad_(), "loss_agg_mode": mode}
    loss, _ = ours.policy_loss("dual_clip", **given, config=actor())
    whole, _ = ours.policy_loss("dual_clip", **arguments | {"loss_agg_mode": mode}, config=actor())
    torch.testing.assert_close(loss, whole)
    assert torch.isfinite(gradient(loss, given["log_prob"])).all()
    theirs, _ = core.compute_policy_loss_vanilla(**given, config=actor())
    assert torch.isnan(theirs).item() == mode.startswith("seq-")


@with_verl
def test_a_ratio_that_is_not_finite_is_quarantined():
    """A token the old policy could not write: verl clamps its log-ratio to 20 and trains on it."""
    arguments = batch(0, scale=0.1) | {"advantages": -torch.ones(3, 4, dtype=torch.float64)}
    arguments["old_log_prob"][0, 0] = -math.inf
    loose = actor(clip_ratio_c=1e12)
    loss, metrics = ours.policy_loss("dual_clip", **arguments, config=loose)
    assert metrics["actor/keel_quarantined"] == 1.0
    ratio = (arguments["log_prob"] - arguments["old_log_prob"]).exp()
    others = ratio[MASK][1:].clamp(min=0.8).sum().item()  # A = −1; all that count but the first
    assert loss.item() == pytest.approx(others / 8)
    assert gradient(loss, arguments["log_prob"])[0, 0].item() == 0.0
    theirs, _ = core.compute_policy_loss_vanilla(**arguments, config=loose)
    assert theirs.item() > 1e7


@with_verl
def test_an_empty_micro_batch_is_zero_not_nan():
    arguments = batch() | {"response_mask": torch.zeros(3, 4)}
    loss, _ = ours.policy_loss("dual_clip", **arguments, config=actor())
    theirs, _ = core.compute_policy_loss_vanilla(**arguments, config=actor())
    assert loss.item() == 0.0
    assert math.isnan(theirs.item())


SCORES = torch.tensor([[0.0, 1.0], [0.0, 0.5], [0.0, 2.0], [0.0, 0.0]])
GROUPS = np.array([0, 0, 1, 1])


@with_verl
@pytest.mark.parametrize(
    ("mine", "theirs", "options"),
    [
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "rloo", {}),
    ],
)
def test_advantages_are_verls(mine: str, theirs: str, options: dict[str, Any]):
    mask = torch.ones(4, 2)
    arguments = {"token_level_rewards": SCORES, "response_mask": mask, "index": GROUPS}
    found, _ = core.get_adv_estimator_fn(f"keel_{mine}")(**arguments, config=None)
    expected, _ = core.get_adv_estimator_fn(theirs)(**arguments, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@with_verl
def test_verl_whitens_tokens_where_keel_normalizes_answers():
    """With answers of two tokens: the same up to Bessel's √((2n − 1) / (2(n − 1))), n = 4."""
    arguments = {"token_level_rewards": SCORES, "response_mask": torch.ones(4, 2), "index": GROUPS}
    found, _ = ours.advantage("reinforce_pp_baseline", **arguments)
    theirs, _ = core.get_adv_estimator_fn("reinforce_plus_plus_baseline")(**arguments)
    torch.testing.assert_close(theirs, found * math.sqrt(7 / 6))


@with_verl
def test_an_answer_without_others_has_no_advantage():
    """verl: mean 0 and deviation 1, so that a lonely answer is pushed by its raw score."""
    arguments = {
        "token_level_rewards": torch.tensor([[0.0, 3.0]]),
        "response_mask": torch.ones(1, 2),
        "index": np.array(["a"]),
    }
    found, _ = ours.advantage("grpo", **arguments)
    theirs, _ = core.get_adv_estimator_fn("grpo")(**arguments)
    assert found.tolist() == [[0.0, 0.0]]
    assert theirs.tolist() == [[pytest.approx(3.0), pytest.approx(3.0)]]


@with_verl
@pytest.mark.parametrize(("mine", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")
def test_kl_estimates_are_verls(mine: str, theirs: str):
    arguments = batch(2)
    log_prob, ref = arguments["log_prob"].detach(), arguments["old_log_prob"]
    found = core.kl_penalty(log_prob, ref, kl_penalty=f"keel_{mine}")
    torch.testing.assert_close(found, core.kl_penalty(log_prob, ref, kl_penalty=theirs))


@with_verl
def test_low_var_kl_has_verls_clamps_and_gradients():
    log_prob = torch.linspace(-30.0, 30.0, 121, dtype=torch.float64).requires_grad_()
    ref = torch.zeros_like(log_prob)
    found = kl_estimate("low_var_kl", log_prob, ref)
    theirs = core.kl_penalty(log_prob, ref, kl_penalty="low_var_kl")
    torch.testing.assert_close(found, theirs)
    torch.testing.assert_close(gradient(found.sum(), log_prob), gradient(theirs.sum(), log_prob))


@with_verl
def test_straight_through_is_verls_k3_plus_and_its_own_names_stay():
    arguments = batch(2)
    log_prob, ref = arguments["log_prob"], arguments["old_log_prob"]
    found = core.kl_penalty(log_prob, ref, kl_penalty="keel_straight_through")
    theirs = core.kl_penalty(log_prob, ref, kl_penalty="k3+")
    torch.testing.assert_close(found, theirs)
    torch.testing.assert_close(gradient(found.sum(), log_prob), gradient(theirs.sum(), log_prob))
    with pytest.raises(NotImplementedError):
        core.kl_penalty(log_prob, ref, kl_penalty="full")


@with_verl
@pytest.mark.filterwarnings("ignore::keel.errors.EstimatorWarning")
def test_the_output_clamp_kills_the_gradient_in_verl_and_not_here():
    """π < π_ref / 13.6: k3 = e^4 − 1 − 4 is over 10, where verl's clamp has no slope."""
    log_prob = torch.tensor([[-5.0]], requires_grad=True)
    ref = torch.tensor([[-1.0]])
    theirs = core.kl_penalty(log_prob, ref, kl_penalty="low_var_kl")
    found = core.kl_penalty(log_prob, ref, kl_penalty="keel_k3")
    assert gradient(theirs.sum(), log_prob).item() == 0.0
    assert gradient(found.sum(), log_prob).item() == pytest.approx(1 - math.exp(4), rel=1e-5)


@with_verl
def test_verl_loads_it_by_its_own_setting():
    """In a fresh process, as each of its workers is one."""
    script = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "print(get_policy_loss_fn('keel_clip').args)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "keel.integrations.verl"},
    )
    assert done.stdout.strip().splitlines()[-1:] == ["('clip',)"], done.stderr


@with_verl
def test_an_actor_configured_with_our_names_computes_verls_numbers():
    """Through verl's own `ppo_loss`: policy loss and KL to the reference, value and gradient."""
    ppo_loss = importlib.import_module("verl.workers.utils.losses").ppo_loss
    policy = importlib.import_module("verl.workers.config").PolicyLossConfig
    tensordict = importlib.import_module("tensordict")
    rows, length = 3, 4
    arguments = batch(3)
    data = tensordict.TensorDict(
        {
            "prompts": torch.zeros(rows, 1, dtype=torch.long),
            "responses": torch.zeros(rows, length, dtype=torch.long),
            "attention_mask": torch.ones(rows, 1 + length, dtype=torch.long),
            "response_mask": MASK,
            "old_log_probs": arguments["old_log_prob"],
            "advantages": arguments["advantages"],
            "ref_log_prob": arguments["old_log_prob"] - 0.3,
        },
        batch_size=rows,
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": 8, "global_batch_size": 3}.items():
        data.set_non_tensor(name, value)

    def loss_of(loss_mode: str, kl_loss_type: str) -> tuple[Tensor, dict[str, Any]]:
        configuration = actor(
            policy_loss=policy(loss_mode=loss_mode),
            kl_loss_type=kl_loss_type,
            use_kl_loss=True,
            kl_loss_coef=0.7,
        )
        # a token's log-prob stands on the token before it: one column of the prompt, then all but
        # the last of the answer
        flat = torch.cat([arguments["log_prob"], torch.zeros(rows, 1)], 1).reshape(-1)
        loss, metrics = ppo_loss(configuration, {"log_probs": flat}, data)
        return loss, metrics

    loss, metrics = loss_of("keel_dual_clip", "keel_straight_through")
    expected, _ = loss_of("vanilla", "k3+")
    torch.testing.assert_close(loss, expected)
    log_prob = arguments["log_prob"]
    torch.testing.assert_close(gradient(loss, log_prob), gradient(expected, log_prob))
    assert "actor/keel_kl" in metrics
