"""The machinery of a run on tokens: task, tokenizer, model, region, rewards, random streams."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.optimizer import Step, make_step
from keel.algorithms.ppo import PPO
from keel.apps.language.config import Language, task_options
from keel.apps.language.pretrained import load_pretrained
from keel.apps.language.rewards import Overlong, Rewards, load_function
from keel.apps.language.tasks import Example, Task, held_out, task_named, true_score
from keel.apps.language.tokenizer import build_tokenizer, encode
from keel.apps.language.tools import ToolLoop, tool_loop
from keel.errors import InputError, import_extra
from keel.experience.completions import Completions, Sampling, complete
from keel.functional.reduce import Reduction
from keel.losses.token import Covariance, TokenObjective
from keel.networks.causal_lm import TokenAgent
from keel.networks.devices import find_device
from keel.parallel import set_threads
from keel.resources import cores, expect_memory
from keel.training.seeding import Seeds, derive_seeds
from keel.trust_region.certify import Certified

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Session:
    """What a run uses and does not change, except for its random streams."""

    config: Language
    seeds: Seeds
    task: Task
    tokenizer: PreTrainedTokenizerBase
    agent: TokenAgent
    rewards: Rewards
    sampling: Sampling
    tools: ToolLoop | None
    device: torch.device
    draws: torch.Generator
    """of tokens"""
    shuffle: torch.Generator
    """of minibatches"""
    examples: np.random.Generator
    """of prompts"""
    choices: dict[str, object]
    """what was decided automatically"""

    @property
    def eos(self) -> int:
        """The token that ends a completion."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad(self) -> int:
        """The token that means nothing."""
        found = self.tokenizer.pad_token_id
        return int(self.eos if found is None else found)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, and nothing added."""
        return encode(self.tokenizer, text)

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, tags included, without padding and end of text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def texts(self, found: Completions) -> list[str]:
        """What was written, tool text included, without the end of text and padding."""
        seen = found.attention[:, -found.response_mask.shape[1] :]
        rows = [
            [token for token, there in zip(*row, strict=True) if there and token != self.eos]
            for row in zip(found.action.tolist(), seen.tolist(), strict=True)
        ]
        return [self.decode(row) for row in rows]

    def complete(
        self,
        params: Tensor,
        examples: list[Example],
        rng: torch.Generator,
        *,
        group: int = 1,
        sampling: Sampling | None = None,
    ) -> Completions:
        """Completions of every example's prompt, with the task's tool at hand."""
        tools, end = self.tools, None
        if tools is not None:
            (end,) = self.encode(tools.stop)

        def insert(row: int, written: list[int]) -> list[int] | None:
            assert tools is not None
            answer = tools.reply(examples[row // group].data, self.decode(written))
            return None if answer is None else self.encode(answer)

        return complete(
            self.agent,
            params,
            [self.encode(example.prompt) for example in examples],
            sampling or self.sampling,
            rng,
            group=group,
            eos=self.eos,
            pad=self.pad,
            call_end=end,
            insert=None if tools is None else insert,
        )

    def true_scores(self, examples: list[Example], texts: list[str]) -> np.ndarray:
        """By the task's own judgement, whatever is rewarded."""
        return np.array(
            [true_score(self.task, e, text) for e, text in zip(examples, texts, strict=True)]
        )

    def objective(self, reference_head: Tensor | None = None) -> TokenObjective:
        """What an update minimises."""
        return build_objective(self.config, self.sampling.max_new_tokens, reference_head)

    def region(self, objective: TokenObjective) -> tuple[Certified, Step]:
        """The trust region around it, and the step it takes."""
        config = self.config.region
        proximal = PPO(
            epochs=config.epochs,
            minibatch=config.minibatch,
            early_stop="off" if config.target_kl is None else "minibatch",
            target_kl=config.target_kl,
            max_grad_norm=config.max_grad_norm,
            objective=objective,  # type: ignore[arg-type]
            gate=config.gate,
        )
        return Certified(proximal, config.certify, config.gate), self.step(objective)

    def step(self, objective: Any) -> Step:
        """One step of Adam on an objective of tokens."""
        return make_step(
            self.agent,
            objective,
            group_axis=None,
            max_grad_norm=self.config.region.max_grad_norm,
            compiled=False,
            micro=self.config.region.micro or None,
            workers=self.agent.workers if self.config.region.covariance == "none" else 1,
        )


