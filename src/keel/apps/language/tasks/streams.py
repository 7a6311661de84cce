"""Examples for warm-up, for training and for judging, of which the last are never trained on.

Other random seeds alone keep nothing apart: small tasks draw the same prompt again and again. So
the *examples* are divided. A hash of prompt and data says on which side each one lies, in
whatever stream; training and warm-up throw away what is held out, judging throws away the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator

import numpy as np

from keel.apps.language.tasks.protocol import RESULT, RESULT_END, Example, Task
from keel.errors import InputError

HELD_OUT_SHARE = 0.1
"""Share of all examples a task can draw."""
HELD_OUT_SEED, WARM_UP_SEED = 1, 2
"""First words of the seeds, so that the streams differ for every second word."""
MOST_DRAWS = 1000
"""Draws in vain after which a task is taken to have no more examples on that side."""


def prompts(task: Task, count: int, rng: np.random.Generator) -> list[Example]:
    """Draw `count` examples to train on with `rng`; none is held out, some may be alike."""
    _check_count(count)
    stream = _drawn(task, rng, held=False)
    return [next(stream) for _ in range(count)]


def warmup_data(task: Task, count: int, seed: int) -> list[Example]:
    """Return the fixed set of `count` examples to imitate first; a longer one begins alike."""
    return prompts(task, count, np.random.default_rng([WARM_UP_SEED, seed]))


def held_out(task: Task, count: int) -> list[Example]:
    """Return the fixed set of `count` different examples to judge by; a longer one begins alike."""
    _check_count(count)
    stream = _drawn(task, np.random.default_rng([HELD_OUT_SEED]), held=True)
    examples: dict[str, Example] = {}
    repeated = 0
    while len(examples) < count:
        example = next(stream)
        repeated = repeated + 1 if _identity(example) in examples else 0
        examples.setdefault(_identity(example), example)
        if repeated == MOST_DRAWS:
            raise InputError(
                f"{task.name}: held out are but {len(examples)} different examples, {count} were "
                "asked for; ask for fewer, or give the task wider options"
            )
    return list(examples.values())


def is_held_out(example: Example) -> bool:
    """Return whether an example is for judging only, by its prompt and its data alone."""
    digest = hashlib.sha256(_identity(example).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def segments(task: Task, example: Example) -> list[tuple[str, bool]]:
    """Return the pieces of the answer, and whether the policy writes them; tool text is False.

    Examples:
        >>> from keel.apps.language.tasks.lookup import Lookup
        >>> example = Example("value of a:", "<search>a</search><result>b</result>b", {})
        >>> segments(Lookup(letters=1), example)
        [('<search>a</search>', True), ('<result>b</result>', False), ('b', True)]
    """
    if task.stop is None:
        return [(example.answer, True)]
    pieces = re.split(f"({RESULT}.*?{RESULT_END})", example.answer, flags=re.DOTALL)
    return [(piece, i % 2 == 0) for i, piece in enumerate(pieces) if piece]


def _drawn(task: Task, rng: np.random.Generator, held: bool) -> Iterator[Example]:
    """Yield examples of one side, without end."""
    while True:
        draws = (task.example(rng) for _ in range(MOST_DRAWS))
        example = next((draw for draw in draws if is_held_out(draw) is held), None)
        if example is None:
            side = "held out" if held else "left for training"
            raise InputError(
                f"{task.name}: {MOST_DRAWS} draws gave no example that is {side}; "
                "give the task wider options"
            )
        yield example


def _identity(example: Example) -> str:
    try:
        return json.dumps([example.prompt, example.data], sort_keys=True)
    except TypeError as error:
        raise InputError(
            f"example {example.prompt!r}: data must hold plain values, as in JSON ({error})"
        ) from error


def _check_count(count: int) -> None:
    if count < 1:
        raise InputError(f"count: expected at least 1 example, got {count}")
