"""Experience from prompts: completions, their scores, and the KL to a reference."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.optimizer import Loss, Step, initial_opt_state, make_step
from keel.apps.language.advantages import TokenTargets, named_arguments, token_targets
from keel.apps.language.config import Language
from keel.apps.language.kl_accounting import (
    Reference,
    compare_with,
    kl_spent_metrics,
    reference_metrics,
)
from keel.apps.language.metrics import advantage_metrics, completion_metrics
from keel.apps.language.models import model_files
from keel.apps.language.rewards import Rewards, Scores
from keel.apps.language.tasks import Example, Task, held_out, prompts, true_score
from keel.apps.language.tokenizer import encode
from keel.apps.language.tools import ToolLoop
from keel.distributions.vocabulary import HEAD
from keel.errors import InputError
from keel.experience.batch import Batch, Experience, Targets, chunks
from keel.experience.completions import Completions, Sampling, complete
from keel.functional import kl_reward
from keel.losses.token import IMPORTANCE, REFERENCE, REFERENCE_HEAD, REFERENCE_HIDDEN
from keel.networks.causal_lm import TokenAgent
from keel.training.checkpoint import Checkpoint
from keel.training.loop import Seeds, TrainState
from keel.training.source import Metrics, ProgressCallback, Saved
from keel.types import HyperParams, UpdateReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEATMAP = "tokens.html"


class Scored(NamedTuple):
    """Completions with everything that was found out about them before their update."""

    examples: list[Example]
    texts: list[str]
    completions: Completions
    score: Tensor
    """`[R]`, 0 where there is none"""
    targets: TokenTargets
    reference: Reference | None


@dataclass
class PromptSource:
    """Task, tokenizer, model and rewards of a run on tokens, and its random streams."""

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
    reference: Tensor | None = None
    """its parameters `[1, P]`; None where nothing is pulled towards one"""
    start: Tensor | None = None
    """parameters `[1, P]` after the warm-up, for the control; None where there is none"""
    warm_up: dict[str, float] = field(default_factory=dict)
    """what came of the warm-up"""
    passes: float = 0.0
    """tokens through the model, a backward pass counting twice"""
    spent: float = 0.0
    """nats per token, over all updates"""
    updates: int = 0
    last: Experience | None = None
    """of the update before this one, whose tokens are drawn at the end"""
    score: str = "eval/success"

    @property
    def eos(self) -> int:
        """The token that ends a completion."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad(self) -> int:
        """The token that means nothing."""
        pad = self.tokenizer.pad_token_id
        return self.eos if pad is None else int(pad)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, and nothing added."""
        return encode(self.tokenizer, text)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, tags included, without padding and end of text."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def texts(self, completions: Completions) -> list[str]:
        """Return what was written, tool text included, without the end of text and padding."""
        rows = [
            [token for token, real in zip(*row, strict=True) if real and token != self.eos]
            for row in zip(
                completions.action.tolist(), completions.completion_mask.tolist(), strict=True
            )
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
        """Complete every example's prompt, with the task's tool at hand."""
        tools, end = self.tools, None
        if tools is not None:
            (end,) = self.encode(tools.stop)

        def insert(row: int, tokens: list[int]) -> list[int] | None:
            assert tools is not None
            answer = tools.reply(examples[row // group].data, self.decode(tokens))
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
        """Return the task's own judgement, whatever is rewarded."""
        return np.array(
            [true_score(self.task, e, text) for e, text in zip(examples, texts, strict=True)]
        )

    def step(self, objective: Loss) -> Step:
        """Return one step of Adam on an objective of tokens."""
        region = self.config.region
        return make_step(
            self.agent,
            objective,
            max_grad_norm=region.max_grad_norm,
            micro=region.micro or None,
            workers=self.agent.workers if region.covariance == "none" else 1,
        )

    def prepare(self, state: TrainState, on_progress: ProgressCallback | None) -> TrainState:
        """Warm up, judge, check what must hold; the reference is where RL begins."""
        from keel.apps.language.judge import judge
        from keel.apps.language.preflight import preflight, require
        from keel.apps.language.supervised import warm_up

        config = self.config
        opt_state, metrics = warm_up(self, on_progress)
        params = opt_state.params
        judged = judge(self, params, self._looks()).metrics()
        self.warm_up = metrics | {
            f"judged_{name.removeprefix('eval/')}": value for name, value in judged.items()
        }
        self.reference = params.clone() if config.kl.place != "none" else None
        self.start = params.clone() if config.control and config.warmup.examples > 0 else None
        if config.preflight:
            require(preflight(self, params, self.reference))
        # Adam begins anew: RL is another objective
        return state.replace(opt_state=initial_opt_state(params))

    @torch.no_grad()
    def collect(self, params: Tensor, hparams: HyperParams) -> Experience:
        """Complete prompts, score what was written, compare with the reference."""
        config, group = self.config, self.config.sample.group
        started = time.perf_counter()
        examples = prompts(self.task, config.sample.prompts, self.examples)
        completions = self.complete(params, examples, self.draws, group=group)
        asked = [example for example in examples for _ in range(group)]
        texts = self.texts(completions)
        completed = time.perf_counter()
        score, valid, scores = self._scored(asked, texts, completions)
        baseline = None
        if "baseline" in named_arguments(config.algo):
            baseline, judged = self._likeliest(params, examples)
            valid = valid & judged
        weight = self._weights(completions, valid)
        reference = None
        if self.reference is not None:
            temperature = hparams.temperature
            reference = compare_with(
                self.agent, params, self.reference, completions, weight, temperature
            )
        batch = self._batch(params, completions, weight, reference)
        penalty = torch.zeros_like(weight)
        if reference is not None and config.kl.place in ("reward", "both"):
            estimate = kl_reward(config.kl.reward, completions.log_prob, reference.log_prob)
            penalty = hparams.kl_coef * estimate

        def targets(now: Tensor) -> tuple[TokenTargets, Tensor]:
            raw = self._values(now, batch)
            value = torch.where(weight > 0, raw[..., 0], 0.0)
            return token_targets(config, score, weight, penalty, value, baseline), raw

        own, values = targets(params)
        metrics = {
            **completion_metrics(self, asked, texts, completions, score, valid, scores),
            **advantage_metrics(own, weight, config),
            **({} if reference is None else reference_metrics(reference, completions, weight)),
            "train/temperature": hparams.temperature,
            "time/score_seconds": time.perf_counter() - completed,
        }
        return Experience(
            batch=batch._replace(advantage=own.advantage, target=own.target, old_value=values),
            targets=lambda now: _as_targets(*targets(now)),
            temperature=hparams.temperature,
            metrics=metrics,
            signals={
                "return_mean": score[valid].mean().item() if bool(valid.any()) else math.nan,
                "kl_reference": self._kl_reference(reference),
            },
            counts={"tokens": completions.response_mask.sum().item()},
            seconds=completed - started,
            detail=Scored(asked, texts, completions, score, own, reference),
        )

    def after_update(self, experience: Experience, params: Tensor, report: UpdateReport) -> Metrics:
        """Let the reference follow, and account for tokens and KL."""
        completions = experience.detail.completions
        self.updates += 1
        self.reference = self._refreshed(params)
        self.passes += self._passes(completions)
        self.spent += report.kl_exact.max().item()
        self.last = experience
        return kl_spent_metrics(self.spent, report, completions, experience.batch.weight)

    def evaluate(self, params: Tensor) -> Metrics:
        """Judge one completion of every held-out prompt."""
        from keel.apps.language.judge import judge

        return judge(self, params, self._looks()).metrics()

    def draw_last_update(self, state: TrainState, path: Path) -> None:
        """Write the page of the last update: before the checkpoint, which has not its tokens."""
        from keel.apps.language.heatmap import write_heatmap
        from keel.apps.language.watching import token_table

        write_heatmap(token_table(self, state, path), path / HEATMAP)

    def conclude(
        self, params: Tensor, scores: Metrics, path: Path, on_progress: ProgressCallback | None
    ) -> Metrics:
        """Train the control, write the summary, and return metrics of both."""
        from keel.apps.language.summary import conclude

        return conclude(self, scores, path, on_progress)

    def state_dict(self) -> Saved:
        """Return the reference, the start of the control, books and generators."""
        tensors = {"draws": self.draws.get_state()}
        for name, x in (("reference", self.reference), ("start", self.start)):
            if x is not None:
                tensors[name] = x
        data = {
            "passes": self.passes,
            "spent": self.spent,
            "warm_up": self.warm_up,
            "examples": self.examples.bit_generator.state,
        }
        return tensors, data

    def load_state_dict(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stood."""
        self.draws.set_state(tensors["draws"])
        self.examples.bit_generator.state = data["examples"]
        self.reference, self.start = (
            tensors[name].to(self.device, copy=True) if name in tensors else None
            for name in ("reference", "start")
        )
        self.passes, self.spent = data["passes"], data["spent"]
        self.warm_up, self.updates = data["warm_up"], data["iteration"]

    def warm_start(self, checkpoint: Checkpoint) -> Tensor:
        """Raise: a model's folder says more than its parameters."""
        raise InputError(
            f"start_from: a run on tokens begins with a model; give model.path {checkpoint.path}"
        )

    def weights(self, params: Tensor) -> dict[str, Tensor]:
        """Return nothing: the model's own files hold the weights."""
        return {}

    def files(self, params: Tensor) -> dict[str, bytes]:
        """Return model and tokenizer as `from_pretrained` reads them."""
        return model_files(self.agent, self.tokenizer, params)

    def close(self) -> None:
        """Release nothing."""

    def _looks(self) -> list[Example]:
        return held_out(self.task, self.config.evaluation.prompts)

    def _scored(
        self, asked: list[Example], texts: list[str], completions: Completions
    ) -> tuple[Tensor, Tensor, Scores]:
        """Return scores `[R]`, 0 where there is none, which are real, and what they consist of."""
        lengths = completions.response_mask.sum(1).long().tolist()
        scores = self.rewards(asked, texts, lengths)
        valid = torch.from_numpy(scores.valid).to(self.device)
        return torch.from_numpy(np.nan_to_num(scores.score)).float().to(self.device), valid, scores

    def _likeliest(self, params: Tensor, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """Return what the likeliest completion of each prompt scores (ReMax 2023, arXiv
        2310.10505), `[R]`, and whether it could be scored; else a prompt has no baseline."""
        greedy = Sampling(self.sampling.max_new_tokens, temperature=0.0)
        completions = self.complete(params, examples, self.draws, sampling=greedy)
        score, valid, _ = self._scored(examples, self.texts(completions), completions)
        group = self.config.sample.group
        return score.repeat_interleave(group), valid.repeat_interleave(group)

    def _weights(self, completions: Completions, valid: Tensor) -> Tensor:
        """Return which tokens are learned from, `[R, L]`; none of completions without a score."""
        masked = self.config.sample.state_masking
        weight = completions.response_mask if masked else completions.completion_mask
        return torch.where(valid[:, None], weight, 0.0)

    def _batch(
        self,
        params: Tensor,
        completions: Completions,
        weight: Tensor,
        reference: Reference | None,
    ) -> Batch:
        """Return the completions as rows, with what their loss needs of the reference."""
        config, more = self.config, {}
        constants = {HEAD: self.agent.head(params).detach()}
        if reference is not None and config.kl.place in ("loss", "both"):
            more[REFERENCE] = reference.log_prob
            if config.kl.loss == "full":
                more[REFERENCE_HIDDEN] = reference.hidden
                constants[REFERENCE_HEAD] = reference.head
        if config.sample.max_importance is not None:
            gap = completions.log_prob - completions.sampler_log_prob
            gap = torch.where(completions.response_mask > 0, gap, 0.0)
            more[IMPORTANCE] = gap.exp().clamp(max=config.sample.max_importance)
        return completions.batch(**more)._replace(weight=weight, constants=constants)

    def _values(self, params: Tensor, batch: Batch) -> Tensor:
        """Return what the critic says of every token, `[R, L, 1]`; 0 without one."""
        if self.config.critic == "none":
            return torch.zeros_like(batch.weight)[..., None]
        return torch.cat(
            [self.agent.raw_value(params, batch.part(index).obs) for index in chunks(batch)]
        )

    def _kl_reference(self, reference: Reference | None) -> float:
        if reference is None:
            return math.nan
        return reference.per_token if self.config.kl.unit == "token" else reference.per_sequence

    def _refreshed(self, params: Tensor) -> Tensor | None:
        """Return the reference after an update: as it was, a copy of the policy, or a follower."""
        kl = self.config.kl
        if self.reference is None:
            return None
        if kl.ema:
            return torch.lerp(self.reference, params, kl.ema)
        return params.clone() if kl.refresh and self.updates % kl.refresh == 0 else self.reference

    def _passes(self, completions: Completions) -> float:
        """Return tokens through the model: once to sample, once for the reference and the
        certificate each, three times for every epoch of learning."""
        size = float(completions.attention.sum().item())
        return size * (2.0 + (self.config.kl.place != "none") + 3.0 * self.config.region.epochs)


def _as_targets(targets: TokenTargets, raw: Tensor) -> Targets:
    return Targets(targets.advantage, targets.target, raw)
