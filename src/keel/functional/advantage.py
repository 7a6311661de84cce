"""Advantages: GAE over steps and over tokens, n-step returns, group baselines, normalization.

One rule covers autoreset rows, dead agents, prompts, tool text and padding, the **mask law**: a
row with weight 0 does not exist. Inserting such rows anywhere, with any content, changes nothing
for the others. A reward must therefore stand on a row that counts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.errors import InputError, ShapeError, check_choice, expect_rank, expect_same, expect_shape
from keel.functional.reduce import group_max, group_mean, group_median_and_iqr, group_moments

Normalization = Literal["none", "batch", "global", "group", "robust"]


class Advantages(NamedTuple):
    """Advantages for the actor and value targets for the critic, both shaped like the rewards."""

    advantage: Tensor
    """0 on rows that do not count."""
    target: Tensor
    """advantage + value: the critic's target; 0 on rows that do not count."""


class Normalized(NamedTuple):
    """Normalized advantages, with the shift, the scale and the signs that changed."""

    advantage: Tensor
    sign_flips: Tensor
    """0-d: how many advantages changed their sign, that is, were turned against their action."""
    center: Tensor
    """[G]: what was subtracted."""
    scale: Tensor
    """[G]: what was divided by."""


def gae(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_value: Tensor | None = None,
    *,
    gamma: float = 0.99,
    lam: float | Tensor = 0.95,
    weight: Tensor | None = None,
) -> Advantages:
    """Compute generalised advantage estimates (Schulman et al. 2016, arXiv 1506.02438).

        δ_t = r_t + γ v'_t − V(s_t)
        A_t = δ_t + γ λ (1 − done_t) A_{t+1}

    where `v'_t` is 0 after termination, the value of the *final* observation after truncation, and
    `V(s_{t+1})` otherwise: running out of time is not the same as failing.

    Args:
        reward: `[T, *lead]`.
        value: `[T, *lead]`, of the observation before each step.
        last_value: `[*lead]`, the value of the observation after the last row.
        terminated: `[T, *lead]`; a row that is also truncated counts as terminated.
        truncated: `[T, *lead]`.
        final_value: `[T, *lead]`, read only where `truncated`; goes with `truncated`.
        gamma: discount factor γ.
        lam: one for all, or `[T, *lead]`: of zeros and ones, drawn with chance λ, and with values
            that are drawn as well, the target is a sample of the return (SR(λ), arXiv 2105.11366).
        weight: `[T, *lead]`, 0 for rows that do not count (the mask law above).
    """
    expect_rank("reward", reward, 1, "[T, *lead]")
    valid = _check_steps(reward, value, last_value, terminated, truncated, final_value, weight)
    following = _following(value, last_value, valid)
    bootstrap, done = _bootstrap(following, terminated, truncated, final_value)
    delta = reward + gamma * bootstrap - value
    decay = gamma * lam * (~done).to(delta.dtype)
    if valid is None:
        advantage = _reverse_scan(decay, delta)
        return Advantages(advantage, advantage + value)
    # A row that does not count hands its successor's advantage on, untouched.
    decay = torch.where(valid, decay, 1.0)
    advantage = _reverse_scan(decay, torch.where(valid, delta, 0.0))
    return Advantages(
        torch.where(valid, advantage, 0.0), torch.where(valid, advantage + value, 0.0)
    )


def token_gae(
    reward: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_value: Tensor | None = None,
) -> Advantages:
    """Compute GAE along the tokens of sequences, skipping tokens that the policy did not write.

    Each sequence ends after its last policy token. Tokens with weight 0 (prompt, tool text,
    padding) obey the mask law.

    Args:
        reward: `[B, L]`.
        value: `[B, L]`, before each token.
        weight: `[B, L]`, the response mask: 0 for tokens that the policy did not write.
        gamma: discount factor γ.
        lam: λ of GAE.
        last_value: `[B]`, bootstraps sequences that were cut off; 0 by default.
    """
    if reward.ndim != 2:
        raise ShapeError(f"reward: expected [B, L], got shape {list(reward.shape)}")
    expect_same("reward", tuple(reward.shape), value=value, weight=weight)
    end = torch.zeros_like(value[:, 0]) if last_value is None else last_value
    never = torch.zeros_like(reward, dtype=torch.bool)
    result = gae(
        reward.T, value.T, end, never.T, gamma=gamma, lam=lam, weight=weight.T
    )  # time is the first axis of `gae`
    return Advantages(result.advantage.T, result.target.T)


