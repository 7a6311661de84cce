"""`keel explain TOPIC …`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from keel.cli.arguments import describe_actions, run_action
from keel.cli.explain_topics import TOPICS, Topic
from keel.cli.strict_json import print_json

USAGE = """\
usage: keel explain TOPIC …

The idea, the formula, the numbers for your values, and a picture.

topics:
{}

Every topic runs without options on an example of its own; its options:
  keel explain kl --help"""


def run(args: Sequence[str]) -> int:
    """Explain one topic."""
    actions = {name: (topic, partial(_explain, name)) for name, topic in TOPICS.items()}
    usage = USAGE.format(describe_actions(TOPICS))
    return run_action("explain", args, actions, usage, "topic")


def _explain(name: str, options: Topic) -> int:
    output = options.output
    if output.plot is not None:
        from keel.explain.figures import check_picture_path

        check_picture_path(output.plot)
    explanation = options.explain(f"explain_{name.replace('-', '_')}")
    if output.plot is not None:
        from keel.explain.figures import save_picture

        save_picture(explanation, output.plot)
    if output.json:
        print_json(explanation.numbers)
    else:
        from keel.cli.render import print_explanation

        print_explanation(explanation, output.plot)
    return 0
