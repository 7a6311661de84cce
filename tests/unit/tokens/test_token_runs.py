"""Whole runs on tokens: the bound, the books, preflight, checkpoints, exact resume."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from token_toys import moved
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.algorithms.optimizer import initial_opt_state
from keel.apps.language import judge
from keel.apps.language import preflight as flights
from keel.apps.language.build import open_session, open_source
from keel.apps.language.config import Language, from_dict
from keel.apps.language.models import write_into
from keel.apps.language.preflight import PreflightError, preflight, require
from keel.apps.language.source import PromptSource
from keel.apps.language.supervised import examples_as_batch
from keel.apps.language.tasks import warmup_data
from keel.cli import main
from keel.config import to_dict
from keel.errors import EstimatorWarning, InputError
from keel.networks.causal_lm import RESPONSE_MASK, TokenAgent
from keel.tracking.metrics import metric
from keel.tracking.reader import read_metrics
from keel.training.checkpoint import load
from keel.training.loop import TrainState, run
from keel.training.persist import EvaluationStopped
from keel.training.runner import resume, start
from keel.training.session import Session, initial_state


def tiny(**changes: Any) -> Language:
    """Four updates of a very small model."""
    base = from_dict(
        {
            "task": "lookup",
            "task_options": "letters=1,facts=4",
            "total_steps": 32,
            "threads": 1,
            "model": {"hidden": 16, "layers": 1, "heads": 2},
            "sample": {"prompts": 2, "group": 4},
            "region": {"minibatch": 4, "epochs": 2, "learning_rate": 1e-3},
            "warmup": {"examples": 8, "epochs": 2},
            "evaluation": {"prompts": 8},
            "control": False,
        }
    )
    return from_dict(changes, base)


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return open_source(tiny())


def ready(session: Session, params: torch.Tensor | None = None, away: float = 0.0) -> TrainState:
    """The state before the first update, without a warm-up; the reference lies `away` of it."""
    state = initial_state(session)
    if params is not None:
        state = state.replace(opt_state=initial_opt_state(params))
    if session.config.kl.place != "none":
        session.source.reference = moved(state.opt_state.params, away)
    return state


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo", "reinforce_pp", "remax", "dr_grpo"])
def test_every_algorithm_keeps_the_bound(algo: str) -> None:
    kl = {"place": "both" if algo == "ppo" else "loss", "loss": "full"}
    session = open_session(
        tiny(
            algo=algo,
            kl=kl,
            region={"max_kl": 1e-4},
            reward={"functions": f"{__name__}:count_vowels"},
        )
    )
    walked = 0
    for iteration in run(session, ready(session)):
        metrics = iteration.metrics
        assert 0.0 <= metrics["train/kl_exact"] <= 1e-4
        assert metrics["train/gate_log_ratio"] < 1e-3
        walked += iteration.report.verdict != "accepted"
        for name in metrics:
            assert metric(name)
    assert walked  # the bound had work to do


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_bound_holds_at_the_temperature_and_without(temperature: float) -> None:
    session = open_session(
        tiny(
            sample={"temperature": temperature},
            region={"max_kl": 1e-4},
            reward={"functions": f"{__name__}:count_vowels"},
        )
    )
    before = ready(session)
    for iteration in run(session, before):
        assert iteration.metrics["train/gate_log_ratio"] < 1e-3
        assert 0.0 <= iteration.metrics["train/kl_exact"] <= 1e-4
        batch, states = session.source.last.batch, (before, iteration.state)
        for heat in (temperature, 1.0):
            old, new = (session.agent.policy(x.opt_state.params, batch.obs, heat) for x in states)
            kl = session.agent.dist.kl(old, new)[batch.weight > 0].mean().item()
            assert kl <= 1.01e-4
        before = iteration.state


def count_vowels(example: Any, completion: str) -> float:
    """Some reward that differs among completions of a policy that knows nothing."""
    return sum(completion.count(x) for x in "aeiouAEIOU13579<") / 8.0


@pytest.mark.parametrize("form", ["sequence", "cispo"])
@pytest.mark.parametrize("covariance", ["none", "clip", "kl"])
def test_forms_and_covariances_run(form: str, covariance: str) -> None:
    region = {"form": form, "covariance": covariance, "dual_clip": 3.0, "clip_high": 0.28}
    session = open_session(tiny(region=region, total_steps=8))
    (iteration,) = run(session, ready(session))
    assert iteration.metrics["train/kl_exact"] <= 0.05


def test_without_a_pull_no_reference_is_kept_or_asked() -> None:
    session = open_session(tiny(total_steps=8))
    (iteration,) = run(session, ready(session))
    assert session.source.reference is None
    assert session.source.last.detail.reference is None
    assert iteration.metrics["train/kl_coef"] == 0.0
    assert "train/kl_reference" not in iteration.metrics


def test_the_books_agree_with_the_policies() -> None:
    """KL to the reference, exactly and by estimators, against logits that are written out."""
    session = open_session(tiny(total_steps=8, kl={"place": "loss", "unit": "sequence"}))
    state = ready(session, away=0.1)
    (iteration,) = run(session, state)
    found = session.source.last.detail.completions
    logits = []
    for params in (state.opt_state.params, session.source.reference):
        write_into(session.agent, params)
        attention = found.attention.long()
        places = (attention.cumsum(1) - 1).clamp(min=0)
        out = session.agent.network.model(
            found.tokens, attention_mask=attention, position_ids=places
        ).logits
        logits.append(out[:, -found.response_mask.shape[1] - 1 : -1].detach())
    p, q = (x.log_softmax(-1) for x in logits)
    kl = (p.exp() * (p - q)).sum(-1)
    written = found.response_mask > 0
    metrics = iteration.metrics
    assert metrics["kl/reference_token"] == pytest.approx(kl[written].mean().item(), rel=1e-4)
    per_sequence = torch.where(written, kl, 0.0).sum(1).mean().item()
    assert metrics["kl/reference_sequence"] == pytest.approx(per_sequence, rel=1e-4)
    chosen = [x.gather(-1, found.action[..., None])[..., 0][written] for x in (p, q)]
    delta = (chosen[0] - chosen[1]).double()
    exact = kl[written].mean().item()
    assert metrics["train/kl_reference_k1_bias"] == pytest.approx(
        delta.mean().item() - exact, abs=1e-4
    )
    k3 = torch.expm1(-delta) + delta
    assert metrics["train/kl_reference_k3_bias"] == pytest.approx(
        k3.mean().item() - exact, abs=1e-4
    )
    assert metrics["train/kl_reference_k3_std"] == pytest.approx(k3.std().item(), rel=1e-3)
    assert exact > 0.01


def test_k3_in_the_reward_warns() -> None:
    session = open_session(tiny(total_steps=8, kl={"place": "reward", "reward": "k3"}))
    with pytest.raises(EstimatorWarning, match="'k3' in the reward"):
        next(run(session, ready(session)))


def test_the_adaptive_beta_follows_the_kl_and_is_kept() -> None:
    kl = {"place": "loss", "controller": "adaptive", "target": 1.0, "horizon": 16.0}
    session = open_session(tiny(kl=kl))
    coefs = [it.state.hparams.kl_coef for it in run(session, ready(session))]
    assert coefs == pytest.approx([0.01 * 0.9**n for n in (1, 2, 3, 4)], rel=1e-3)


@pytest.mark.parametrize("settings", [{"refresh": 2}, {"ema": 0.5}])
def test_the_reference_is_refreshed(settings: dict[str, float]) -> None:
    session = open_session(tiny(kl={"place": "loss", **settings}, total_steps=16))
    state, source = ready(session), session.source
    first = source.reference
    params, references = zip(
        *((it.state.opt_state.params, source.reference) for it in run(session, state)), strict=True
    )
    if "refresh" in settings:
        assert torch.equal(references[0], first)
        assert torch.equal(references[1], params[1])
    else:
        torch.testing.assert_close(references[0], (first + params[0]) / 2)


def test_tool_text_is_not_learned_from_unless_asked(source: PromptSource) -> None:
    batch = examples_as_batch(source, warmup_data(source.task, 4, 0))
    own = batch.weight.sum(1)
    seen = batch.obs["attention"][:, -batch.weight.shape[1] :].sum(1)
    assert (own < seen).all()  # the tool's answer stands there, and does not count
    assert torch.equal(batch.obs[RESPONSE_MASK], batch.weight)
    text = source.decode(batch.action[0].tolist())
    assert "<result>" in text


def test_failed_rewards_are_masked_and_counted(tmp_path: Path) -> None:
    reward = {"functions": f"{__name__}:fails_on_some", "max_failures": 1.0}
    session = open_session(tiny(reward=reward, total_steps=8))
    (iteration,) = run(session, ready(session))
    failed = iteration.metrics["rollout/failures"]
    assert 0 < failed < 8
    silent = ~session.source.last.batch.weight.bool().any(1)
    assert silent.sum() == failed


def fails_on_some(example: Any, completion: str) -> float:
    if len(completion) % 2:
        raise ValueError("odd")
    return float(len(completion))


# --- preflight ----------------------------------------------------------------------------------


def test_preflight_finds_nothing_wrong(source: PromptSource) -> None:
    params = source.agent.initial
    checks = preflight(source, params, params.clone())
    assert {c.name for c in checks} == {
        "dropout off", "ratio ≡ 1", "padding", "shift", "micro-batch", "KL to the reference ≡ 0",
    }  # fmt: skip
    require(checks)


def sharp(agent: TokenAgent) -> torch.Tensor:
    """Parameters at which tokens are far from equally likely, and far from certain."""
    tree = agent.layout.unflatten(agent.initial[0].clone())
    return torch.cat([x.reshape(-1) * (8.0 if x.ndim == 2 else 1.0) for x in tree.values()])[None]


def names_of(checks: list[flights.Check]) -> set[str]:
    return {check.name for check in checks if not check.holds}


def test_preflight_names_dropout() -> None:
    source = open_source(tiny())
    source.agent.network.add_module("noise", torch.nn.Dropout(0.1))
    assert names_of(preflight(source, source.agent.initial)) == {"dropout off"}
    with pytest.raises(PreflightError, match="dropout is on"):
        require(preflight(source, source.agent.initial))


def test_preflight_names_another_reference(source: PromptSource) -> None:
    params = source.agent.initial
    assert names_of(preflight(source, params, params * 1.5)) == {"KL to the reference ≡ 0"}


def test_preflight_names_a_temperature_that_is_not_in_the_log_probs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = open_source(tiny(sample={"temperature": 0.5}))
    honest = flights._log_probs

    def forgetful(source, params, obs, found):
        plain = dataclasses.replace(source.sampling, temperature=1.0)
        return honest(dataclasses.replace(source, sampling=plain), params, obs, found)

    params = sharp(source.agent)
    require(preflight(source, params))
    monkeypatch.setattr(flights, "_log_probs", forgetful)
    assert "ratio ≡ 1" in names_of(preflight(source, params))


def test_preflight_names_padding_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(tiny())
    padded = flights._padded

    def careless(source, found, extra=3):
        obs = padded(source, found, extra)
        obs["attention"] = torch.ones_like(obs["attention"])
        return obs

    monkeypatch.setattr(flights, "_padded", careless)
    assert names_of(preflight(source, sharp(source.agent))) == {"padding"}


def test_preflight_names_labels_that_are_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import keel.networks.shared_prefix as models

    source = open_source(tiny())
    honest = models.states

    def shifted(backbone, parameters, tokens, attention, last):
        return honest(backbone, parameters, torch.roll(tokens, -1, 1), attention, last)

    monkeypatch.setattr(models, "states", shifted)
    assert {"ratio ≡ 1", "shift"} <= names_of(preflight(source, sharp(source.agent)))


# --- runs on disk -------------------------------------------------------------------------------


def test_a_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between two updates, and then again in the last evaluation."""
    kl = {"place": "loss", "controller": "adaptive"}
    config = tiny(kl=kl, checkpoints={"every": 8}, algo="ppo", control=True)
    *_, whole = start(config, tmp_path, "whole")
    part = start(config, tmp_path, "part")
    next(part), next(part)
    part.close()

    def stopped(*_: Any) -> None:
        raise EvaluationStopped

    with monkeypatch.context() as patched:
        patched.setattr(judge, "judge", stopped)
        *_, unjudged = resume(tmp_path / "part" / "seed-0")
    assert unjudged.done
    assert "eval/success" not in unjudged.metrics
    (rest,) = resume(tmp_path / "part" / "seed-0")
    for name in ("language.json", "tokens.html"):
        texts = [(tmp_path / run / "seed-0" / name).read_text() for run in ("whole", "part")]
        assert texts[0] == texts[1].replace("part/seed-0", "whole/seed-0")
    a, b = whole.iteration.state, rest.iteration.state
    assert torch.equal(a.opt_state.params, b.opt_state.params)
    assert torch.equal(a.opt_state.second, b.opt_state.second)
    assert a.hparams == b.hparams
    assert a.hparams.kl_coef != config.kl.coef
    tables = [read_metrics(tmp_path / name / "seed-0") for name in ("whole", "part")]
    for name, column in tables[0].columns.items():
        if not name.startswith("time/"):
            assert np.array_equal(column, tables[1].columns[name], equal_nan=True), name


