"""The tokens of an update with everything that was measured of them, to be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.apps.language.heatmap import TokenTable
from keel.apps.language.loop import Iteration
from keel.apps.language.session import Session
from keel.trust_region.measure import measure


def token_table(session: Session, last: Iteration, params: Tensor, path: Path) -> TokenTable:
    """Return what the last update did to each token.

    Args:
        session: of the run.
        last: the last iteration.
        params: `[1, P]`, those that the update ended with.
        path: of the run.
    """
    batch = last.sampled
    completions, weight = batch.found, batch.rows.weight
    hparams = last.state.hparams
    agent = session.agent.sampled_by(batch.before)
    measured = measure(agent, params, batch.rows, hparams.temperature)
    advantage, ratio = batch.targets.advantage, measured.ratio.ratio
    over = (advantage > 0) & (ratio > 1.0 + hparams.clip_high)
    under = (advantage < 0) & (ratio < 1.0 - hparams.clip_low)
    clipped = (over | under) & torch.tensor(session.config.region.clip is not None)
    reference = None
    if batch.reference is not None:
        reference = torch.where(weight > 0, batch.reference.kl, 0.0).cpu().numpy()
    names = session.tokenizer.convert_ids_to_tokens
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
        step=last.state.steps,
        prompts=[example.prompt for example in batch.examples],
        tokens=texts,
        weight=weight.cpu().numpy(),
        reward=batch.score.cpu().numpy(),
        kl_old_new=array(measured.kl),
        kl_reference=reference,
        log_ratio=array(measured.ratio.raw_log_ratio),
        advantage=array(advantage),
        entropy=array(measured.entropy),
        clipped=clipped.cpu().numpy(),
    )
