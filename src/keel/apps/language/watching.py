"""The tokens of an update with everything that was measured of them, to be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.apps.language.heatmap import TokenTable
from keel.apps.language.source import PromptSource, Scored
from keel.training.loop import TrainState
from keel.trust_region.measure import measure


def token_table(source: PromptSource, state: TrainState, path: Path) -> TokenTable:
    """Return what the last update did to each token.

    Args:
        source: of the run, after that update.
        state: of the run, after that update.
        path: of the run.
    """
    assert source.last is not None
    scored: Scored = source.last.detail
    batch, hparams = source.last.batch, state.hparams
    completions, weight = scored.completions, batch.weight
    measured = measure(source.agent, state.opt_state.params, batch, hparams.temperature)
    advantage, ratio = scored.targets.advantage, measured.ratio.ratio
    over = (advantage > 0) & (ratio > 1.0 + hparams.clip_high)
    under = (advantage < 0) & (ratio < 1.0 - hparams.clip_low)
    clipped = (over | under) & torch.tensor(source.config.region.clip is not None)
    reference = None
    if scored.reference is not None:
        reference = torch.where(weight > 0, scored.reference.kl, 0.0).cpu().numpy()
    names = source.tokenizer.convert_ids_to_tokens
    texts = [
        [str(name) for name, real in zip(names(ids), row, strict=True) if real]
        for ids, row in zip(
            completions.action.tolist(), completions.completion_mask.bool().tolist(), strict=True
        )
    ]

    def array(x: Tensor) -> NDArray[Any]:
        values: NDArray[Any] = torch.where(weight > 0, x, 0.0).cpu().numpy()
        return values

    return TokenTable(
        run=f"{path.parent.name}/{path.name}",
        step=state.steps,
        prompts=[example.prompt for example in scored.examples],
        tokens=texts,
        weight=weight.cpu().numpy(),
        reward=scored.score.cpu().numpy(),
        kl_old_new=array(measured.kl),
        kl_reference=reference,
        log_ratio=array(measured.ratio.raw_log_ratio),
        advantage=array(advantage),
        entropy=array(measured.entropy),
        clipped=clipped.cpu().numpy(),
    )
