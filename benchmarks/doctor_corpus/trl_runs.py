"""Runs of TRL's GRPOTrainer for the corpus, on a tiny Qwen3 from its configuration and tasks that
can be verified; nothing is downloaded. The log is `trainer_state.json`, as TRL saves it.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.doctor_corpus.serving import serve
from keel.integrations.trl_doctor import DoctorCallback

PAD, EOS, LETTERS = 0, 1, 12
LOG, ROWS, SETTINGS = "trainer_state.json", "callback.jsonl", "args.json"
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "loss_type": "grpo",
    "logging_steps": 1,
    "temperature": 1.0,
    "beta": 0.0,
}
WORDS = ["<pad>", "<eos>", *(chr(ord("a") + i) for i in range(LETTERS))]


def run(job: dict[str, Any], folder: Path) -> None:
    """Train as a job says."""
    torch.set_num_threads(1)
    faults = dict(job["inject"])
    settings = DEFAULTS | job["settings"]
    rewards = [REWARDS[name] for name in settings.pop("rewards", [job["env"]])]
    with tempfile.TemporaryDirectory(prefix="keel-corpus-") as scratch:
        _save_model(scratch, job["seed"], faults)
        args = GRPOConfig(
            output_dir=str(folder),
            max_steps=job["steps"],
            seed=job["seed"],
            model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        )
        doctor = DoctorCallback(path=folder, rows=folder / ROWS)
        trainer = Faulty(
            model=scratch,
            reward_funcs=rewards,
            args=args,
            train_dataset=_prompts(job["seed"]),
            processing_class=_tokenizer(),
            callbacks=[doctor],
            faults=faults,
        )
        doctor.watch(trainer)
        trainer.train()
    state = {"log_history": trainer.state.log_history}
    (folder / LOG).write_text(json.dumps(state, sort_keys=True))
    (folder / SETTINGS).write_text(json.dumps({**settings, "seed": job["seed"]}))


class Faulty(GRPOTrainer):
    """GRPO with the faults of a job, at the places where programs go wrong."""

    def __init__(self, *args: Any, faults: dict[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.faults = faults
        self.sampler = copy.deepcopy(self.model) if "stale" in faults else None
        if "frozen" in faults:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.endswith("norm.weight") and "layers" not in name)
        if "end_unknown" in faults:
            self.eos_token_ids = [len(WORDS) + 99]
            self.generation_config.eos_token_id = None
        if "reference_other" in faults:
            torch.manual_seed(4321)
            for parameter in self.ref_model.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """Make the optimizer, now and then over a copy of the model."""
        optimizer = super().create_optimizer(*args, **options)
        if "optimizer_elsewhere" in self.faults:
            for group in self.optimizer.param_groups:
                group["params"] = [p.detach().clone().requires_grad_() for p in group["params"]]
        return optimizer

    def _generate(self, prompts: Any, *args: Any) -> Any:
        """Generate, now and then with other weights or at another temperature."""
        with _other(self, "sampler", "model"), _other_temperature(self):
            return super()._generate(prompts, *args)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """Compute the loss, now and then of something else."""
        beta = self.beta
        if "beta_dropped" in self.faults:
            with torch.no_grad():
                super()._compute_loss(model, inputs)  # logs what it would have been
            self.beta = 0.0
            loss = super()._compute_loss(model, inputs)
            self.beta = beta
            return loss
        if "advantage_sign" in self.faults:
            inputs = {**inputs, "advantages": -inputs["advantages"]}
        return super()._compute_loss(model, inputs)


@contextmanager
def _other(trainer: Any, name: str, attribute: str) -> Any:
    """Generate with the weights that a sampler was given once."""
    other = getattr(trainer, name)
    if other is None:
        yield
        return
    live = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(other.state_dict())
    try:
        yield
    finally:
        trainer.model.load_state_dict(live)


@contextmanager
def _other_temperature(trainer: Any) -> Any:
    """Generate at a temperature that the log-probs do not know of."""
    config = trainer.generation_config
    before = config.temperature
    config.temperature = trainer.faults.get("temperature", before)
    try:
        yield
    finally:
        config.temperature = before


def _tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def _prompts(seed: int) -> Dataset:
    drawn = np.random.default_rng(seed).integers(2, 2 + LETTERS, (512, 4))
    return Dataset.from_dict({"prompt": ["".join(WORDS[i] for i in row) for row in drawn]})


def _save_model(folder: str, seed: int, faults: dict[str, Any]) -> None:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=64,
        attention_dropout=float(faults.get("dropout", 0.0)),
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _texts(completion_ids: list[list[int]]) -> list[str]:
    return ["".join(WORDS[i] for i in ids if i > EOS) for ids in completion_ids]


def letter(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of tokens that are the letter c."""
    return [text.count("c") / max(1, len(text)) for text in _texts(completion_ids)]


def echo(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Begin with the last letter of the prompt, then end: half a point for each."""
    return [
        0.5 * (bool(ids) and WORDS[ids[0]] == prompt[-1]) + 0.5 * (len(ids) == 2 and ids[1] == EOS)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """One letter, then the end."""
    return [float(EOS in ids) / max(1, len(ids)) for ids in completion_ids]


def column(completion_ids: list[list[int]], answer: Any = None, **_: Any) -> list[float]:
    """Compare with a column that the data does not have."""
    return [float(answer is not None and text == answer) for text in _texts(completion_ids)]


def rare(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """All of a long answer, or nothing."""
    texts = _texts(completion_ids)
    return [
        float(text == prompt[::-1] + prompt) for prompt, text in zip(prompts, texts, strict=True)
    ]


def ended(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A point for an end, before which nothing counts."""
    return [float(bool(ids) and ids[-1] == EOS and len(ids) >= 4) for ids in completion_ids]


def padded(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A hundred points for length."""
    return [100.0 * len(ids) for ids in completion_ids]


REWARDS: dict[str, Callable[..., list[float]]] = {
    f.__name__: f for f in (letter, echo, short, column, rare, ended, padded)
}

if __name__ == "__main__":
    serve(run)
