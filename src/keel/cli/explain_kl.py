"""Topics of `keel explain` about divergences and their estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from keel.cli.explain_output import Answer, Output, split_names
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.explain import Explanation


@dataclass(frozen=True)
class KL:
    """The KL divergence of two distributions, exact and estimated.

    Example: keel explain kl 0.8,0.2 0.7,0.3 --names heads,tails
    """

    p: Annotated[Positional[str], arg(metavar="P")] = "0.8,0.2"
    """True distribution: probabilities separated by commas, such as 0.8,0.2 or 1/2,1/2."""
    q: Annotated[Positional[str], arg(metavar="Q")] = "0.7,0.3"
    """Believed distribution, over the same outcomes."""
    gaussian: Annotated[tuple[str, str] | None, arg(metavar="MU,SIGMA MU,SIGMA")] = None
    """Compare two Gaussians in place of P and Q."""
    logits: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """P and Q are logits: softmax them first."""
    names: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the outcomes."""
    sample: Annotated[str | None, arg(metavar="A,B,A,…")] = None
    """Outcomes that were drawn: what their log-ratios average to, and which KL that estimates.
    Without --names, the outcomes are named in the order in which they appear here."""
    digits: Annotated[int | None, arg(metavar="N")] = None
    """Also round the logarithms of --sample to N digits, as in a sum made by hand."""
    samples: int = 1000
    """Samples to draw from P for the estimators k1, k2 and k3."""
    seed: int = 0
    """Seed of those samples."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_gaussian_kl, explain_kl
        from keel.explain.inputs import parse_gaussian, parse_numbers

        if self.gaussian is not None:
            if self.logits or self.names or self.sample is not None or self.digits is not None:
                raise InputError(
                    "--gaussian: goes without --logits, --names, --sample and --digits"
                )
            p, q = (parse_gaussian(n, x) for n, x in zip("PQ", self.gaussian, strict=True))
            return explain_gaussian_kl(p, q, samples=self.samples, seed=self.seed)
        lists = [parse_numbers("P", self.p), parse_numbers("Q", self.q)]
        if self.logits:
            lists = [_softmax(values) for values in lists]
        return explain_kl(
            *lists,
            names=split_names(self.names),
            samples=self.samples,
            seed=self.seed,
            sample=split_names(self.sample),
            digits=self.digits,
        )


@dataclass(frozen=True)
class SequenceKL:
    """The KL of a sequence of tokens: per token, the sum, and the masked mean.

    Example: keel explain sequence 0.1,0.5,0.2,-0.1 --names I,search,for,answer --mask 1,1,1,0
    """

    values: Annotated[Positional[str], arg(metavar="TERMS")] = "0.1,0.5,0.2,-0.1"
    """One term per token, in nats: log π(token) − log π_ref(token), separated by commas."""
    mask: Annotated[str | None, arg(metavar="1,1,…")] = None
    """1 for each token that counts, 0 for one that does not (prompt, tool output, padding)."""
    names: Annotated[str | None, arg(metavar="A,B,…")] = None
    """The tokens; by default their positions."""
    terms: Literal["log-ratio", "kl"] = "log-ratio"
    """Kind of the terms: log-ratios, or the exact KL at each token."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_sequence
        from keel.explain.inputs import parse_numbers

        return explain_sequence(
            parse_numbers("terms", self.values),
            mask=None if self.mask is None else parse_numbers("mask", self.mask),
            names=split_names(self.names),
            terms=self.terms,
        )


@dataclass(frozen=True)
class CodeLength:
    """KL as extra code length: the detour of a traveller whose map is wrong.

    Example: keel explain code-length 0.7,0.2,0.1 0.5,0.3,0.2 --names sun,cloud,rain
    """

    p: Annotated[Positional[str], arg(metavar="P")] = "0.7,0.2,0.1"
    """The terrain: how often each outcome happens, separated by commas."""
    q: Annotated[Positional[str], arg(metavar="Q")] = "0.5,0.3,0.2"
    """The map: how often each of them is expected."""
    names: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the outcomes."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_code_length
        from keel.explain.inputs import parse_numbers

        p, q = parse_numbers("P", self.p), parse_numbers("Q", self.q)
        return explain_code_length(p, q, names=split_names(self.names))


@dataclass(frozen=True)
class Projection:
    """KL as the loss of a projection: a joint distribution rebuilt from its marginals.

    Example: keel explain projection 0.5,0.1 0.1,0.3 --rows left,right --columns jump,duck
    """

    joint: Annotated[Positional[tuple[str, ...]], arg(metavar="ROW")] = ("0.5,0.1", "0.1,0.3")
    """The joint distribution, row by row: probabilities separated by commas."""
    rows: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the rows."""
    columns: Annotated[str | None, arg(metavar="A,B,…")] = None
    """Names of the columns."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_projection
        from keel.explain.inputs import parse_numbers

        return explain_projection(
            [parse_numbers(f"row {i + 1}", row) for i, row in enumerate(self.joint)],
            rows=split_names(self.rows),
            columns=split_names(self.columns),
        )


@dataclass(frozen=True)
class Estimators:
    """The gradient certificate: what each KL estimator descends in a reward or a loss."""

    actions: int = 6
    """Actions of the random softmax policies."""
    policies: int = 16
    """Number of policies."""
    seed: int = 0
    """Seed of those policies."""
    output: Answer = field(default_factory=Output)

    def explain(self) -> Explanation:
        """Answer with the values given."""
        from keel.explain import explain_estimators

        return explain_estimators(actions=self.actions, policies=self.policies, seed=self.seed)


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / math.fsum(weights) for weight in weights]
