"""Weights of behavior cloning: the share of a demonstration that is worth imitating."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError, check_choice

CloningKind = Literal["plain", "filtered", "weighted"]
KINDS = ("plain", "filtered", "weighted")


class CloningWeight(NamedTuple):
    """Weights of demonstrated steps, with the share that is used and the share at the cap."""

    weight: Tensor
    """like the advantage: what −log π of each step is multiplied by"""
    used: Tensor
    """`[]`: share of the steps with a weight above 0"""
    at_cap: Tensor
    """`[]`: share of the steps whose weight is the largest allowed"""


def cloning_weight(
    advantage: Tensor, kind: CloningKind, *, temperature: float = 1.0, cap: float = 20.0
) -> CloningWeight:
    """Weight demonstrated steps by their advantage A = return − V(s).

    - `plain`: 1 for all steps.
    - `filtered`: 1 where A > 0, else 0: only what turned out better than the policy expects of
      itself (self-imitation, Oh et al. 2018, arXiv 1806.05635).
    - `weighted`: `min(exp(A / (β · rms(A))), cap)`, as in advantage-weighted
      regression (Peng et al. 2019, arXiv 1910.00177); dividing by the root mean square of A frees
      the temperature β of the reward's units (MARWIL, Wang et al. 2018).

    Args:
        advantage: `[*lead]`, A of each demonstrated step.
        kind: one of the kinds above.
        temperature: β of `weighted`, above 0.
        cap: largest weight of `weighted`, above 0.
    """
    check_choice("kind", kind, KINDS)
    if not temperature > 0.0 or not cap > 0.0:
        raise InputError(
            f"temperature, cap: expected numbers above 0, got {temperature:g} and {cap:g}"
        )
    never = torch.zeros_like(advantage, dtype=torch.bool)
    if kind == "plain":
        weight, capped = torch.ones_like(advantage), never
    elif kind == "filtered":
        weight, capped = (advantage > 0).to(advantage.dtype), never
    else:
        rms = advantage.double().square().mean().sqrt().clamp(min=1e-12).to(advantage.dtype)
        exponent = (advantage / (temperature * rms)).clamp(max=50.0)  # e^50 is above every cap
        weight = exponent.exp().clamp(max=cap)
        capped = weight >= cap
    share = advantage.new_tensor(1.0 / max(1, advantage.numel()), dtype=torch.float64)
    return CloningWeight(weight, (weight > 0).sum() * share, capped.sum() * share)
