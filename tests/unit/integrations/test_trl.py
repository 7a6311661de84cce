"""A Keel run from a TRL trainer: names, lines, resuming, and the exact KL of real updates."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.cli import main
from keel.errors import InputError
from keel.tracking import RunError, RunWarning, list_runs, read_config, read_metrics
from keel.tracking.record import read_choices

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from keel.integrations.trl import (  # noqa: E402
    KeelCallback,
    Measured,
    Rollout,
    measure,
    rollout_of,
    token_log_probs,
    translate,
)

LETTERS = "abcdefgh"


class GRPOConfig(SimpleNamespace):
    """The arguments of a trainer, as far as a callback reads them."""

    def to_dict(self) -> dict[str, Any]:
        return {"learning_rate": 1e-6, "betas": (0.9, 0.99), "dtype": torch.float32}


ARGS = GRPOConfig(seed=3, world_size=1, temperature=1.0)


def state(step: int, first: bool = True) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=first)


def begun(root: Path, **options: Any) -> KeelCallback:
    callback = KeelCallback(root, "run", **options)
    callback.on_train_begin(ARGS, state(0), None)
    return callback


def log(callback: KeelCallback, step: int, **logs: Any) -> None:
    callback.on_log(ARGS, state(step), None, logs=logs)


def tiny_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(3.0)  # logits that matter
    return model


def generation(tools: bool = False) -> list[dict[str, Tensor]]:
    """Two halves of four completions of three tokens, the prompts padded on the left."""
    rng = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(2):
        part = {
            "prompt_ids": torch.randint(2, 12, (2, 4), generator=rng),
            "prompt_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
            "completion_ids": torch.randint(2, 12, (2, 3), generator=rng),
            "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        }
        if tools:
            part["tool_mask"] = torch.tensor([[1, 0, 1], [1, 1, 1]])
        parts.append(part)
    return parts


def by_hand(model: Any, parts: list[dict[str, Tensor]], temperature: float) -> Tensor:
    """log π `[N, V]` in float64: every completion by itself, without padding, token by token."""
    rows = []
    exact = model.double().eval()
    for part in parts:
        for row in range(len(part["prompt_ids"])):
            prompt = part["prompt_ids"][row][part["prompt_mask"][row].bool()]
            counted = (
                part["completion_mask"][row]
                * part.get("tool_mask", torch.ones_like(part["completion_mask"]))[row]
            )
            for position in counted.nonzero()[:, 0].tolist():
                text = torch.cat([prompt, part["completion_ids"][row][:position]])[None]
                with torch.no_grad():
                    logits = exact(input_ids=text).logits[0, -1]
                rows.append((logits / temperature).log_softmax(-1))
    model.float()
    return torch.stack(rows)


# --- logs ---------------------------------------------------------------------------------------


def test_names_are_keels_and_the_rest_is_kept():
    found = translate(
        {
            "reward": 0.5,
            "kl": 0.01,
            "clip_ratio/region_mean": 0.1,
            "completions/mean_length": 8.0,
            "eval_reward": 0.7,
            "eval_loss": 0.2,
            "rewards/exact/mean": 0.4,
            "sampling": None,
            "note": "text",
        },
        {},
    )
    assert found == {
        "rollout/return_mean": 0.5,
        "train/kl_reference": 0.01,
        "train/clip_fraction": 0.1,
        "rollout/length_mean": 8.0,
        "eval/return_mean": 0.7,
        "trl/eval_loss": 0.2,
        "rollout/reward/exact": 0.4,
        "trl/sampling": None,
    }


def test_an_estimate_does_not_hide_what_was_measured():
    assert translate({"kl": 0.5}, {"train/kl_reference": 0.1}) == {"trl/kl": 0.5}


def test_two_names_for_one_metric_are_both_kept():
    assert translate({"lr": 1.0, "learning_rate": 2.0}, {}) == {
        "train/learning_rate": 1.0,
        "trl/learning_rate": 2.0,
    }


def test_logs_become_a_run_that_keel_lists_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, gain in (("run", 0.0), ("other", 1.0)):
        for seed in (0, 1):
            callback = KeelCallback(tmp_path, name, env="countdown", tag="mine")
            args = GRPOConfig(seed=seed, world_size=1, temperature=1.0)
            callback.on_train_begin(args, state(0), None)
            for step in range(1, 6):
                log(callback, step, reward=0.1 * step + gain + 0.01 * seed, loss=0.1)
            callback.on_train_end(args, state(5), None)
    runs = list_runs(tmp_path)
    assert {(r.name, r.seed, r.tag, r.status, r.step) for r in runs} == {
        (name, seed, "mine", "finished", 5) for name in ("run", "other") for seed in (0, 1)
    }
    config = read_config(tmp_path / "run" / "seed-0")
    assert (config["env"], config["algo"], config["library"]) == ("countdown", "grpo", "trl")
    assert config["trl"]["betas"] == [0.9, 0.99]
    assert config["trl"]["dtype"] == "torch.float32"
    assert read_choices(tmp_path / "run" / "seed-0")["step"] == "updates"
    assert main(["runs", "list", "--runs", str(tmp_path)]) == 0
    assert "countdown" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "run"), str(tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_lines_by_hand(tmp_path: Path):
    callback = begun(tmp_path)
    log(callback, 1, reward=0.5)
    log(callback, 2, reward=float("nan"), grad_norm=2.0)
    callback.close()
    table = read_metrics(tmp_path / "run" / "seed-3")
    assert table.step.tolist() == [1, 2]
    assert table["trl/updates"].tolist() == [1.0, 2.0]
    assert table["rollout/return_mean"][0] == 0.5
    assert np.isnan(table["rollout/return_mean"][1])
    assert table["train/gradient_norm"][1] == 2.0
    assert (np.diff(table["time/seconds"]) > 0).all()


def test_an_evaluation_joins_the_line_of_its_step(tmp_path: Path):
    callback = begun(tmp_path)
    log(callback, 1, reward=0.5)
    log(callback, 2, reward=0.6)
    log(callback, 2, eval_reward=0.9)
    log(callback, 2, train_runtime=9.0, train_loss=1.0)  # a summary, not an update
    callback.close()
    table = read_metrics(tmp_path / "run" / "seed-3")
    assert (table.step.tolist(), table.duplicates) == ([1, 2], 0)
    assert table["rollout/return_mean"].tolist() == [0.5, 0.6]
    assert table["eval/return_mean"][1] == 0.9
    assert "trl/train_loss" not in table.columns


def test_only_the_first_process_writes(tmp_path: Path):
    callback = KeelCallback(tmp_path, "run")
    callback.on_train_begin(ARGS, state(0, first=False), None)
    log(callback, 1, reward=0.5)
    callback.on_train_end(ARGS, state(1, first=False), None)
    assert not list(tmp_path.iterdir())


def test_a_resumed_trainer_goes_on_where_its_checkpoint_was(tmp_path: Path):
    callback = begun(tmp_path)
    for step in (1, 2, 3):
        log(callback, step, reward=float(step))
    callback.close("failed")
    again = KeelCallback(tmp_path, "run")
    again.on_train_begin(ARGS, state(2), None)
    log(again, 3, reward=30.0)
    again.on_train_end(ARGS, state(3), None)
    table = read_metrics(tmp_path / "run" / "seed-3")
    assert table["rollout/return_mean"].tolist() == [1.0, 2.0, 30.0]
    assert table.duplicates == 0
    assert (np.diff(table["time/seconds"]) > 0).all()


def test_a_checkpoint_before_the_first_line_begins_anew(tmp_path: Path):
    callback = begun(tmp_path)
    log(callback, 10, reward=1.0)
    callback.close("failed")
    again = KeelCallback(tmp_path, "run")
    again.on_train_begin(ARGS, state(5), None)
    log(again, 10, reward=2.0)
    again.close()
    assert read_metrics(tmp_path / "run" / "seed-3")["rollout/return_mean"].tolist() == [2.0]


def test_a_run_that_is_there_is_not_touched(tmp_path: Path):
    begun(tmp_path).close()
    with pytest.raises(RunError, match="exists already"):
        begun(tmp_path)


def test_without_a_name_the_run_gets_one(tmp_path: Path):
    callback = KeelCallback(tmp_path, env="addition")
    callback.on_train_begin(ARGS, state(0), None)
    callback.close()
    assert callback.path is not None
    assert callback.path.parent.name.startswith("addition-grpo-")


def test_a_bad_name_is_an_error_before_training():
    with pytest.raises(InputError, match="run name 'a/b'"):
        KeelCallback("runs", "a/b")


def test_a_trainer_that_keeps_nothing_cannot_be_watched():
    with pytest.raises(InputError, match="SimpleNamespace: cannot be watched"):
        KeelCallback("runs").watch(SimpleNamespace())


def test_without_transformers_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "keel.integrations.trl")
    with pytest.raises(InputError, match=r"transformers is not installed: pip install"):
        importlib.import_module("keel.integrations.trl")


# --- the exact KL -------------------------------------------------------------------------------


def test_tool_text_and_padding_do_not_count():
    rollout = rollout_of(generation(tools=True))
    assert rollout is not None
    assert rollout.mask.int().tolist() == [[1, 0, 1], [1, 1, 0]] * 2
    assert rollout.tokens.shape == rollout.attention.shape == (4, 7)


@pytest.mark.parametrize(
    "given",
    [None, [], [{"prompt_ids": torch.ones(1, 1)}], [{**generation()[0], "pixel_values": 1}]],
)
def test_what_is_not_plain_tokens_is_left_alone(given: Any):
    assert rollout_of(given) is None


@pytest.mark.parametrize("tools", [False, True])
def test_log_probs_are_those_of_every_token_by_itself(tools: bool):
    model, parts = tiny_model(), generation(tools)
    rollout = rollout_of(parts)
    assert rollout is not None
    expected = by_hand(model, parts, temperature=0.7)
    model.train()
    for rows in (1, 3, 16):
        found = token_log_probs(model, rollout, 0.7, rows)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    assert model.training  # as it was


def test_a_measurement_by_hand():
    model, other = tiny_model(0), tiny_model(1)
    parts = generation()
    rollout = rollout_of(parts)
    assert rollout is not None
    old, new = (by_hand(x, parts, 1.0) for x in (model, other))
    measured = measure(
        other, model, Measured(rollout, token_log_probs(model, rollout, 1.0), True), 1.0
    )
    kl = (old.exp() * (old - new)).sum(-1)
    reverse = (new.exp() * (new - old)).sum(-1).mean().item()
    ids = rollout.tokens[:, -3:][rollout.mask]
    gap = (new - old).gather(1, ids[:, None])
    expected = {
        "train/kl_exact": kl.mean().item(),
        "train/kl_reverse": reverse,
        "train/kl_max": kl.max().item(),
        "train/kl_p99": np.quantile(kl.numpy(), 0.99),
        "train/kl_approx": -gap.mean().item(),
        "train/approx_kl": (gap.exp() - 1 - gap).mean().item(),
        "train/kl_is_exact": 1.0,
        "train/kl_reference": reverse,
    }
    expected["train/kl_error"] = abs(expected["train/kl_approx"] - expected["train/kl_exact"])
    assert measured == pytest.approx(expected, rel=1e-4)
    assert expected["train/kl_exact"] > 0.1


def test_nothing_counted_is_nothing_measured():
    rollout = rollout_of(generation())
    assert rollout is not None
    empty = Rollout(rollout.tokens, rollout.attention, torch.zeros_like(rollout.mask))
    model = tiny_model()
    assert (
        measure(model, None, Measured(empty, token_log_probs(model, empty, 1.0), True), 1.0) == {}
    )


def watched(root: Path, **options: Any) -> tuple[KeelCallback, SimpleNamespace]:
    trainer = SimpleNamespace(_buffered_inputs=None, ref_model=None)
    callback = KeelCallback(root, "run", **options).watch(trainer)
    callback.on_train_begin(ARGS, state(0), None)
    return callback, trainer


def nudge(model: Any) -> None:
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.01 * torch.sin(torch.arange(float(x.numel()))).reshape(x.shape))


def step_of(callback: KeelCallback, model: Any) -> None:
    callback.on_pre_optimizer_step(ARGS, state(0), None, model=model)
    nudge(model)
    callback.on_optimizer_step(ARGS, state(0), None, model=model)


def test_the_old_policy_is_the_one_that_generated(tmp_path: Path):
    """Two steps on one generation, then one on the next: distances are from the generation."""
    callback, trainer = watched(tmp_path)
    model = tiny_model()
    trainer._buffered_inputs = generation()
    for step in (1, 2):
        step_of(callback, model)
        log(callback, step, reward=0.0)
    trainer._buffered_inputs = generation()
    step_of(callback, model)
    log(callback, 3, reward=0.0)
    callback.close()
    table = read_metrics(tmp_path / "run" / "seed-3")
    first, second = table["train/kl_exact"][:2].tolist()  # the second line is of the same tokens
    assert table.step.tolist() == [10, 20]
    assert 0 < second < first  # one step from where the second generation was made
    assert read_choices(tmp_path / "run" / "seed-3")["step"] == "tokens"
    assert table["time/steps"].tolist() == [10.0, 20.0]


def test_updates_between_two_logs_are_combined(tmp_path: Path):
    callback, trainer = watched(tmp_path)
    model = tiny_model()
    each = []
    for _ in range(2):
        trainer._buffered_inputs = generation()
        step_of(callback, model)
        each.append(dict(callback._measurements[-1]))
    log(callback, 2, reward=0.0)
    callback.close()
    table = read_metrics(tmp_path / "run" / "seed-3")
    assert table.step.tolist() == [20]
    for name, combine in (("train/kl_exact", np.mean), ("train/kl_max", np.max)):
        assert table[name][0] == pytest.approx(combine([one[name] for one in each]))


def test_a_part_of_the_batch_is_said_to_be_one(tmp_path: Path):
    callback, trainer = watched(tmp_path, max_elements=2 * 3 * 12)
    trainer._buffered_inputs = generation()
    step_of(callback, tiny_model())
    assert callback._old is not None
    assert len(callback._old.rollout.mask) == 2
    assert callback._measurements[0]["train/kl_is_exact"] == 0.0
    callback.close()


def test_without_room_the_exact_kl_is_left_out_with_one_warning(tmp_path: Path):
    callback, trainer = watched(tmp_path, max_elements=10)
    trainer._buffered_inputs = generation()
    with pytest.warns(
        RunWarning, match="exact KL is left out: max_elements has no room for 3 × 12"
    ):
        callback.on_pre_optimizer_step(ARGS, state(0), None, model=tiny_model())
    callback.on_optimizer_step(ARGS, state(0), None, model=None)
    trainer._buffered_inputs = generation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_pre_optimizer_step(ARGS, state(0), None, model=tiny_model())
    log(callback, 1, reward=1.0)
    callback.close()
    table = read_metrics(tmp_path / "run" / "seed-3")
    assert "train/kl_exact" not in table.columns
    assert table.step.tolist() == [20]


def test_several_processes_are_not_measured(tmp_path: Path):
    callback, trainer = watched(tmp_path)
    trainer._buffered_inputs = generation()
    args = GRPOConfig(seed=3, world_size=4, temperature=1.0)
    with pytest.warns(RunWarning, match="several processes"):
        callback.on_pre_optimizer_step(args, state(0), None, model=None)
    log(callback, 1, reward=1.0)
    callback.close()
    assert read_metrics(tmp_path / "run" / "seed-3").step.tolist() == [40]


# --- a real trainer -----------------------------------------------------------------------------


def _missing() -> str:
    for name in ("trl", "datasets"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return ""


def tiny_tokenizer() -> Any:
    tokenizers = importlib.import_module("tokenizers")
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "<bos>", *LETTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


class Copies(transformers.TrainerCallback):  # type: ignore[misc]
    """Parameters before and after every update, and what it was made from."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.updates: list[tuple[Any, Any, Any]] = []
        self.before: Any = None

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.before = {name: x.detach().clone() for name, x in model.state_dict().items()}

    def on_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        after = {name: x.detach().clone() for name, x in model.state_dict().items()}
        self.updates.append((self.before, after, self.trainer._buffered_inputs))


