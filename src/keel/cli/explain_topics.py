"""Topics of `keel explain`: what each takes, and how the function that answers is called.

Fields have the names of that function's arguments. Lists of numbers and of names are texts with
commas, which are read by the mark at their field.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from keel.errors import InputError

if TYPE_CHECKING:
    from keel.explain import Explanation


@dataclass(frozen=True)
class Numbers:
    """Mark of a list of numbers, or of several, which errors call by a label."""

    label: str

    def read(self, text: str | tuple[str, ...]) -> Any:
        """Return the numbers of a text, or of each of several."""
        from keel.explain.inputs import parse_numbers

        if isinstance(text, str):
            return parse_numbers(self.label, text)
        return [parse_numbers(f"{self.label} {i}", part) for i, part in enumerate(text, 1)]


@dataclass(frozen=True)
class SplitNames:
    """Mark of a list of names, or of several."""

    def read(self, text: str | tuple[str, ...]) -> Any:
        """Return the names in a text, or in each of several."""
        return text.split(",") if isinstance(text, str) else [part.split(",") for part in text]


Names = Annotated[str | None, SplitNames(), arg(metavar="A,B,…")]


@dataclass(frozen=True)
class Output:
    """Form of the answer."""

    plot: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Draw a picture into FILE (.png, .svg or .pdf)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text; an infinite number becomes null."""


@dataclass(frozen=True)
class Topic:
    """A topic, with the options that all have."""

    output: Annotated[Output, arg(name="")] = field(default_factory=Output)

    def arguments(self) -> dict[str, Any]:
        """Return what the function is called with: all other fields, read by their marks."""
        given: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, Numbers | SplitNames) and value is not None:
                    value = mark.read(value)
            given[name] = value
        del given["output"]
        return given

    def explain(self, function: str) -> Explanation:
        """Answer by a function of `keel.explain`, with the values given."""
        from keel import explain

        answer: Explanation = getattr(explain, function)(**self.arguments())
        return answer


@dataclass(frozen=True)
class KL(Topic):
    """The KL divergence of two distributions, exact and estimated.

    Example: keel explain kl 0.8,0.2 0.7,0.3 --names heads,tails
    """

    p: Annotated[Positional[str], Numbers("P"), arg(metavar="P")] = "0.8,0.2"
    """True distribution: probabilities separated by commas, such as 0.8,0.2 or 1/2,1/2."""
    q: Annotated[Positional[str], Numbers("Q"), arg(metavar="Q")] = "0.7,0.3"
    """Believed distribution, over the same outcomes."""
    gaussian: Annotated[tuple[str, str] | None, arg(metavar="MU,SIGMA MU,SIGMA")] = None
    """Compare two Gaussians in place of P and Q."""
    logits: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """P and Q are logits: softmax them first."""
    names: Names = None
    """Names of the outcomes."""
    sample: Annotated[str | None, SplitNames(), arg(metavar="A,B,A,…")] = None
    """Outcomes that were drawn: what their log-ratios average to, and which KL that estimates.
    Without --names, the outcomes are named in the order in which they appear here."""
    digits: Annotated[int | None, arg(metavar="N")] = None
    """Also round the logarithms of --sample to N digits, as in a sum made by hand."""
    samples: int = 1000
    """Samples to draw from P for the estimators k1, k2 and k3."""
    seed: int = 0
    """Seed of those samples."""

    def explain(self, function: str) -> Explanation:
        """Answer with the values given; two Gaussians have a function of their own."""
        from keel.explain import explain_gaussian_kl, explain_kl
        from keel.explain.inputs import parse_gaussian

        if self.gaussian is not None:
            if self.logits or self.names or self.sample is not None or self.digits is not None:
                raise InputError(
                    "--gaussian: goes without --logits, --names, --sample and --digits"
                )
            p, q = (parse_gaussian(n, x) for n, x in zip("PQ", self.gaussian, strict=True))
            return explain_gaussian_kl(p, q, samples=self.samples, seed=self.seed)
        given = self.arguments()
        del given["gaussian"]
        if given.pop("logits"):
            given |= {name: _softmax(given[name]) for name in "pq"}
        return explain_kl(**given)


