"""Why a replay is not what was sampled: the causes that leave a trace, each tried in turn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keel.keys import MASK
from keel.models.agent import Agent
from keel.types import Tree

CLOSE = 1e-3
"""|log-ratio| up to which two log-probabilities are the same."""
NEARLY_ALL = 0.99


class Replay(NamedTuple):
    """Rows `[R, …]` whose replay was looked at."""

    agent: Agent
    params: Tensor
    obs: Tree
    behaviour: Tree
    action: Tensor
    stored: Tensor
    """the log-probs that came with the actions"""
    wrong: Tensor
    """bool: where the replay gives others"""
    temperature: float

    def policy(self) -> Tree:
        """As it is replayed."""
        return self.agent.policy(self.params, self.obs, self.temperature)


@torch.no_grad()
def cause(replay: Replay) -> str:
    """What the rows that are wrong have in common, and what to do about it."""
    found = (
        _another_actor(replay)
        or _another_mask(replay)
        or _another_action(replay)
        or _another_temperature(replay)
    )
    if found:
        return f"Cause: {found}"
    return "Look for another network, dropout, or observations that were normalised again"


def _another_actor(replay: Replay) -> str:
    """Whose network gives the log-probs that were stored, with what was legal then."""
    agent, obs, wrong = replay.agent, replay.obs, replay.wrong
    if agent.groups == 1:
        return ""
    if MASK in obs and "logits" in replay.behaviour:
        obs = obs | {MASK: replay.behaviour["logits"] > -torch.inf}
    plain = agent.each_its_own()
    guilty = []
    for row, name in enumerate(agent.row_names):
        same = replay.params[row : row + 1].expand_as(replay.params)
        by_row = agent.dist.log_prob(plain.policy(same, obs, replay.temperature), replay.action)
        matches = (by_row - replay.stored).abs() <= CLOSE
        guilty += [
            (name, agent.row_names[own])
            for a, own in enumerate(agent.members)
            if own != row and wrong[:, a].any() and _share(matches[:, a], wrong[:, a]) > NEARLY_ALL
        ]
    if not guilty:
        return ""
    told = ", ".join(f"{actor}'s by {network}'s" for actor, network in dict.fromkeys(guilty))
    return (
        f"wrong_actor: actions are replayed by another agent's network than took them ({told}). "
        "Take each agent's log-prob from the network it acts with, under the mask it acted with"
    )


def _another_mask(replay: Replay) -> str:
    mask, logits = replay.obs.get(MASK), replay.behaviour.get("logits")
    if mask is None or logits is None or logits.shape != mask.shape:
        return ""
    changed = ((logits > -torch.inf) != mask.bool()).any(-1)
    if _share(changed, replay.wrong) < 0.5:
        return ""
    return (
        f"mask_drift: on {_percent(changed)} of the rows other actions are legal now than when "
        "they were sampled. Store the mask with the step it belongs to, and learn with that one"
    )


def _another_action(replay: Replay) -> str:
    """The distribution is right, the action is not the one that was drawn from it."""
    log_prob, wrong = replay.agent.dist.log_prob, replay.wrong
    gap = log_prob(replay.behaviour, replay.action) - log_prob(replay.policy(), replay.action)
    if _share(gap.abs() <= CLOSE, wrong) < NEARLY_ALL:
        return ""
    return (
        f"epsilon_greedy: the policy is the same, but on {_percent(wrong)} of the rows the action "
        "is not the one that the log-prob belongs to: exploration outside of the policy. Explore "
        "by the entropy bonus or the temperature, which are part of the distribution"
    )


def _another_temperature(replay: Replay) -> str:
    logits, temperature = replay.behaviour.get("logits"), replay.temperature
    if logits is None:
        return ""
    now = replay.policy()["logits"]
    legal = (logits > -torch.inf) & (now > -torch.inf) & replay.wrong[..., None]
    a, b = _centred(logits, legal)[legal], _centred(now, legal)[legal]
    if not b.numel() or not bool(b.square().sum() > 0):
        return ""
    factor = (a * b).sum() / b.square().sum()
    if not bool(factor > 0) or bool((a - factor * b).abs().max() > CLOSE):
        return ""
    return (
        f"temperature: the actions were drawn at {temperature / factor.item():.3g}, the update "
        f"replays them at {temperature:.3g}. Use one for both"
    )


def _centred(logits: Tensor, legal: Tensor) -> Tensor:
    """Minus their mean over what is legal: all that softmax sees."""
    counted = torch.where(legal, logits, 0.0)
    mean = counted.sum(-1, keepdim=True) / legal.sum(-1, keepdim=True).clamp(min=1)
    return counted - mean


def _share(condition: Tensor, among: Tensor) -> float:
    return (condition & among).sum().item() / max(1, among.sum().item())


def _percent(condition: Tensor) -> str:
    return f"{condition.double().mean().item():.0%}"