def test_a_checkpoint_is_a_model_of_hugging_face(tmp_path: Path) -> None:
    *_, last = start(tiny(), tmp_path, "run")
    found = load(last.path)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    session = last.iteration.session
    tokens = torch.tensor([tokenizer.encode("value of a:")])
    write_into(session.agent, last.iteration.state.opt_state.params)
    with torch.no_grad():
        ours = session.agent.network.model(tokens).logits
        torch.testing.assert_close(model(tokens).logits, ours)
    again = open_source(tiny(model={"path": str(found.path)}))
    torch.testing.assert_close(
        again.agent.initial, last.iteration.state.opt_state.params, rtol=0, atol=0
    )


def test_only_adapters_learn(tmp_path: Path) -> None:
    reward = {"functions": f"{__name__}:count_vowels"}
    session = open_session(tiny(model={"lora_rank": 2}, total_steps=8, reward=reward))
    assert all("lora_" in name for name in session.agent.layout.names)
    (iteration,) = run(session, ready(session))
    assert iteration.metrics["train/gate_log_ratio"] < 1e-3
    assert not torch.equal(iteration.state.opt_state.params, session.agent.initial)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train", "language", "--task", "lookup", "--algo", "grpo", "--total-steps", "16",
        "--threads", "1", "--model.hidden", "16", "--model.layers", "1", "--model.heads", "2",
        "--sample.prompts", "2", "--sample.group", "4", "--warmup.examples", "8",
        "--warmup.epochs", "2", "--evaluation.prompts", "8", "--kl.place", "loss",
        "--kl_ctrl.type", "adaptive", "--kl_coef", "0.02", "--runs", str(tmp_path), "--name", "run",
    ]  # fmt: skip
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["steps"] == 16
    assert told["health"] == []
    assert 0.0 <= told["control_success"] <= 1.0
    path = tmp_path / "run" / "seed-0"
    for name in ("language.png", "language.json", "tokens.html", "trust-region.png"):
        assert (path / name).stat().st_size > 0
    assert main(["evaluate", str(path), "--episodes", "4"]) == 0
    assert "4 held-out prompts, greedy" in capsys.readouterr().out
    assert main(["resume", str(path), "--total-steps", "24"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"solved after RL: [\d.]+% \(sampled at temperature 1\)", output)
    assert "health: nothing to watch" in output
    assert "ev " not in output  # there is no critic whose variance could be explained
    assert told["decoding"] == json.loads((path / "language.json").read_text())["decoding"]
    assert main(["compare", str(tmp_path / "run")]) == 0
    assert "language lookup: " in capsys.readouterr().out
    assert main(["train", "language", "--task", "lokup"]) == 2
    assert "did you mean 'lookup'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample": {"group": 1}}, "needs 2 or more of them"),
        ({"algo": "ppo", "model": {"critic": "none"}}, "PPO needs a critic"),
        ({"model": {"heads": 3}}, "cannot be shared evenly"),
        ({"kl": {"controller": "adaptive", "coef": 99.0}}, "cannot begin at 99"),
        ({"region": {"covariance": "clip", "micro": 2}}, "goes without region.micro"),
        ({"kl": {"place": "loss", "refresh": 2, "ema": 0.1}}, "not both"),
        ({"region": {"max_kl": 0.0}}, "region.max_kl: expected a number above 0"),
        ({"sample": {"prompts": 0}}, "sample.prompts: expected at least 1"),
        ({"kl_ctrl": {"tipe": "fixed"}}, "kl_ctrl.tipe: expected one of"),
        ({"kl_ctrl": 3}, "kl_ctrl: expected keys"),
        ({"region": {"max_lk": 1.0}}, "did you mean region.max_kl"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny(**changes)


def test_configurations_survive_being_written() -> None:
    config = tiny(kl_ctrl={"type": "adaptive", "kl_coef": 0.5}, state_masking=False)
    assert config.kl.controller == "adaptive"
    assert not config.sample.state_masking
    assert from_dict(to_dict(config)) == config
    assert math.isclose(config.kl.coef, 0.5)
