"""`keel explain landscape`: reward pulls a policy up, the KL penalty holds it like a spring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.errors import InputError
from keel.explain.explanation import Explanation, Table, make_table, number, texts_of
from keel.explain.figures import legend_below
from keel.explain.inputs import check_names, check_positive
from keel.explain.penalty import optimal_policy, read_rewards
from keel.functional import categorical_kl
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACTIONS = 3
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3.0) / 2.0))
"""Positions of the policies that always take one action."""
RESOLUTION = 120


def explain_landscape(
    reference: Sequence[float] = (0.3, 0.4, 0.3),
    rewards: Sequence[float] = (1.0, 0.0, 0.5),
    *,
    beta: float = 0.5,
    names: Sequence[str] | None = None,
) -> Explanation:
    """Explain E[reward] − β·KL(π‖π_ref) as a landscape over the policies of three actions.

    Args:
        reference: The reference policy `[3]`.
        rewards: The reward of each action `[3]`.
        beta: The price of a nat, and the stiffness of the spring.
        names: Names of the actions `[3]`.

    Examples:
        >>> round(explain_landscape(beta=0.5).numbers["kl_nats"], 4)
        0.2961
    """
    log_ref, reward = read_rewards(reference, rewards)
    if len(reference) != ACTIONS:
        raise InputError(f"landscape: expected {ACTIONS} actions, got {len(reference)}")
    check_positive("beta", beta)
    labels = check_names(names, ACTIONS, "actions")
    best = optimal_policy(log_ref, reward, beta)
    kl, expected = categorical_kl(best, log_ref).item(), (best.exp() @ reward).item()
    start = (log_ref.exp() @ reward).item()
    pull, spring = _forces(best, log_ref, reward, beta)
    pull_at_start, _ = _forces(log_ref, log_ref, reward, beta)
    return Explanation(
        f"Reward pulls, the spring holds: they balance at {number(kl, 3)} nats",
        *texts_of("landscape"),
        tables=(
            _force_table(beta, labels, pull_at_start, pull, spring),
            make_table(
                "Where it rests",
                ("", "at π_ref", "at π*"),
                (
                    ("expected reward", start, expected),
                    ("KL(π‖π_ref), nats", 0.0, kl),
                    ("reward − β·KL", start, expected - beta * kl),
                ),
            ),
        ),
        meaning=_meaning(start, expected, kl, beta),
        numbers={
            "policy": dict(zip(labels, best.exp().tolist(), strict=True)),
            "kl_nats": kl,
            "reward_at_reference": start,
            "reward": expected,
            "objective": expected - beta * kl,
            "pull": pull.tolist(),
            "spring": spring.tolist(),
        },
        draw=lambda figure: _draw(figure, log_ref, reward, beta, labels),
    )


def _force_table(
    beta: float, labels: Sequence[str], pull_at_start: Tensor, pull: Tensor, spring: Tensor
) -> Table:
    together = (pull + spring).round(decimals=9) + 0.0
    forces = torch.stack([pull_at_start, pull, spring, together], 1).tolist()
    return make_table(
        f"Forces on each logit, β = {beta:g}",
        ("action", "pull at π_ref", "pull at π*", "spring at π*", "together"),
        [(name, *row) for name, row in zip(labels, forces, strict=True)],
    )


def _forces(
    log_prob: Tensor, log_ref: Tensor, reward: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of E[reward] and of −β·KL(π‖π_ref) in the logits, `[3]` each."""
    p, drift = log_prob.exp(), log_prob - log_ref
    return p * (reward - p @ reward), -beta * p * (drift - p @ drift)


def _meaning(start: float, expected: float, kl: float, beta: float) -> str:
    if kl < 1e-12:
        return "All rewards are the same: nothing pulls, and the policy stays with its reference."
    return (
        f"From the reference the reward rises by {expected - start:.4f}, of which the spring takes "
        f"{beta * kl:.4f} back. A stiffer spring (a larger β) rests nearer to the reference; "
        "without one the policy would end in the corner of the best action."
    )