def n_step(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_value: Tensor | None = None,
    *,
    n: int = 5,
    gamma: float = 0.99,
    weight: Tensor | None = None,
) -> Advantages:
    """Compute n-step returns (Sutton and Barto 2018, §7.1), cut at episode ends and the last row.

        G_t = r_t + γ r_{t+1} + … + γⁿ⁻¹ r_{t+n-1} + γⁿ V(s_{t+n})

    The target is G and the advantage G − V(s_t).

    Args:
        reward: `[T, *lead]`.
        value: `[T, *lead]`, of the observation before each step.
        last_value: `[*lead]`, the value of the observation after the last row.
        terminated: `[T, *lead]`; a row that is also truncated counts as terminated.
        truncated: `[T, *lead]`.
        final_value: `[T, *lead]`, read only where `truncated`; goes with `truncated`.
        n: number of rewards before the bootstrap, at least 1.
        gamma: discount factor γ.
        weight: `[T, *lead]`, 0 for rows that do not count (the mask law above).
    """
    if n < 1:
        raise InputError(f"n: expected at least 1, got {n}")
    expect_rank("reward", reward, 1, "[T, *lead]")
    valid = _check_steps(reward, value, last_value, terminated, truncated, final_value, weight)
    estimate = value
    for _ in range(min(n, reward.shape[0])):
        following = _following(estimate, last_value, valid)
        bootstrap, _ = _bootstrap(following, terminated, truncated, final_value)
        estimate = reward + gamma * bootstrap
    if valid is None:
        return Advantages(estimate - value, estimate)
    return Advantages(torch.where(valid, estimate - value, 0.0), torch.where(valid, estimate, 0.0))