@pytest.fixture
def grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, Any]]:
    """A trainer of three updates, its recorder, and copies of what happened."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    recorder, copies = KeelCallback(tmp_path / "runs", "tiny", env="letters"), Copies()
    tiny_model().save_pretrained(tmp_path / "model")  # where TRL finds the reference
    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        learning_rate=1e-2,
        beta=0.1,
        temperature=0.8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=lambda completions, **_: [float(c.count("a")) for c in completions],
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["abc", "de", "fgh", "a"] * 8}),
        processing_class=tiny_tokenizer(),
        callbacks=[recorder, copies],
    )
    copies.trainer = trainer
    recorder.watch(trainer)
    yield trainer, recorder, copies
    recorder.close()


@pytest.mark.skipif(bool(_missing()), reason=_missing())
def test_a_real_trainer_leaves_a_run_with_the_exact_kl(grpo: tuple[Any, Any, Any], tmp_path: Path):
    trainer, _, copies = grpo
    trainer.train()
    (run,) = list_runs(tmp_path / "runs")
    assert run.status == "finished"
    table = read_metrics(run.path)
    assert table["trl/updates"].tolist() == [1.0, 2.0, 3.0]
    tokens = [sum(int(p["completion_mask"].sum()) for p in parts) for *_, parts in copies.updates]
    assert table.step.tolist() == np.cumsum(tokens).tolist()
    model, start = tiny_model(), copies.updates[0][0]
    for i, (before, after, parts) in enumerate(copies.updates):
        log_probs = []
        for parameters in (before, after, start):
            model.load_state_dict(parameters)
            log_probs.append(by_hand(model, parts, temperature=0.8))
        old, new, reference = log_probs
        kl = (old.exp() * (old - new)).sum(-1).mean().item()
        away = (new.exp() * (new - reference)).sum(-1).mean().item()
        assert kl > 1e-4
        assert table["train/kl_exact"][i] == pytest.approx(kl, rel=1e-2, abs=1e-6)
        assert table["train/kl_reference"][i] == pytest.approx(away, rel=1e-2, abs=1e-6)
    assert (table["train/kl_is_exact"] == 1.0).all()
    assert {"rollout/return_mean", "train/entropy", "train/loss", "trl/kl"} <= set(table.columns)
    assert read_config(run.path)["algo"] == "grpo"