def _draw(
    figure: Figure, log_ref: Tensor, reward: Tensor, beta: float, labels: Sequence[str]
) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.0))
    spread = max((reward.max() - reward.min()).item(), 1e-3)
    betas = torch.logspace(math.log10(0.02 * spread), math.log10(100.0 * spread), 300).tolist()
    path = torch.stack([optimal_policy(log_ref, reward, value) for value in betas])
    _draw_map(left, log_ref, reward, beta, labels, path)
    kl = categorical_kl(path, log_ref.expand_as(path))
    gain = path.exp() @ reward - log_ref.exp() @ reward
    right.plot(kl, gain, color=BLUE, linewidth=2.2, label="reward gained: the pull")
    right.plot(kl, beta * kl, color=ORANGE, linewidth=2.2, label="β·KL: the spring")
    right.plot(kl, gain - beta * kl, color=GREEN, linewidth=2.2, label="what is left")
    best = optimal_policy(log_ref, reward, beta)
    rest = categorical_kl(best, log_ref).item()
    right.axvline(rest, color=GREY, linestyle="--", label="π*: both slopes are β")
    tidy(right, "Along the path", "KL(π‖π_ref), nats", "reward")
    legend_below(figure, left, right)


def _draw_map(
    axes: Axes, log_ref: Tensor, reward: Tensor, beta: float, labels: Sequence[str], path: Tensor
) -> None:
    """Draw the triangle of policies: height lines of the reward, rings of the same KL, the path."""
    policies = _grid()
    position = policies @ torch.tensor(CORNERS, dtype=torch.float64)
    x, y = position[:, 0].numpy(), position[:, 1].numpy()
    height = (policies @ reward).numpy()
    low, high = reward.min().item(), reward.max().item()
    if high > low:
        lightest_to_mid_blue = {"vmin": low, "vmax": high + 0.6 * (high - low)}
        axes.tricontourf(x, y, height, levels=9, cmap="Blues", **lightest_to_mid_blue)
    kl = categorical_kl(policies.log(), log_ref.expand_as(policies))
    best = optimal_policy(log_ref, reward, beta)
    rest = categorical_kl(best, log_ref).item()
    if rest > 1e-9:
        rings = [rest / 4.0, rest]
        axes.tricontour(x, y, kl.numpy(), levels=rings, colors=ORANGE, linewidths=1.3)
        axes.plot([], [], color=ORANGE, linewidth=1.3, label="the same KL")
    for log_prob, style, color, size, label in (
        (path, "-", GREEN, 0, "π* for every β"),
        (log_ref[None], "o", INK, 9, "π_ref"),
        (best[None], "*", GREEN, 16, f"π* at β = {beta:g}"),
    ):
        point = log_prob.exp() @ torch.tensor(CORNERS, dtype=torch.float64)
        axes.plot(point[:, 0], point[:, 1], style, color=color, markersize=size, linewidth=2.2,
                  label=label)  # fmt: skip
    for (corner_x, corner_y), name, value in zip(CORNERS, labels, reward.tolist(), strict=True):
        below = corner_y == 0.0
        text = f"{name}, reward {value:g}"
        axes.text(corner_x, corner_y + (-0.04 if below else 0.03), text, ha="center", fontsize=9,
                  va="top" if below else "bottom", color=INK)  # fmt: skip
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-0.2, 1.2)
    axes.set_ylim(-0.12, 1.0)
    axes.set_title("The landscape: dark is high reward", fontsize=10.5, color=INK)


def _grid() -> Tensor:
    """Return policies of three actions, evenly spread `[N, 3]`, none of them with a 0."""
    steps = torch.arange(RESOLUTION + 1, dtype=torch.float64) / RESOLUTION
    a, b = torch.meshgrid(steps, steps, indexing="ij")
    inside = a + b <= 1.0 + 1e-9
    a, b = a[inside], b[inside]
    policies = torch.stack([a, b, 1.0 - a - b], -1).clamp(min=1e-9)
    return policies / policies.sum(-1, keepdim=True)