def reward_to_go(
    reward: Tensor,
    terminated: Tensor,
    *,
    gamma: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the discounted sum of this and all later rewards of the episode, `[T, *lead]`.

    Args:
        reward: `[T, *lead]`.
        terminated: `[T, *lead]`.
        gamma: discount factor γ.
        weight: `[T, *lead]`, 0 for rows that do not count (the mask law above).
    """
    expect_rank("reward", reward, 1, "[T, *lead]")
    nothing = torch.zeros_like(reward)
    return gae(
        reward, nothing, nothing[0], terminated, gamma=gamma, lam=1.0, weight=weight
    ).advantage


def grpo(score: Tensor, group: Tensor, groups: int, *, weight: Tensor | None = None) -> Tensor:
    """Compute group-relative advantages (DeepSeekMath 2024, arXiv 2402.03300).

        A = (r − mean of the group) / standard deviation of the group

    A group of one, or of equal scores, carries no information and gets zeros.

    Args:
        score: `[B]`, the reward r of each completion.
        group: `[B]`, integers from 0 to `groups` − 1.
        groups: number of groups.
        weight: `[B]`; a row of weight 0 (its reward failed, say) gets 0 and does not exist for the
            others.
    """
    return normalize(score, "group", weight=weight, group=group, groups=groups).advantage


def dr_grpo(score: Tensor, group: Tensor, groups: int, *, weight: Tensor | None = None) -> Tensor:
    """Subtract the mean of the group, undivided: A = r − mean (Dr.GRPO 2025, arXiv 2503.20783).

    Without the division by the standard deviation there is no bias by difficulty.

    Args:
        score: `[B]`, the reward r of each completion.
        group: `[B]`, integers from 0 to `groups` − 1.
        groups: number of groups.
        weight: `[B]`; a row of weight 0 gets 0 and does not exist for the others.
    """
    expect_same("score", tuple(score.shape), group=group, weight=weight)
    valid = _counted(score, weight)
    mean, _ = group_mean(score, group, groups, valid)
    return torch.where(valid, score - mean[group], 0.0)


def rloo(score: Tensor, group: Tensor, groups: int, *, weight: Tensor | None = None) -> Tensor:
    """Subtract the mean of the *others* of the group (RLOO 2024, arXiv 2402.14740).

    Equal to n/(n−1) · (r − mean): the baseline is independent of the sample, hence unbiased. A
    group of one has no others, is its own mean, and gets 0.

    Args:
        score: `[B]`, the reward r of each completion.
        group: `[B]`, integers from 0 to `groups` − 1.
        groups: number of groups.
        weight: `[B]`; a row of weight 0 gets 0 and does not exist for the others.
    """
    expect_same("score", tuple(score.shape), group=group, weight=weight)
    valid = _counted(score, weight)
    mean, count = group_mean(score, group, groups, valid)
    factor = count / (count - 1).clamp(min=1)
    return torch.where(valid, (score - mean[group]) * factor[group], 0.0)


def _counted(score: Tensor, weight: Tensor | None) -> Tensor:
    return torch.ones_like(score, dtype=torch.bool) if weight is None else weight > 0


def reinforce_pp(score: Tensor, group: Tensor | None = None, groups: int = 1) -> Tensor:
    """Normalize scores over the whole batch, not per group (REINFORCE++ 2025, arXiv 2501.03262).

    Args:
        score: `[B]`, the reward of each completion.
        group: `[B]`, integers from 0 to `groups` − 1; its mean is subtracted first (the paper's
            "baseline" variant). None leaves that out.
        groups: number of groups.
    """
    centred = score if group is None else dr_grpo(score, group, groups)
    return normalize(centred, "batch").advantage


def normalize(
    advantage: Tensor,
    method: Normalization = "batch",
    *,
    weight: Tensor | None = None,
    group: Tensor | None = None,
    groups: int = 1,
    floor: float = 1e-8,
    clamp: float | None = None,
) -> Normalized:
    """Center and scale advantages over the rows that count.

    * `none`: leave them; `clamp` still applies.
    * `batch` (alias `global`): (A − mean) / std over all rows, with Bessel's n − 1.
    * `group`: the same within each group of `group`.
    * `robust`: (A − median) / IQR, within groups if `group` is given. Where the IQR vanishes though
      the values differ (more than half of them equal), the standard deviation takes its place.

    A batch (or group) of one row, or of equal rows, becomes zeros.

    Args:
        advantage: `[*lead]`.
        method: one of the methods above.
        weight: `[*lead]`; rows of weight 0 become 0 and touch nothing.
        group: `[*lead]`, integers from 0 to `groups` − 1.
        groups: number of groups G.
        floor: lower bound of the scale.
        clamp: bound on the size of the result; None for none.
    """
    check_choice("method", method, ("none", "batch", "global", "group", "robust"))
    expect_same("advantage", tuple(advantage.shape), weight=weight, group=group)
    if method == "group" and group is None:
        raise InputError("group: method 'group' needs the group of every row")
    flat = advantage.reshape(-1)
    valid = torch.ones_like(flat, dtype=torch.bool) if weight is None else weight.reshape(-1) > 0
    flat = torch.where(valid, flat, 0.0)
    if method == "none":
        center, scale = flat.new_zeros(1), flat.new_ones(1)
        result = flat
    else:
        by_group = group is not None and method != "batch" and method != "global"
        keys = torch.zeros_like(valid, dtype=torch.long)
        if group is not None and by_group:
            keys = torch.where(valid, group.reshape(-1), 0)
        count = groups if by_group else 1
        center, spread = group_moments(flat, valid, keys, count)
        # Rounding leaves a spread of a few ulps where all values are equal: that is still zero.
        noise = 4 * torch.finfo(flat.dtype).eps * group_max(flat.abs(), keys, count)
        informative = ~(spread <= noise)  # a NaN is not silenced into zeros
        if method == "robust":
            center, iqr = group_median_and_iqr(flat, valid, keys, count)
            spread = torch.where(iqr > noise, iqr, spread)
        scale = spread.clamp(min=floor)
        scaled = (flat - center[keys]) / torch.where(scale < torch.inf, scale, torch.nan)[keys]
        result = torch.where(valid & informative[keys], scaled, 0.0)
    if clamp is not None:
        result = result.clamp(-clamp, clamp)
    flips = (flat * result < 0).sum()
    return Normalized(result.reshape(advantage.shape), flips, center, scale)


def _check_steps(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    final_value: Tensor | None,
    weight: Tensor | None,
) -> Tensor | None:
    """Check the shapes shared by `gae` and `n_step`; return the rows that count, None for all."""
    shape = tuple(reward.shape)
    expect_same(
        "reward",
        shape,
        value=value,
        terminated=terminated,
        truncated=truncated,
        final_value=final_value,
        weight=weight,
    )
    expect_shape("last_value", last_value, shape[1:], "one row of reward")
    if (truncated is None) != (final_value is None):
        raise InputError(
            "truncated and final_value go together: a truncated episode is bootstrapped "
            "from the value of its final observation"
        )
    return None if weight is None else weight > 0


def _following(value: Tensor, last_value: Tensor, valid: Tensor | None) -> Tensor:
    """Return for each row the value of the next row that counts, or `last_value` after the last."""
    extended = torch.cat([value, last_value[None]])
    if valid is None:
        return extended[1:]
    steps = value.shape[0]
    row = torch.arange(steps, device=value.device).reshape(-1, *[1] * (value.ndim - 1))
    position = torch.where(valid, row, steps)
    later = torch.cat([position[1:], torch.full_like(position[:1], steps)])
    index = later.flip(0).cummin(0).values.flip(0)
    return extended.gather(0, index)


def _bootstrap(
    following: Tensor, terminated: Tensor, truncated: Tensor | None, final_value: Tensor | None
) -> tuple[Tensor, Tensor]:
    """v' of `gae`, and which rows end an episode."""
    ended = terminated.bool()
    done = ended
    if truncated is not None and final_value is not None:
        following = torch.where(truncated.bool(), final_value, following)
        done = ended | truncated.bool()
    return torch.where(ended, 0.0, following), done


def _reverse_scan(decay: Tensor, term: Tensor) -> Tensor:
    """Solve y_t = term_t + decay_t · y_{t+1} with y_T = 0 along axis 0.

    Doubling (Hillis and Steele 1986): log₂ T vectorised rounds in place of T Python steps. Each
    round composes the affine maps of windows of length `width`; for 128 rows that is 7 rounds,
    and `torch.compile` sees a small graph.
    """
    width = 1
    while width < term.shape[0]:
        term = torch.cat([term[:-width] + decay[:-width] * term[width:], term[-width:]])
        decay = torch.cat([decay[:-width] * decay[width:], decay[-width:]])
        width *= 2
    return term
