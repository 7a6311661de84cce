"""`keel explain states`: a trust region over several states, their KLs, and the average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.errors import InputError
from keel.explain.explanation import Explanation, Table, make_table, number, texts_of
from keel.explain.figures import legend_below
from keel.explain.inputs import check_names, check_positive, check_probabilities, check_same_length
from keel.functional import categorical_kl, walk_back
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _Update:
    """A step of a policy over S states, as logits.

    Attributes:
        states: Names of the states.
        actions: Names of the actions of each state.
        visits: Share of the visits of each state `[S]`.
        old: Logits before the step, `[A_s]` for each state.
        new: Logits that the step asks for.
    """

    states: list[str]
    actions: list[list[str]]
    visits: Tensor
    old: list[Tensor]
    new: list[Tensor]

    def at(self, share: float) -> list[Tensor]:
        """Return the logits after a share of the step."""
        return [a + share * (b - a) for a, b in zip(self.old, self.new, strict=True)]

    def kl(self, share: float) -> Tensor:
        """Return KL(old‖new) of each state after a share of the step `[S]`."""
        pairs = zip(self.old, self.at(share), strict=True)
        return torch.stack([categorical_kl(a, b) for a, b in pairs])


def explain_states(
    old: Sequence[Sequence[float]] = ((0.9, 0.1), (0.8, 0.2)),
    new: Sequence[Sequence[float]] = ((0.1, 0.9), (0.2, 0.8)),
    *,
    visits: Sequence[float] | None = None,
    max_kl: float = 0.01,
    states: Sequence[str] | None = None,
    names: Sequence[Sequence[str]] | None = None,
) -> Explanation:
    """Explain a bound on the average of KL(old‖new) over states.

    Args:
        old: The policy in each state before the update, S lists of `[A_s]` probabilities.
        new: The policy that the update asks for, likewise.
        visits: Share of the visits of each state `[S]`; by default all the same.
        max_kl: Largest average KL allowed, in nats.
        states: Names of the states `[S]`.
        names: Names of the actions in each state.

    Examples:
        >>> round(explain_states().numbers["mean_kl_nats"], 4)
        1.2948
    """
    check_positive("max-kl", max_kl)
    update = _read(old, new, visits, states, names)
    step = walk_back(lambda share: (update.visits @ update.kl(share.item())).reshape(1), max_kl)
    fraction = step.fraction.item()
    requested, kept_kl = update.kl(1.0), update.kl(fraction)
    mean, kept_mean = step.requested.item(), step.kl.item()
    numbers = torch.stack([update.visits, requested, kept_kl], 1)
    return Explanation(
        f"KL {number(mean, 4)} on average over states, {max_kl:g} allowed",
        *texts_of("states"),
        tables=(
            _policy_table(update, fraction),
            _state_table(update, requested, kept_kl, mean, kept_mean),
        ),
        meaning=_meaning(update, requested, mean, fraction, max_kl),
        numbers={
            "mean_kl_nats": mean,
            "largest_kl_nats": requested.max().item(),
            "max_kl": max_kl,
            "inside": mean <= max_kl,
            "fraction_kept": fraction,
            "mean_kl_kept_nats": kept_mean,
            "states": [
                {"name": name, "visits": w, "kl_nats": a, "kl_kept_nats": b}
                for name, (w, a, b) in zip(update.states, numbers.tolist(), strict=True)
            ],
        },
        draw=lambda figure: _draw(figure, update, fraction, max_kl),
    )


def _read(
    old: Sequence[Sequence[float]],
    new: Sequence[Sequence[float]],
    visits: Sequence[float] | None,
    states: Sequence[str] | None,
    names: Sequence[Sequence[str]] | None,
) -> _Update:
    """Check the input, and return it as tensors."""
    if not old:
        raise InputError("old: empty; expected the probabilities of at least one state")
    if len(old) != len(new):
        raise InputError(f"old and new: got {len(old)} and {len(new)} states")
    labels = [str(i + 1) for i in range(len(old))] if states is None else list(states)
    labels = check_names(labels, len(old), "states")
    for label, a, b in zip(labels, old, new, strict=True):
        check_probabilities(f"old, state {label}", a)
        check_probabilities(f"new, state {label}", b)
        check_same_length(f"old, state {label}", a, "new", b)
        if min(*a, *b) <= 0.0:
            raise InputError(f"state {label}: every action needs some probability in both policies")
    if names is not None and len(names) != len(old):
        raise InputError(f"names: got the actions of {len(names)} states for {len(old)}")
    actions = [
        check_names(None if names is None else names[i], len(a), f"actions of state {labels[i]}")
        for i, a in enumerate(old)
    ]
    shares = [1.0 / len(old)] * len(old) if visits is None else list(visits)
    check_probabilities("visits", shares)
    if len(shares) != len(old):
        raise InputError(f"visits: got {len(shares)} numbers for {len(old)} states")
    before, after = (
        [torch.tensor(x, dtype=torch.float64).log() for x in policy] for policy in (old, new)
    )
    return _Update(labels, actions, torch.tensor(shares, dtype=torch.float64), before, after)


def _policy_table(update: _Update, fraction: float) -> Table:
    rows = []
    policies = zip(
        update.states, update.actions, update.old, update.at(fraction), update.new, strict=True
    )
    for state, actions, *logits in policies:
        columns = [x.softmax(-1).tolist() for x in logits]
        for action, *values in zip(actions, *columns, strict=True):
            rows.append((state, action, *values))
    return make_table("The policies", ("state", "action", "old", "kept", "asked for"), rows)


def _state_table(
    update: _Update, requested: Tensor, kept_kl: Tensor, mean: float, left: float
) -> Table:
    visits = (number(w, 3) for w in update.visits.tolist())
    rows = zip(update.states, visits, requested.tolist(), kept_kl.tolist(), strict=True)
    average = ("average over visits", "1.000", mean, left)
    columns = ("state", "visits", "KL(old‖new) asked for", "kept")
    return make_table("The trust region, in nats", columns, [*rows, average], digits=5)


def _meaning(update: _Update, requested: Tensor, mean: float, fraction: float, bound: float) -> str:
    worst = update.states[int(requested.argmax())]
    largest_change = (
        f"The state that changes most is {worst!r}, by {number(requested.max().item(), 4)} nats."
    )
    if mean <= bound:
        share = f"{mean / bound:.0%}"
        return f"Inside: the update spends {share} of its KL budget and stands. {largest_change}"
    return (
        f"Outside: {mean / bound:.3g} times the bound. Keel keeps {fraction:.1%} of the step in "
        f"every state. {largest_change}"
    )


def _draw(figure: Figure, update: _Update, fraction: float, bound: float) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1.0))
    _draw_policies(left, update, fraction)
    _draw_kls(right, update, fraction, bound)
    legend_below(figure, left, right)


def _draw_policies(axes: Axes, update: _Update, fraction: float) -> None:
    ticks: list[tuple[float, str]] = []
    start = 0.0
    for state, actions in enumerate(update.actions):
        positions = [start + action for action in range(len(actions))]
        ticks += zip(positions, actions, strict=True)
        series = ((update.old, GREY, "old"), (update.at(fraction), BLUE, "kept"),
                  (update.new, ORANGE, "asked for"))  # fmt: skip
        for index, (logits, color, name) in enumerate(series):
            at = [x + 0.27 * (index - 1) for x in positions]
            label = name if state == 0 else None
            axes.bar(at, logits[state].softmax(-1).tolist(), 0.27, color=color, label=label)
        middle = sum(positions) / len(positions)
        axes.text(middle, 1.04, update.states[state], ha="center", color=INK)
        start = positions[-1] + 1.6
    axes.set_xticks([position for position, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(0.0, 1.15)
    tidy(axes, "What the policy does in each state", "", "probability").grid(False, axis="x")


def _draw_kls(axes: Axes, update: _Update, fraction: float, bound: float) -> None:
    """Draw the KL of each state and their average on a logarithmic axis, beside the bound."""
    names = [*update.states, "average"]
    kls = {}
    for share in (1.0, fraction):
        kl = update.kl(share)
        kls[share] = [*kl.tolist(), (update.visits @ kl).item()]
    positive = [x for values in kls.values() for x in values if x > 0.0]
    low = min([bound, *positive]) / 5.0
    for share, offset, color in ((fraction, 0.2, BLUE), (1.0, -0.2, ORANGE)):
        for position, value in enumerate(kls[share]):
            at = position + offset
            axes.barh(at, max(value - low, 0.0), 0.4, left=low, color=color)
            axes.text(max(value, low) * 1.2, at, number(value, 4), va="center", fontsize=9,
                      bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8})  # fmt: skip
    axes.axvspan(low, bound, color=GREEN, alpha=0.12, zorder=0, label="trust region")
    axes.axvline(bound, color=GREEN, linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xlim(low, max([bound, *positive]) * 6.0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    tidy(axes, "KL(old‖new) of each state", "nats", "").grid(False, axis="y")