def open_session(
    config: Language, task: Task | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Session:
    """Make everything ready, and say what was chosen.

    `task` and `tokenizer` may be of your own making; the tokenizer is that of a model that is made.
    """
    import_extra("transformers", "language")
    seeds = derive_seeds(config.seed)
    device = find_device(config.device)
    threads = config.threads or cores()
    set_threads(threads)
    task = task_named(config.task, **task_options(config)) if task is None else task
    held_out(task, config.evaluation.prompts)  # whether there are so many, before work begins
    _expect_completions(config, task)
    model, tokenizer = load_model(config, seeds.network, tokenizer)
    agent = TokenAgent(model, config.critic)
    agent.to(device)
    room = config.sample.max_new_tokens or task.max_new_tokens
    sample = config.sample
    tools = None
    if task.stop is not None and sample.tool_calls:
        tools = tool_loop(task, max_calls=sample.tool_calls)
    return Session(
        config=config,
        seeds=seeds,
        task=task,
        tokenizer=tokenizer,
        agent=agent,
        rewards=build_rewards(config, task, room),
        sampling=Sampling(room, sample.temperature, sample.top_k, sample.top_p),
        tools=tools,
        device=device,
        draws=torch.Generator(device).manual_seed(seeds.actions),
        shuffle=torch.Generator().manual_seed(seeds.shuffle),
        examples=np.random.default_rng(seeds.envs),
        choices={"threads": threads, "device": str(device)},
    )


def _expect_completions(config: Language, task: Task) -> None:
    """Refuse, before the model is made, more tokens at once than this machine can hold."""
    length = config.sample.max_new_tokens or task.max_new_tokens
    expect_memory(
        f"sample: {config.batch:,} completions of {length:,} tokens",
        64 * config.batch * length,  # the least that is kept of a token: what it is, how likely
        "use fewer sample.prompts, a smaller sample.group or sample.max_new_tokens",
    )


def load_model(
    config: Language, seed: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer: those of a folder, or small ones that are made."""
    transformers = import_extra("transformers", "language")
    transformers.utils.logging.disable_progress_bar()
    settings = config.model
    if settings.path:
        model, tokenizer = load_pretrained(Path(settings.path))
    else:
        tokenizer = build_tokenizer() if tokenizer is None else tokenizer
        model = make_model(config, len(tokenizer), seed)
    if settings.lora_rank:
        peft = import_extra("peft", "language")
        adapters = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, adapters)
    return model, tokenizer


def make_model(config: Language, vocabulary: int, seed: int) -> PreTrainedModel:
    """A small model from its configuration, with weights that depend on the seed alone."""
    transformers = import_extra("transformers", "language")
    settings = config.model
    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    kind, build = kinds[settings.kind]
    layer = 12 * settings.hidden**2  # four projections of attention, three of 8/3 the width
    expect_memory(
        f"model: {settings.layers:,} layers of width {settings.hidden:,}",
        4 * 4 * (settings.layers * layer + vocabulary * settings.hidden),
        "use a smaller model.hidden or model.layers",
    )
    shape = kind(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden // settings.heads,
        intermediate_size=8 * round(settings.hidden * 8 / 3 / 8),
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = build(shape)
    return model


def build_objective(
    config: Language, longest: int, reference_head: Tensor | None = None
) -> TokenObjective:
    """What the settings of the region and of the KL come down to."""
    region = config.region
    reduction: Reduction
    if region.reduction == "auto":
        reduction = "constant" if config.algo == "dr_grpo" else "token-mean"
    else:
        reduction = region.reduction
    covariance = None
    if region.covariance != "none":
        covariance = Covariance(region.covariance, region.covariance_share)
    free = region.clip is None and region.form == "token"
    names = {"token": "clip", "sequence": "sequence", "cispo": "cispo"}
    return TokenObjective(
        form="unclipped" if free else names[region.form],  # type: ignore[arg-type]
        dual_clip=region.dual_clip,
        reduction=reduction,
        constant=float(longest) if reduction == "constant" else None,
        value_coef=region.value_coef if config.critic != "none" else 0.0,
        value_clip=region.value_clip,
        max_log_ratio=region.max_log_ratio,
        kl=config.kl.loss if config.kl.place in ("loss", "both") else None,
        covariance=covariance,
        track_kl=region.target_kl is not None,
        reference_head=reference_head,
    )


def build_rewards(config: Language, task: Task, longest: int) -> Rewards:
    """The task's verifier, or the functions that the settings name."""
    settings = config.reward
    functions: dict[str, Any] = {"task": task.verify}
    weights: dict[str, float] = {}
    named = [part.strip() for part in settings.functions.split(",") if part.strip()]
    if named:
        functions = {}
        for part in named:
            name, star, weight = part.partition("*")
            label = name.rpartition(":")[2]
            functions[label] = task.verify if name == "task" else load_function(name)
            try:
                weights[label] = float(weight) if star else 1.0
            except ValueError:
                raise InputError(f"reward.functions: {part!r} has no number behind *") from None
    overlong = Overlong(settings.soft_length, longest) if settings.soft_length else None
    return Rewards(
        functions,
        weights or None,
        timeout=settings.timeout,
        max_failures=settings.max_failures,
        overlong=overlong,
    )
