"""A Keel run from a TRL trainer (TRL 1.16), so that `keel runs` and `keel compare` read it.

    recorder = KeelCallback("runs", name="countdown-trl", env="countdown")
    trainer = GRPOTrainer(..., callbacks=[recorder])
    recorder.watch(trainer)
    trainer.train()

TRL's logs come under Keel's names, and those that Keel does not know under `trl/NAME`. A watched
trainer is also *measured*: the exact KL(old‖new) of every update over the whole vocabulary, and
KL(new‖reference) where there is a reference model, on the completions the update was made from.
That costs two forward passes an update, three with a reference; it is left out with several
processes, with images, and where `max_elements` has no room for a single completion.

A step is a token that the policy wrote; of a trainer that is not watched, an update.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError
from keel.functional import categorical_kl, k1, k3
from keel.integrations.trl_doctor import DoctorCallback
from keel.tracking import (
    MetricsWriter,
    RunDirectory,
    RunWarning,
    canonical,
    read_metrics,
    run_name,
)
from keel.tracking.directory import Status, check_name

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise InputError('transformers is not installed: pip install "keel-rl[language]"') from error

__all__ = ["DoctorCallback", "KeelCallback"]
SOURCE = "trl"
UPDATES = "trl/updates"
"""TRL's own count of optimizer steps."""
MAX_ELEMENTS = 1 << 26
"""Log-probs held at once: 256 MiB in float32."""
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
LARGEST = ("train/kl_max", "train/kl_p99")
"""Metrics that are the largest of several updates between two logs; the others are means."""


class Rollout(NamedTuple):
    """Completions of one generation."""

    tokens: Tensor
    """`[B, P + L]`: prompt and completion"""
    attention: Tensor
    """`[B, P + L]`"""
    mask: Tensor
    """`[B, L]` bool: tokens that the policy wrote"""

    def first(self, rows: int) -> Rollout:
        """Return the first rows."""
        return Rollout(*(x[:rows] for x in self))


class Measured(NamedTuple):
    """Log-probs of the policy before an update."""

    rollout: Rollout
    log_probs: Tensor
    """`[N, V]`, of the tokens in `mask`"""
    complete: bool
    """all completions are in it"""


