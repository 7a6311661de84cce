"""`keel explain TOPIC …`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options
from keel.cli.strict_json import print_json
from keel.errors import InputError, choose

if TYPE_CHECKING:
    from keel.explain import Explanation


@dataclass(frozen=True)
class Output:
    """How to answer."""

    plot: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Draw a picture into FILE (.png, .svg or .pdf)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text; an infinite number becomes null."""


Answer = Annotated[Output, arg(name="")]


@dataclass(frozen=True)
class KL:
    """The KL divergence of two distributions, exact and estimated.

    Example: keel explain kl 0.8,0.2 0.7,0.3 --names heads,tails
    """

    p: Annotated[Positional[str], arg(metavar="P")] = "0.8,0.2"
    """What the world follows: probabilities separated by commas, such as 0.8,0.2 or 1/2,1/2."""
    q: Annotated[Positional[str], arg(metavar="Q")] = "0.7,0.3"
    """What is believed, over the same outcomes."""
    gaussian: Annotated[tuple[str, str] | None, arg(metavar="MU,SIGMA MU,SIGMA")] = None
    """Compare two Gaussians in place of P and Q."""
    logits: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """P and Q are logits: softmax them first."""
    names: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the outcomes."""
    samples: int = 1000
    """Samples of P for the estimators k1, k2 and k3."""
    seed: int = 0
    """Seed of those samples."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_gaussian_kl, explain_kl
        from keel.explain.inputs import parse_gaussian, parse_numbers

        if self.gaussian is not None:
            if self.logits or self.names:
                raise InputError("--gaussian: goes without --logits and --names")
            p, q = (parse_gaussian(n, x) for n, x in zip("PQ", self.gaussian, strict=True))
            return explain_gaussian_kl(p, q, samples=self.samples, seed=self.seed)
        lists = [parse_numbers("P", self.p), parse_numbers("Q", self.q)]
        if self.logits:
            lists = [_softmax(values) for values in lists]
        return explain_kl(*lists, names=_split(self.names), samples=self.samples, seed=self.seed)


@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate on one sample.

    Example: keel explain clip --ratio 2.0 --advantage 1 --clip 0.2
    """

    ratio: float = 2.0
    """How much likelier the new policy makes the action."""
    advantage: float = 1.0
    """How much better than expected the action was."""
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
            names=_split(self.names),
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
            names=_split(self.names),
        )


@dataclass(frozen=True)
class Estimators:
    """The gradient certificate: what each KL estimator descends in a reward or a loss."""

    actions: int = 6
    """Actions of the random softmax policies."""
    policies: int = 16
    """How many of them."""
    seed: int = 0
    """Seed of those policies."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_estimators

        return explain_estimators(actions=self.actions, policies=self.policies, seed=self.seed)


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
    """How the trajectory ends."""
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


Topic = KL | Clip | Penalty | TrustRegion | Estimators | Advantage
TOPICS: dict[str, type[Topic]] = {
    "kl": KL,
    "clip": Clip,
    "penalty": Penalty,
    "trust-region": TrustRegion,
    "estimators": Estimators,
    "advantage": Advantage,
}


def run(args: Sequence[str]) -> int:
    """Explain one topic."""
    if not args or args[0] in ("-h", "--help"):
        print(_help())  # noqa: T201
        return 0
    topic = TOPICS[choose("topic", args[0], TOPICS)]
    options = read_options(topic, args[1:], f"keel explain {args[0]}")
    output = options.output
    if output.plot is not None:
        from keel.explain.figures import check_picture_path

        check_picture_path(output.plot)
    explanation = options.explain()
    if output.plot is not None:
        from keel.explain.figures import save_picture

        save_picture(explanation, output.plot)
    if output.json:
        print_json(explanation.numbers)
    else:
        from keel.cli.render import print_explanation

        print_explanation(explanation, output.plot)
    return 0


def _help() -> str:
    width = max(map(len, TOPICS))
    topics = "\n".join(
        f"  {name:<{width}}  {(topic.__doc__ or '').splitlines()[0]}"
        for name, topic in TOPICS.items()
    )
    return (
        "usage: keel explain TOPIC …\n\n"
        "The idea, the formula, the numbers for your values, and a picture.\n\n"
        f"topics:\n{topics}\n\n"
        "Every topic runs without options on an example of its own; its options:\n"
        "  keel explain kl --help"
    )


def _split(names: str | None) -> list[str] | None:
    return None if names is None else names.split(",")


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]