@dataclass(frozen=True)
class CodeLength(Topic):
    """KL as extra code length: the detour of a traveller whose map is wrong.

    Example: keel explain code-length 0.7,0.2,0.1 0.5,0.3,0.2 --names sun,cloud,rain
    """

    p: Annotated[Positional[str], Numbers("P"), arg(metavar="P")] = "0.7,0.2,0.1"
    """The terrain: how often each outcome happens, separated by commas."""
    q: Annotated[Positional[str], Numbers("Q"), arg(metavar="Q")] = "0.5,0.3,0.2"
    """The map: how often each of them is expected."""
    names: Names = None
    """Names of the outcomes."""


@dataclass(frozen=True)
class Projection(Topic):
    """KL as the loss of a projection: a joint distribution rebuilt from its marginals.

    Example: keel explain projection 0.5,0.1 0.1,0.3 --rows left,right --columns jump,duck
    """

    joint: Annotated[Positional[tuple[str, ...]], Numbers("row"), arg(metavar="ROW")] = (
        "0.5,0.1",
        "0.1,0.3",
    )
    """The joint distribution, row by row: probabilities separated by commas."""
    rows: Names = None
    """Names of the rows."""
    columns: Names = None
    """Names of the columns."""


@dataclass(frozen=True)
class SequenceKL(Topic):
    """The KL of a sequence of tokens: per token, the sum, and the masked mean.

    Example: keel explain sequence 0.1,0.5,0.2,-0.1 --names I,search,for,answer --mask 1,1,1,0
    """

    values: Annotated[Positional[str], Numbers("terms"), arg(metavar="TERMS")] = "0.1,0.5,0.2,-0.1"
    """One term per token, in nats: log π(token) − log π_ref(token), separated by commas."""
    mask: Annotated[str | None, Numbers("mask"), arg(metavar="1,1,…")] = None
    """1 for each token that counts, 0 for one that does not (prompt, tool output, padding)."""
    names: Names = None
    """The tokens; by default their positions."""
    terms: Literal["log-ratio", "kl"] = "log-ratio"
    """Kind of the terms: log-ratios, or the exact KL at each token."""


@dataclass(frozen=True)
class Clip(Topic):
    """PPO's clipped surrogate on one sample.

    Example: keel explain clip --ratio 2.0 --advantage 1 --clip 0.2
    """

    ratio: float = 2.0
    """Probability of the action under the new policy over that under the old."""
    advantage: float = 1.0
    """Advantage of the action: its return minus the expected one."""
    low: Annotated[float, arg(name="clip")] = 0.2
    """ε: the ratio is clipped to 1 − ε … 1 + ε."""
    high: Annotated[float | None, arg(name="clip-high")] = None
    """Another ε for the upper side (clip-higher)."""
    dual: float | None = None
    """Dual clip: for A < 0, no loss above −dual·A."""


@dataclass(frozen=True)
class Penalty(Topic):
    """The KL penalty in the reward, and the policy that it asks for.

    Example: keel explain penalty --reference 0.3 --probability 0.6 --beta 0.1
    """

    reference_probability: Annotated[float, arg(name="reference")] = 0.3
    """Probability of the sampled action under the reference policy."""
    probability: float = 0.6
    """Its probability under the policy that is trained."""
    beta: float = 0.1
    """β: the price of a nat, in units of reward."""
    reward: float = 1.0
    """The reward before the penalty."""
    reference: Annotated[str, Numbers("policy"), arg(name="policy")] = "0.3,0.4,0.3"
    """A whole reference policy, for the best policy at this β."""
    rewards: Annotated[str, Numbers("rewards")] = "1,0,0.5"
    """The reward of each of its actions."""
    names: Names = None
    """Names of the actions."""