class KeelCallback(TrainerCallback):
    """Callback that writes a run to `root/name/seed-SEED`; the seed is the trainer's."""

    def __init__(
        self,
        root: Path | str,
        name: str | None = None,
        *,
        env: str = "language",
        tag: str | None = None,
        max_elements: int = MAX_ELEMENTS,
    ) -> None:
        """Prepare a run, which begins with the training.

        Args:
            root: folder of all runs.
            name: of the run; by default task, algorithm and time.
            env: the task that `keel compare` groups by.
            tag: a label of the user's own.
            max_elements: log-probabilities to hold at once.
        """
        self.path: Path | None = None
        """of the run, once it has begun"""
        self._root, self._name, self._env, self._tag = Path(root), name, env, tag
        self._max_elements = max_elements
        self._trainer: Any = None
        self._directory: RunDirectory | None = None
        self._writer: MetricsWriter | None = None
        self._generation: object = None
        self._old: Measured | None = None
        self._measurements: list[dict[str, float]] = []
        self._line: tuple[int, dict[str, Any]] = (-1, {})
        self._tokens, self._seconds, self._began, self._clock = 0, 0.0, 0.0, (0, 0.0)
        self._warned = False
        if name is not None:
            check_name(name)

    def watch(self, trainer: Any) -> KeelCallback:
        """Measure the updates of this trainer; it must keep its batches as GRPO and RLOO do."""
        if not hasattr(trainer, "_buffered_inputs"):
            raise InputError(
                f"{type(trainer).__name__}: cannot be watched, it does not keep what it generated; "
                "TRL's GRPOTrainer and RLOOTrainer do"
            )
        self._trainer = trainer
        return self

    def close(self, status: Status = "finished") -> None:
        """End the run; TRL does it when training ends, not when it fails."""
        if self._writer is not None:
            self._writer.close()
        if self._directory is not None:
            self._directory.close(status)
        self._writer = self._directory = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the run, or go on with it where the trainer was resumed."""
        if not state.is_world_process_zero:
            return
        algo = type(args).__name__.removesuffix("Config").lower()
        name = self._name or run_name(self._env, algo, self._root)
        self.path = self._root / name / f"seed-{args.seed}"
        if state.global_step > 0 and self.path.exists():
            self._directory = RunDirectory.resume(self.path)
        else:
            config = {"env": self._env, "algo": algo, "seed": args.seed, "library": SOURCE}
            config[SOURCE] = _plain(args.to_dict())
            choices = {"step": "tokens" if self._trainer is not None else "updates"}
            self._directory = RunDirectory.create(
                self._root, name, args.seed, config=config, tag=self._tag, choices=choices
            )
        self._writer = MetricsWriter(self._directory.metrics)
        self._tokens, self._seconds = self._go_back(state.global_step)
        self._began = time.perf_counter()
        self._clock = (self._tokens, self._seconds)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Count new completions before the first step on them, and remember the policy."""
        if self._writer is None or self._trainer is None:
            return
        generation = self._trainer._buffered_inputs
        if generation is self._generation:
            return
        self._generation = generation
        rollout = rollout_of(generation)
        if rollout is not None:
            self._tokens += int(rollout.mask.sum()) * args.world_size
        self._old = self._remember(model, rollout, args)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Measure how far the policy moved in a step."""
        if self._writer is None or self._old is None:
            return
        reference = getattr(self._trainer, "ref_model", None)
        self._measurements.append(measure(model, reference, self._old, args.temperature))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Write one line; what is logged again at the same step joins it."""
        if self._writer is None or not logs or "train_runtime" in logs:
            return  # the last of them only sums up
        measured = _combine(self._measurements)
        self._measurements = []
        step = state.global_step if self._trainer is None else self._tokens
        before = self._line[1] if self._line[0] == step else {}
        if before:
            self._writer.truncate_after(step - 1)
        metrics = before | translate(logs, measured) | measured | self._times(step, before)
        metrics[UPDATES] = state.global_step
        self._writer.write(step, metrics)
        self._line = (step, metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finish the run."""
        self.close()

    def _times(self, step: int, before: Mapping[str, Any]) -> dict[str, float]:
        if before:
            return {}
        seconds = self._seconds + time.perf_counter() - self._began
        last_step, last = self._clock
        self._clock = (step, seconds)
        times = {"time/seconds": seconds}
        if self._trainer is not None and seconds > last:
            times["time/steps"] = step
            times["time/steps_per_second"] = (step - last_step) / (seconds - last)
        return times

    def _go_back(self, updates: int) -> tuple[int, float]:
        """Return steps and seconds at an update; drop the lines after it, to be written again."""
        assert self._writer is not None
        if not updates or not self._writer.path.stat().st_size:
            return 0, 0.0
        table = read_metrics(self._writer.path)
        is_done = table[UPDATES] <= updates
        if not is_done.any():
            self._writer.truncate_after(-1)
            return 0, 0.0
        last = int(is_done.nonzero()[0][-1])
        step = int(table.step[last])
        self._writer.truncate_after(step)
        return step, float(table["time/seconds"][last])

    def _remember(self, model: Any, rollout: Rollout | None, args: Any) -> Measured | None:
        if rollout is None or args.world_size > 1:
            self._warn("the trainer runs in several processes, or its inputs are not plain tokens")
            return None
        vocabulary = model.config.get_text_config().vocab_size
        rows = min(len(rollout.mask), self._max_elements // (rollout.mask.shape[1] * vocabulary))
        if rows == 0:
            self._warn(
                f"max_elements has no room for {rollout.mask.shape[1]} × {vocabulary:,} numbers"
            )
            return None
        part = rollout.first(rows)
        log_probs = token_log_probs(model, part, args.temperature)
        return Measured(part, log_probs, rows == len(rollout.mask))

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.path}: the exact KL is left out: {reason}", RunWarning, stacklevel=3
            )


def rollout_of(generation: Any) -> Rollout | None:
    """Return what a trainer generated as one rollout; None if it is not plain tokens."""
    if not isinstance(generation, list) or not generation:
        return None
    if any(key not in part for part in generation for key in INPUTS):
        return None
    if any(part.get("pixel_values") is not None for part in generation):
        return None

    def joined(key: str) -> Tensor:
        return torch.cat([part[key] for part in generation])

    mask = joined("completion_mask").bool()
    if all(part.get("tool_mask") is not None for part in generation):
        mask = mask & joined("tool_mask").bool()
    return Rollout(
        tokens=torch.cat([joined("prompt_ids"), joined("completion_ids")], 1),
        attention=torch.cat([joined("prompt_mask"), joined("completion_mask")], 1),
        mask=mask,
    )


@torch.no_grad()
def token_log_probs(model: Any, rollout: Rollout, temperature: float, rows: int = 16) -> Tensor:
    """Return log π of the vocabulary at every token in `mask`, `[N, V]` float32.

    Args:
        model: a causal language model of transformers.
        rollout: prompts and completions.
        temperature: that logits are divided by.
        rows: sequences at a time.
    """
    length = rollout.mask.shape[1]
    parts = []
    with _in_eval_mode(model):
        for start in range(0, len(rollout.mask), rows):
            part = Rollout(*(x[start : start + rows] for x in rollout))
            output = model(
                input_ids=part.tokens,
                attention_mask=part.attention,
                logits_to_keep=length + 1,
                use_cache=False,
            )
            # the logits of a token stand one place before it
            logits = output.logits[:, -length - 1 : -1][part.mask].float()
            parts.append((logits / temperature).log_softmax(-1))
    return torch.cat(parts)


@torch.no_grad()
def measure(model: Any, reference: Any, old: Measured, temperature: float) -> dict[str, float]:
    """Measure the effect of an update on the policy, in Keel's names.

    Args:
        model: after the update.
        reference: reference model, or None.
        old: log-probabilities before the update.
        temperature: of the sampler.
    """
    new = token_log_probs(model, old.rollout, temperature)
    kl = categorical_kl(old.log_probs, new).double()
    if not kl.numel():
        return {}
    length = old.rollout.mask.shape[1]
    sampled = old.rollout.tokens[:, -length:][old.rollout.mask][:, None]
    sampled_log_probs = old.log_probs.gather(1, sampled), new.gather(1, sampled)
    approx = k1(*sampled_log_probs).double().mean()
    metrics = {
        "train/kl_exact": kl.mean(),
        "train/kl_reverse": categorical_kl(new, old.log_probs).double().mean(),
        "train/kl_p99": kl.quantile(0.99),
        "train/kl_max": kl.max(),
        "train/kl_approx": approx,
        "train/approx_kl": k3(*sampled_log_probs).double().mean(),
        "train/kl_error": (approx - kl.mean()).abs(),
        "train/kl_is_exact": torch.tensor(float(old.complete)),
    }
    if reference is not None:
        reference_log_probs = token_log_probs(reference, old.rollout, temperature)
        metrics["train/kl_reference"] = categorical_kl(new, reference_log_probs).double().mean()
    return {name: float(x) for name, x in metrics.items()}


def translate(logs: Mapping[str, Any], measured: Mapping[str, float]) -> dict[str, Any]:
    """Rename TRL's logs to Keel's names; what is also `measured`, or unknown, is `trl/NAME`."""
    translated: dict[str, Any] = {}
    for name, value in logs.items():
        if not isinstance(value, int | float | None):
            continue
        target = canonical(name, SOURCE)
        if target is None or target.name in measured or target.name in translated:
            translated[f"{SOURCE}/{name}"] = value
        else:
            translated[target.name] = value if value is None else target.convert(float(value))
    return translated


def _combine(measurements: list[dict[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for measurement in measurements:
        for name, value in measurement.items():
            columns.setdefault(name, []).append(value)
    return {
        name: max(values) if name in LARGEST else math.fsum(values) / len(values)
        for name, values in columns.items()
    }


@contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """Switch dropout off for the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _plain(data: Any) -> Any:
    """Return plain data for YAML; anything else becomes the text that it prints as."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return data if data is None or type(data) in (bool, int, float, str) else str(data)
