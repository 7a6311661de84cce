"""Topics of `keel explain` about policy updates: clip, penalty, trust region, advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from keel.cli.explain_output import Answer, Output, split_names

if TYPE_CHECKING:
    from keel.explain import Explanation


@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate on one sample.

    Example: keel explain clip --ratio 2.0 --advantage 1 --clip 0.2
    """

    ratio: float = 2.0
    """Probability of the action under the new policy over that under the old."""
    advantage: float = 1.0
    """Advantage of the action: its return minus the expected one."""
    clip: float = 0.2
    """ε: the ratio is clipped to 1 − ε … 1 + ε."""
    clip_high: float | None = None
    """Another ε for the upper side (clip-higher)."""
    dual: float | None = None
    """Dual clip: for A < 0, no loss above −dual·A."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_clip

        return explain_clip(
            self.ratio, self.advantage, low=self.clip, high=self.clip_high, dual=self.dual
        )


@dataclass(frozen=True)
class Penalty:
    """The KL penalty in the reward, and the policy that it asks for.

    Example: keel explain penalty --reference 0.3 --probability 0.6 --beta 0.1
    """

    reference: float = 0.3
    """Probability of the sampled action under the reference policy."""
    probability: float = 0.6
    """Its probability under the policy that is trained."""
    beta: float = 0.1
    """β: the price of a nat, in units of reward."""
    reward: float = 1.0
    """The reward before the penalty."""
    policy: str = "0.3,0.4,0.3"
    """A whole reference policy, for the best policy at this β."""
    rewards: str = "1,0,0.5"
    """The reward of each of its actions."""
    names: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the actions."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_penalty
        from keel.explain.inputs import parse_numbers

        return explain_penalty(
            self.reference,
            self.probability,
            beta=self.beta,
            reward=self.reward,
            reference=parse_numbers("policy", self.policy),
            rewards=parse_numbers("rewards", self.rewards),
            names=split_names(self.names),
        )


@dataclass(frozen=True)
class Landscape:
    """The KL penalty as a landscape: the reward pulls a policy, a spring holds it.

    Example: keel explain landscape --beta 0.5 --names search,think,answer
    """

    policy: str = "0.3,0.4,0.3"
    """The reference policy over three actions."""
    rewards: str = "1,0,0.5"
    """The reward of each action."""
    beta: float = 0.5
    """β: the price of a nat, in units of reward; the stiffness of the spring."""
    names: Annotated[str | None, arg(metavar="A,B,C")] = None
    """Names of the actions."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_landscape
        from keel.explain.inputs import parse_numbers

        return explain_landscape(
            parse_numbers("policy", self.policy),
            parse_numbers("rewards", self.rewards),
            beta=self.beta,
            names=split_names(self.names),
        )


@dataclass(frozen=True)
class TrustRegion:
    """A bound on KL(old‖new), and how much of a step it lets you keep.

    Example: keel explain trust-region --old 0.4,0.3,0.2,0.1 --new 0.8,0.1,0.05,0.05
    """

    old: str = "0.4,0.3,0.2,0.1"
    """The policy before the update."""
    new: str = "0.45,0.35,0.15,0.05"
    """The policy that the update asks for."""
    max_kl: float = 0.01
    """δ: the largest KL(old‖new) allowed, in nats."""
    names: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the actions."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_trust_region
        from keel.explain.inputs import parse_numbers

        return explain_trust_region(
            parse_numbers("old", self.old),
            parse_numbers("new", self.new),
            max_kl=self.max_kl,
            names=split_names(self.names),
        )


@dataclass(frozen=True)
class States:
    """A trust region over several states: the KL of each, and their average.

    Example: keel explain states --old 0.9,0.1 0.8,0.2 --new 0.92,0.08 0.83,0.17
    """

    old: Annotated[tuple[str, ...], arg(metavar="PROBABILITIES")] = ("0.9,0.1", "0.8,0.2")
    """The policy before the update: one comma-separated list per state."""
    new: Annotated[tuple[str, ...], arg(metavar="PROBABILITIES")] = ("0.1,0.9", "0.2,0.8")
    """The policy that the update asks for, likewise."""
    visits: Annotated[str | None, arg(metavar="W,W,…")] = None
    """Share of the visits of each state; by default all the same."""
    max_kl: float = 0.01
    """δ: the largest average of KL(old‖new) allowed, in nats."""
    states: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the states."""
    names: Annotated[tuple[str, ...] | None, arg(metavar="A,B,…")] = None
    """Names of the actions: one comma-separated list per state."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_states
        from keel.explain.inputs import parse_numbers

        old, new = (
            [parse_numbers(f"{name}, state {i + 1}", text) for i, text in enumerate(lists)]
            for name, lists in (("old", self.old), ("new", self.new))
        )
        return explain_states(
            old,
            new,
            visits=None if self.visits is None else parse_numbers("visits", self.visits),
            max_kl=self.max_kl,
            states=split_names(self.states),
            names=None if self.names is None else [text.split(",") for text in self.names],
        )


@dataclass(frozen=True)
class Advantage:
    """Generalised advantage estimation on a trajectory.

    Example: keel explain advantage --rewards 0,0,1 --values 0.5,0.6,0.7 --end truncated
    """

    rewards: str = "0,0,1,0,2"
    """The reward of each step."""
    values: str = "0.8,0.9,1.2,0.9,1.1"
    """The critic's value of the observation before each step."""
    last_value: float = 1.0
    """Its value of the observation after the last step."""
    gamma: float = 0.99
    """The discount."""
    lam: float = 0.95
    """λ: 0 looks one step ahead, 1 to the end."""
    end: Literal["terminated", "truncated", "running"] = "terminated"
    """End of the trajectory."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_advantage
        from keel.explain.inputs import parse_numbers

        return explain_advantage(
            parse_numbers("rewards", self.rewards),
            parse_numbers("values", self.values),
            last_value=self.last_value,
            gamma=self.gamma,
            lam=self.lam,
            end=self.end,
        )