@dataclass(frozen=True)
class Landscape(Topic):
    """The KL penalty as a landscape: the reward pulls a policy, a spring holds it.

    Example: keel explain landscape --beta 0.5 --names search,think,answer
    """

    reference: Annotated[str, Numbers("policy"), arg(name="policy")] = "0.3,0.4,0.3"
    """The reference policy over three actions."""
    rewards: Annotated[str, Numbers("rewards")] = "1,0,0.5"
    """The reward of each action."""
    beta: float = 0.5
    """β: the price of a nat, in units of reward; the stiffness of the spring."""
    names: Annotated[str | None, SplitNames(), arg(metavar="A,B,C")] = None
    """Names of the actions."""


@dataclass(frozen=True)
class TrustRegion(Topic):
    """A bound on KL(old‖new), and how much of a step it lets you keep.

    Example: keel explain trust-region --old 0.4,0.3,0.2,0.1 --new 0.8,0.1,0.05,0.05
    """

    old: Annotated[str, Numbers("old")] = "0.4,0.3,0.2,0.1"
    """The policy before the update."""
    new: Annotated[str, Numbers("new")] = "0.45,0.35,0.15,0.05"
    """The policy that the update asks for."""
    max_kl: float = 0.01
    """δ: the largest KL(old‖new) allowed, in nats."""
    names: Names = None
    """Names of the actions."""


@dataclass(frozen=True)
class States(Topic):
    """A trust region over several states: the KL of each, and their average.

    Example: keel explain states --old 0.9,0.1 0.8,0.2 --new 0.92,0.08 0.83,0.17
    """

    old: Annotated[tuple[str, ...], Numbers("old, state"), arg(metavar="PROBABILITIES")] = (
        "0.9,0.1",
        "0.8,0.2",
    )
    """The policy before the update: one comma-separated list per state."""
    new: Annotated[tuple[str, ...], Numbers("new, state"), arg(metavar="PROBABILITIES")] = (
        "0.1,0.9",
        "0.2,0.8",
    )
    """The policy that the update asks for, likewise."""
    visits: Annotated[str | None, Numbers("visits"), arg(metavar="W,W,…")] = None
    """Share of the visits of each state; by default all the same."""
    max_kl: float = 0.01
    """δ: the largest average of KL(old‖new) allowed, in nats."""
    states: Names = None
    """Names of the states."""
    names: Annotated[tuple[str, ...] | None, SplitNames(), arg(metavar="A,B,…")] = None
    """Names of the actions: one comma-separated list per state."""


@dataclass(frozen=True)
class Estimators(Topic):
    """The gradient certificate: what each KL estimator descends in a reward or a loss."""

    actions: int = 6
    """Actions of the random softmax policies."""
    policies: int = 16
    """Number of policies."""
    seed: int = 0
    """Seed of those policies."""


@dataclass(frozen=True)
class Advantage(Topic):
    """Generalised advantage estimation on a trajectory.

    Example: keel explain advantage --rewards 0,0,1 --values 0.5,0.6,0.7 --end truncated
    """

    rewards: Annotated[str, Numbers("rewards")] = "0,0,1,0,2"
    """The reward of each step."""
    values: Annotated[str, Numbers("values")] = "0.8,0.9,1.2,0.9,1.1"
    """The critic's value of the observation before each step."""
    last_value: float = 1.0
    """Its value of the observation after the last step."""
    gamma: float = 0.99
    """The discount."""
    lam: float = 0.95
    """λ: 0 looks one step ahead, 1 to the end."""
    end: Literal["terminated", "truncated", "running"] = "terminated"
    """End of the trajectory."""


TOPICS: dict[str, type[Topic]] = {
    "kl": KL,
    "code-length": CodeLength,
    "projection": Projection,
    "sequence": SequenceKL,
    "clip": Clip,
    "penalty": Penalty,
    "landscape": Landscape,
    "trust-region": TrustRegion,
    "states": States,
    "estimators": Estimators,
    "advantage": Advantage,
}


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]
