"""`keel explain TOPIC …`."""

from __future__ import annotations

from collections.abc import Sequence

from keel.cli.arguments import read_options
from keel.cli.explain_topics import (
    KL,
    Advantage,
    Clip,
    CodeLength,
    Estimators,
    Landscape,
    Penalty,
    Projection,
    SequenceKL,
    States,
    Topic,
    TrustRegion,
)
from keel.cli.strict_json import print_json
from keel.errors import check_choice

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


def run(args: Sequence[str]) -> int:
    """Explain one topic."""
    if not args or args[0] in ("-h", "--help"):
        print(_help())  # noqa: T201
        return 0
    topic = TOPICS[check_choice("topic", args[0], TOPICS)]
    options = read_options(topic, args[1:], f"keel explain {args[0]}")
    output = options.output
    if output.plot is not None:
        from keel.explain.figures import check_picture_path

        check_picture_path(output.plot)
    explanation = options.explain(f"explain_{args[0].replace('-', '_')}")
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
