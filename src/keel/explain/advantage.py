"""`keel explain advantage`: GAE on a trajectory you can follow by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from keel.errors import InputError, check_choice
from keel.explain.explanation import Explanation, make_table, number, texts_of
from keel.explain.inputs import check_finite, check_same_length
from keel.functional import gae, normalize
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

End = Literal["terminated", "truncated", "running"]

COLUMNS = ("t", "reward", "value", "δ", "advantage", "normalized", "robust")


def explain_advantage(
    rewards: Sequence[float] = (0.0, 0.0, 1.0, 0.0, 2.0),
    values: Sequence[float] = (0.8, 0.9, 1.2, 0.9, 1.1),
    *,
    last_value: float = 1.0,
    gamma: float = 0.99,
    lam: float = 0.95,
    end: End = "terminated",
) -> Explanation:
    """Explain GAE on one trajectory.

    Args:
        rewards: of every step `[T]`.
        values: the critic's value of every observation `[T]`.
        last_value: the critic's value of the observation after the last step.
        gamma: discount.
        lam: λ of GAE.
        end: whether the episode is terminated, truncated or running after the last step.

    Examples:
        >>> explain_advantage((1.0,), (0.4,)).numbers["advantages"] == [1.0 - 0.4]
        True
    """
    _check(rewards, values, last_value, gamma, lam, end)
    reward, value = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values))

    def advantages(trace: float) -> Tensor:
        return _gae(reward, value, last_value, end, gamma, trace)

    delta, advantage = advantages(0.0), advantages(lam)
    normalized = normalize(advantage)
    robust = normalize(advantage, "robust")
    columns = (reward, value, delta, advantage, normalized.advantage, robust.advantage)
    steps = torch.stack(columns, 1).tolist()
    settings = f"γ = {gamma:g}, λ = {lam:g}; the episode is {end} after the last step"
    first, flips = advantage[0].item(), int(normalized.sign_flips)
    return Explanation(
        f"Advantages over {len(rewards)} step{'s' * (len(rewards) > 1)}, {end}",
        *texts_of("advantage"),
        tables=(make_table(settings, COLUMNS, [(str(t), *x) for t, x in enumerate(steps)]),),
        meaning=(
            f"The first step is {'better' if first >= 0.0 else 'worse'} than expected by "
            f"{abs(first):.4f}. Normalizing centres on "
            f"{number(normalized.center.item(), 4)} and turns {flips} of {len(rewards)} "
            "advantages against their action."
        ),
        numbers={
            "deltas": delta.tolist(),
            "advantages": advantage.tolist(),
            "targets": (advantage + value).tolist(),
            "normalized": normalized.advantage.tolist(),
            "robust": robust.advantage.tolist(),
            "sign_flips": flips,
        },
        draw=lambda figure: _draw(
            figure, reward, value, {0.0: delta, lam: advantage, 1.0: advantages(1.0)}
        ),
    )


def _check(
    rewards: Sequence[float],
    values: Sequence[float],
    last_value: float,
    gamma: float,
    lam: float,
    end: End,
) -> None:
    check_same_length("rewards", rewards, "values", values)
    if not rewards:
        raise InputError("rewards: empty; a trajectory needs at least one step")
    check_finite(last_value=last_value, **{f"rewards[{i}]": x for i, x in enumerate(rewards)})
    check_finite(**{f"values[{i}]": x for i, x in enumerate(values)})
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= share <= 1.0:
            raise InputError(f"{name}: expected a number from 0 to 1, got {share:g}")
    check_choice("end", end, ("terminated", "truncated", "running"))


def _gae(
    reward: Tensor, value: Tensor, last_value: float, end: End, gamma: float, lam: float
) -> Tensor:
    last = torch.tensor([last_value], dtype=torch.float64)
    at_end = torch.zeros_like(reward, dtype=torch.bool)[:, None]
    at_end[-1] = True
    return gae(
        reward[:, None],
        value[:, None],
        last,
        at_end & (end == "terminated"),
        at_end & (end == "truncated"),
        last.expand(reward.shape[0], 1),
        gamma=gamma,
        lam=lam,
    ).advantage[:, 0]


def _draw(figure: Figure, reward: Tensor, value: Tensor, by_lambda: dict[float, Tensor]) -> None:
    left, right = figure.subplots(1, 2)
    steps = list(range(reward.shape[0]))
    left.bar(steps, reward.tolist(), 0.6, color=GREEN, label="reward")
    left.plot(steps, value.tolist(), "o-", color=BLUE, label="value")
    left.legend(frameon=False, fontsize=9)
    tidy(left, "What happened, what was expected", "step", "")
    colors = (GREY, BLUE, ORANGE)
    for color, (lam, advantage) in zip(colors, by_lambda.items(), strict=False):
        right.plot(steps, advantage.tolist(), "o-", color=color, label=f"λ = {lam:g}")
    right.axhline(0.0, color=INK, linewidth=0.8)
    right.legend(frameon=False, fontsize=9)
    tidy(right, "The advantage by λ", "step", "advantage")
    for axes in (left, right):
        axes.set_xticks(steps)
