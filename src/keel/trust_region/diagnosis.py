"""Why a replay is not what was sampled: the causes that leave a trace, each tried in turn."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from keel.networks.agent import Agent
from keel.types import MASK, Tree

CLOSE = 1e-3
"""|log-ratio| up to which two log-probabilities are the same."""
CLOSE_KL = 1e-5
"""KL, in nats, up to which two distributions are the same."""
NEARLY_ALL = 0.99
TELLING = 0.05
"""Distance of a probability from that of a random action from which on it tells how many are."""
TEMPERATURES = (0.02, 50.0)
"""Temperatures that log-probs are looked for at."""


class Replay(NamedTuple):
    """Rows `[R, …]` whose replay was looked at."""

    agent: Agent
    params: Tensor
    obs: Tree
    behavior: Tree
    action: Tensor
    stored: Tensor
    """the log-probs that came with the actions"""
    wrong: Tensor
    """bool: where the replay gives others"""
    temperature: float

    def policy(self) -> Tree:
        """Return the policy as it is replayed."""
        return self.agent.policy(self.params, self.obs, self.temperature)


@torch.no_grad()
def cause(replay: Replay) -> str:
    """Say what the rows that are wrong have in common, and what to do about it.

    Where the distributions that were stored are those that are replayed, the log-probs are wrong;
    else the policy that sampled was another one. What leaves no trace of its own is not guessed at.
    """
    same = replay.agent.dist.kl(replay.behavior, replay.policy()) <= CLOSE_KL
    if _share(same, replay.wrong) > NEARLY_ALL:
        diagnosis = (
            _another_actor(replay) or _log_probs_at_temperature(replay) or _another_action(replay)
        )
        otherwise = (
            "unknown. The distributions are those that sampled, the log-probs belong to something "
            "else: look at how they are computed, and whether actions are changed afterwards"
        )
    else:
        diagnosis = (
            _another_actor(replay)
            or _another_mask(replay)
            or _another_temperature(replay)
            or _stored_distribution(replay)
        )
        otherwise = (
            "unknown. Look for another network, dropout, or observations that were normalized again"
        )
    return f"Cause: {diagnosis or otherwise}"


def _another_actor(replay: Replay) -> str:
    """Find the network that gives the stored log-probs, with what was legal then."""
    agent, obs, wrong = replay.agent, replay.obs, replay.wrong
    if agent.groups == 1:
        return ""
    if MASK in obs and "logits" in replay.behavior:
        obs = obs | {MASK: replay.behavior["logits"] > -torch.inf}
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
    pairs = ", ".join(f"{actor}'s by {network}'s" for actor, network in dict.fromkeys(guilty))
    return (
        f"wrong_actor: actions are replayed by another agent's network than took them ({pairs}). "
        "Take each agent's log-prob from the network it acts with, under the mask it acted with"
    )


def _another_mask(replay: Replay) -> str:
    mask, logits = replay.obs.get(MASK), replay.behavior.get("logits")
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
    """Recognise an action that was not drawn from the distribution, which is right."""
    logits = replay.policy().get("logits")
    if logits is None or logits.shape[:-1] != replay.action.shape:
        return ""
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(-1, replay.action.long()[..., None])[..., 0]
    others = ((log_p - replay.stored[..., None]).abs() <= CLOSE).any(-1)
    if _share(others, replay.wrong) > NEARLY_ALL:
        how = f"on {_percent(replay.wrong)} of the rows the log-prob is another action's"
    else:
        share = _mixed_in(chosen.exp(), replay.stored.exp(), logits, replay.wrong)
        if share is None:
            return ""
        how = f"the log-probs are of a mixture with {share:.2g} of uniformly random actions"
    return (
        f"epsilon_greedy: the policy is the same, but {how}: exploration outside of the policy. "
        "Explore by the entropy bonus or the temperature, which are part of the distribution"
    )


def _mixed_in(chosen: Tensor, stored: Tensor, logits: Tensor, wrong: Tensor) -> float | None:
    """Return the ε of stored = (1 − ε)·taken + ε/n, if there is one for all rows."""
    uniform = 1.0 / (logits > -torch.inf).sum(-1)
    tells = wrong & ((chosen - uniform).abs() > TELLING)
    share = ((chosen - stored) / (chosen - uniform))[tells].double()
    if not share.numel() or not bool(((share > 0.0) & (share < 1.0)).all()):
        return None
    middle = share.median()
    agree = (share - middle).abs() * (chosen - uniform)[tells].abs() <= CLOSE
    return middle.item() if agree.double().mean() > NEARLY_ALL else None


def _log_probs_at_temperature(replay: Replay) -> str:
    """Recognise log-probs of the right distributions at another temperature."""
    wrong, stored = replay.wrong, replay.stored

    def gap(log_temperature: float) -> Tensor:
        policy = replay.agent.policy(replay.params, replay.obs, math.exp(log_temperature))
        return (replay.agent.dist.log_prob(policy, replay.action) - stored)[wrong].abs()

    low, high = (math.log(x) for x in TEMPERATURES)
    tried = torch.linspace(low, high, 41).tolist()
    at = min(range(len(tried)), key=lambda i: gap(tried[i]).mean().item())
    low, high = tried[max(0, at - 1)], tried[min(len(tried) - 1, at + 1)]
    for _ in range(40):  # thirds: the mean gap has one minimum between neighbours of the best
        left, right = low + (high - low) / 3.0, high - (high - low) / 3.0
        if gap(left).mean() < gap(right).mean():
            high = right
        else:
            low = left
    if (gap(low) <= CLOSE).double().mean() < NEARLY_ALL:
        return ""
    return (
        f"temperature: the log-probs are of a temperature of {math.exp(low):.3g}, the actions were "
        f"drawn at {replay.temperature:.3g}. Take log-probs from the distribution that was sampled"
    )


def _stored_distribution(replay: Replay) -> str:
    """Recognise stored distributions that are wrong beside log-probs that are right."""
    log_prob = replay.agent.dist.log_prob(replay.policy(), replay.action)
    if _share((log_prob - replay.stored).abs() <= CLOSE, replay.wrong) < NEARLY_ALL:
        return ""
    return (
        "stored_distribution: the log-probs are those of the policy, the distributions stored with "
        "them are another's, so the exact KL would be from there. Store the parameters of the "
        "distribution that was sampled, after mask and temperature"
    )


def _another_temperature(replay: Replay) -> str:
    """Recognise actions that were drawn from the same distributions at another temperature."""
    factor = _logit_factor(replay) if "logits" in replay.behavior else _heat(replay)
    if factor is None:
        return ""
    return (
        f"temperature: the actions were drawn at {replay.temperature * factor:.3g}, the update "
        f"replays them at {replay.temperature:.3g}. Use one for both"
    )


def _logit_factor(replay: Replay) -> float | None:
    """Return by what the logits that are replayed have to be divided to be those stored."""
    logits, now = replay.behavior["logits"], replay.policy()["logits"]
    legal = (logits > -torch.inf) & (now > -torch.inf) & replay.wrong[..., None]
    a, b = _centered(logits, legal)[legal], _centered(now, legal)[legal]
    if not b.numel() or not bool(b.square().sum() > 0):
        return None
    factor = (a * b).sum() / b.square().sum()
    if not bool(factor > 0) or bool((a - factor * b).abs().max() > CLOSE):
        return None
    return 1.0 / factor.item()


def _heat(replay: Replay) -> float | None:
    """Return by what the variances that are replayed have to be multiplied to be those stored."""
    if not {"mean", "log_std"} <= replay.behavior.keys():
        return None
    stored, now = replay.behavior, replay.policy()
    wider = 2.0 * (stored["log_std"] - now["log_std"])[replay.wrong]
    moved = ((stored["mean"] - now["mean"]) * torch.exp(-now["log_std"]))[replay.wrong]
    even = wider.max() - wider.min() <= CLOSE and moved.abs().max() <= CLOSE
    return math.exp(wider.mean().item()) if bool(even) else None


def _centered(logits: Tensor, legal: Tensor) -> Tensor:
    """Subtract the mean over what is legal: the rest is all that softmax sees."""
    counted = torch.where(legal, logits, 0.0)
    mean = counted.sum(-1, keepdim=True) / legal.sum(-1, keepdim=True).clamp(min=1)
    return counted - mean


def _share(condition: Tensor, among: Tensor) -> float:
    return (condition & among).sum().item() / max(1, among.sum().item())


def _percent(condition: Tensor) -> str:
    return f"{condition.double().mean().item():.0%}"
