"""TRL's GRPOTrainer on a small Qwen3 made from its configuration; nothing is downloaded.

Its own trainer and its own generation, with everything off that the measured work does not need:
logs, checkpoints, progress bars, gradient checkpointing. The rewards take no time.
"""

import os
import statistics
import tempfile
import time
from types import SimpleNamespace

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import numpy as np
import torch
from common import Clock, answer, job
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

PAD, EOS = 0, 1


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """Padding, end, and single characters."""
    words = ["<pad>", "<eos>", *(chr(ord("0") + i) for i in range(vocabulary - 2))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[2]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=words[PAD], eos_token=words[EOS], padding_side="left"
    )


def prompts(language: SimpleNamespace, count: int, seed: int) -> Dataset:
    """`count` prompts of equal length, of random characters."""
    letters = np.random.default_rng(seed).integers(
        2, language.vocabulary, (count, language.prompt_tokens)
    )
    texts = ["".join(chr(ord("0") + int(i) - 2) for i in row) for row in letters]
    return Dataset.from_dict({"prompt": texts})


def save_model(language: SimpleNamespace, folder: str, seed: int) -> None:
    """TRL loads policy and reference from a folder."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=language.vocabulary,
        hidden_size=language.hidden,
        num_hidden_layers=language.layers,
        num_attention_heads=language.heads,
        num_key_value_heads=language.kv_heads,
        head_dim=language.head_dim,
        intermediate_size=language.intermediate,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def configuration(work: SimpleNamespace, language: SimpleNamespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work.num_envs,
        gradient_accumulation_steps=1,
        num_generations=language.group,
        max_completion_length=work.rollout_steps,
        max_steps=work.warmup + work.iterations,
        num_iterations=work.epochs,
        beta=language.beta,
        epsilon=work.clip,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=work.max_grad_norm,
        loss_type="grpo",
        generation_kwargs={"suppress_tokens": [PAD, EOS]},
        # on two cores and at this size eager attention is 4 % faster than sdpa, its default
        model_init_kwargs={"dtype": "float32", "attn_implementation": "eager"},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=work.seed,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Ticks(TrainerCallback):
    """A tick at the begin of every step, which is a batch and its update, and after the last."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock.tick()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            self.clock.tick()


class Timed(GRPOTrainer):
    """Remembers how long it generates."""

    def _generate(self, prompts):
        begin = time.perf_counter()
        found = super()._generate(prompts)
        GENERATING.append(time.perf_counter() - begin)
        return found


GENERATING: list[float] = []
LENGTHS: list[int] = []


def reward(completions, completion_ids, **_) -> list[float]:
    """Constant in time; half of the answers are better, so that there is something to learn."""
    LENGTHS.extend(map(len, completion_ids))
    return [float(i % 2) for i in range(len(completions))]


def check_lengths(work: SimpleNamespace) -> None:
    """Tokens are counted as settings × iterations: all of them must have been generated."""
    expected = [work.rollout_steps] * work.num_envs * (work.warmup + work.iterations)
    if expected != LENGTHS:
        raise RuntimeError(f"{sum(LENGTHS)} tokens were generated, expected {sum(expected)}")


if __name__ == "__main__":
    work = job()
    language = SimpleNamespace(**work.language)
    torch.set_num_threads(work.threads)
    clock = Clock(work)
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
        save_model(language, folder, work.seed)
        trainer = Timed(
            model=folder,
            reward_funcs=reward,
            args=configuration(work, language, folder),
            train_dataset=prompts(language, 64 * language.prompts, work.seed),
            processing_class=tokenizer_of(language.vocabulary),
            callbacks=[Ticks(clock)],
        )
        trainer.train()
    check_lengths(work)
    spent = [b - a for a, b in zip(clock.begun, clock.ended, strict=False)]
    updates = [whole - part for whole, part in zip(spent, GENERATING, strict=True)]
    answer(
        clock,
        ["trl", "transformers", "torch"],
        parameters=sum(x.numel() for x in trainer.model.parameters()),
        generate_seconds=statistics.median(GENERATING[work.warmup :]),
        update_seconds=statistics.median(updates[work.warmup :]),
    )
