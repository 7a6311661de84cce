"""`keel explain penalty`: reward minus β·KL, and the policy it asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.errors import InputError
from keel.explain.explanation import Explanation, Table, make_table, number, texts_of
from keel.explain.inputs import (
    check_finite,
    check_names,
    check_positive,
    check_probabilities,
    check_same_length,
)
from keel.functional import categorical_kl, kl_reward
from keel.look import BLUE, GREEN, GREY, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def explain_penalty(
    reference_probability: float = 0.3,
    probability: float = 0.6,
    *,
    beta: float = 0.1,
    reward: float = 1.0,
    reference: Sequence[float] = (0.3, 0.4, 0.3),
    rewards: Sequence[float] = (1.0, 0.0, 0.5),
    names: Sequence[str] | None = None,
) -> Explanation:
    """Explain the KL penalty: on one sampled action, and on the best policy it allows.

    Args:
        reference_probability: of the sampled action under the reference.
        probability: of the sampled action under the policy.
        beta: price of a nat.
        reward: of the sampled action.
        reference: reference policy `[A]` of the second example.
        rewards: of its actions `[A]`.
        names: of its actions `[A]`.

    Examples:
        >>> round(explain_penalty(0.3, 0.6, beta=0.1).numbers["penalised_reward"], 3)
        0.931
    """
    _check_shares(reference=reference_probability, probability=probability)
    check_positive("beta", beta)
    check_finite(reward=reward)
    log_ref, score = read_rewards(reference, rewards)
    labels = check_names(names, len(reference))
    probabilities = torch.tensor([probability, reference_probability], dtype=torch.float64)
    drift = kl_reward("k1", *probabilities.log()).item()
    shaped = reward - beta * drift
    best = optimal_policy(log_ref, score, beta)
    expected, kl = (best.exp() @ score).item(), categorical_kl(best, log_ref).item()
    policy = best.exp().tolist()
    return Explanation(
        f"Reward {reward:g} − β·KL becomes {number(shaped, 3)}",
        *texts_of("penalty"),
        tables=(
            _sample_table(reference_probability, probability, drift, beta, reward),
            make_table(
                f"The best policy at β = {beta:g}: π* ∝ π_ref · exp(reward / β)",
                ("action", "reward", "π_ref", "π*"),
                zip(labels, (number(x, 3) for x in rewards), reference, policy, strict=True),
            ),
        ),
        meaning=_meaning(drift, beta, expected, kl),
        numbers={
            "k1": drift,
            "beta": beta,
            "reward": reward,
            "penalised_reward": shaped,
            "optimal_policy": dict(zip(labels, policy, strict=True)),
            "optimal_reward": expected,
            "optimal_kl_nats": kl,
        },
        draw=lambda figure: _draw(figure, log_ref, score, beta, labels),
    )


def _check_shares(**values: float) -> None:
    for name, x in values.items():
        if not 0.0 < x <= 1.0:
            raise InputError(f"{name}: expected a probability above 0 and at most 1, got {x:g}")


def read_rewards(reference: Sequence[float], rewards: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of a reference policy and the rewards of its actions, checked.

    Args:
        reference: Probabilities `[A]`.
        rewards: Of the same actions `[A]`.
    """
    check_probabilities("reference policy", reference)
    check_same_length("reference policy", reference, "rewards", rewards)
    if min(reference) <= 0.0:
        raise InputError("reference policy: every action needs some probability, or KL is infinite")
    check_finite(**{f"rewards[{i}]": value for i, value in enumerate(rewards)})
    log_ref = torch.tensor(reference, dtype=torch.float64).log()
    return log_ref, torch.tensor(rewards, dtype=torch.float64)


def optimal_policy(log_ref: Tensor, reward: Tensor, beta: float) -> Tensor:
    """Return log π* of max E_π[reward] − β KL(π‖π_ref): a Gibbs distribution of temperature β.

    Args:
        log_ref: Log-probabilities of the reference policy `[A]`.
        reward: Of each action `[A]`.
        beta: The price of a nat.
    """
    return (log_ref + reward / beta).log_softmax(-1)


def _sample_table(
    reference: float, probability: float, drift: float, beta: float, reward: float
) -> Table:
    rows = (
        ("probability under the reference", reference),
        ("probability under the policy", probability),
        ("k1 = log π − log π_ref", drift),
        (f"β·k1 with β = {beta:g}", beta * drift),
        ("reward before", reward),
        ("reward after", reward - beta * drift),
    )
    return make_table("One sampled action", ("", ""), rows)


def _meaning(drift: float, beta: float, expected: float, kl: float) -> str:
    if drift > 0:
        change = f"{math.exp(drift):.3g} times likelier than under the reference, so it is charged"
    elif drift < 0:
        change = f"{math.exp(-drift):.3g} times rarer than under the reference, so it is paid"
    else:
        change = "as likely as under the reference, so it is charged"
    return (
        f"The action is {change} {abs(beta * drift):.4f}. Followed to its end, β = {beta:g} buys "
        f"an expected reward of {expected:.4f} for {kl:.4f} nats from the reference."
    )


def _draw(
    figure: Figure, log_ref: Tensor, reward: Tensor, beta: float, labels: Sequence[str]
) -> None:
    left, right = figure.subplots(1, 2)
    spread = max((reward.max() - reward.min()).item(), 1e-3)
    temperatures = torch.logspace(
        math.log10(min(0.03 * spread, beta)), math.log10(max(10 * spread, beta)), 200
    ).double()
    policies = torch.stack([optimal_policy(log_ref, reward, t.item()) for t in temperatures])
    colors = (BLUE, ORANGE, GREEN, GREY)
    for index, name in enumerate(labels):
        share = policies[:, index].exp()
        left.plot(temperatures, share, color=colors[index % 4], linewidth=2, label=name)
    left.axvline(beta, color=GREY, linestyle="--", label=f"β = {beta:g}")
    left.set_xscale("log")
    left.legend(frameon=False, fontsize=9)
    tidy(left, "The policy each β asks for", "β, the temperature", "probability")
    kls = categorical_kl(policies, log_ref.expand_as(policies))
    right.plot(kls, policies.exp() @ reward, color=BLUE, linewidth=2)
    best = optimal_policy(log_ref, reward, beta)
    kl, gain = categorical_kl(best, log_ref).item(), (best.exp() @ reward).item()
    right.plot([kl], [gain], "o", color=ORANGE, markersize=8, label=f"β = {beta:g}")
    right.legend(frameon=False, fontsize=9)
    tidy(right, "What the nats buy", "KL(π*‖π_ref), nats", "expected reward")
