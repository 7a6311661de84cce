"""The doctor beside a training of TRL or of any other trainer of Hugging Face.

    trainer = GRPOTrainer(..., callbacks=[DoctorCallback(path="output")])
    trainer.train()

Importing `keel.integrations.trl` gives the same class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keel.errors import InputError
from keel.integrations.speaking import EVERY, Moves, Speaker, plain_settings, share_trained
from keel.tracking.logs.settings import TRL

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise InputError('transformers is not installed: pip install "keel-rl[language]"') from error

ROWS = 64
"""Completions that are measured."""
SUMMARY = "train_runtime"
"""Name in the last row of a trainer, which only sums up."""


class DoctorCallback(TrainerCallback):
    """Callback that prints the doctor's verdict when it changes, and writes `doctor.json`."""

    def __init__(
        self,
        *,
        every: int = EVERY,
        path: Path | str | None = None,
        rows: Path | str | None = None,
        ignore: tuple[str, ...] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Prepare a callback for one training.

        Args:
            every: Logged rows between two looks.
            path: Folder of `doctor.json`, or a file for it; None: nothing is written.
            rows: File for what was collected, as lines of JSON; None: none.
            ignore: Rules that shall not speak.
            say: Takes each line.
        """
        self.speaker = Speaker("trl", every=every, path=path, ignore=ignore, say=say)
        self._rows = None if rows is None else Path(rows)
        self._measured: dict[str, float] = {}
        self._moves: Moves | None = None
        self._trainer: Any = None
        self._generation: object = None

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Read the settings, and look at which parameters learn."""
        self.speaker.guarded(lambda: self._begin(args, state, model, optimizer))

    def watch(self, trainer: Any) -> DoctorCallback:
        """Measure new completions of this trainer before it learns from them.

        That costs one forward pass a generation; TRL's GRPO and RLOO trainers keep what it needs.

        Args:
            trainer: Whose callback this is.
        """
        self._trainer = trainer
        return self

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Measure new completions before the first step on them."""
        generation = getattr(self._trainer, "_buffered_inputs", None)
        if generation is None or generation is self._generation:
            return
        self._generation = generation
        self.speaker.guarded(lambda: self._surprise(generation, args, model))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Take in a row."""
        if logs and SUMMARY not in logs and state.is_world_process_zero:
            self.speaker.guarded(self._measure)
            self.speaker.add(state.global_step, {**self._measured, **logs})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say the last verdict and write it."""
        self.speaker.close()
        if self._rows is not None:
            self.speaker.guarded(self._write_rows)

    def _begin(self, args: Any, state: Any, model: Any, optimizer: Any) -> None:
        self.speaker.settings = settings_of(args) | {"total_steps": state.max_steps}
        if model is None or optimizer is None or args.world_size > 1:
            return  # what is sharded cannot be counted here
        share = share_trained(model.parameters(), optimizer)
        self._measured["train/parameters_trained"] = share
        self._moves = Moves(p for p in model.parameters() if p.requires_grad)

    def _surprise(self, generation: Any, args: Any, model: Any) -> None:
        from keel.integrations.trl import rollout_of, token_log_probs

        rollout = rollout_of(generation)
        if rollout is None or args.world_size > 1:
            return
        part = rollout.first(ROWS)
        log_probs = token_log_probs(model, part, args.temperature)
        tokens = part.tokens[:, -part.mask.shape[1] :][part.mask][:, None]
        entropy = -(log_probs.exp() * log_probs).nan_to_num().sum(-1)
        gap = -log_probs.gather(1, tokens)[:, 0] - entropy
        self._measured["train/surprise_gap"] = float(gap.double().mean())

    def _measure(self) -> None:
        effect = None if self._moves is None else self._moves()
        if effect is not None:
            self._measured["train/gradient_effect"] = effect

    def _write_rows(self) -> None:
        assert self._rows is not None
        with self._rows.open("w") as file:
            for row in self.speaker.rows:
                finite = {k: v if math.isfinite(v) else None for k, v in row.values.items()}
                file.write(json.dumps({"step": row.step, **finite}) + "\n")


def settings_of(args: Any) -> dict[str, Any]:
    """Return what a trainer's arguments say, by Keel's dotted names.

    Args:
        args: Of the trainer, such as a `GRPOConfig`.
    """
    return plain_settings({keel: getattr(args, name, None) for name, keel in TRL.items()})
