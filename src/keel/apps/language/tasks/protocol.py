"""The protocol of tasks: prompts to complete, a verifier of completions, and perhaps a tool.

Everything that a task writes is made of `CHARACTERS` and `TAGS`, so that one tokenizer fits all.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

SEARCH, SEARCH_END = "<search>", "</search>"
"""Tags around what the policy asks the tool."""
RESULT, RESULT_END = "<result>", "</result>"
"""Tags around what the tool answers."""
TAGS = (SEARCH, SEARCH_END, RESULT, RESULT_END)
MARKER = "#"
"""Marker of the final answer, where a task lets the policy think first."""
CHARACTERS = string.digits + string.ascii_letters + " \n+-*/()=:;,.?!_" + MARKER


class Example(NamedTuple):
    """A prompt with its answer and the data of its verifier."""

    prompt: str
    """what the policy sees"""
    answer: str
    """what a perfect completion could be, tool calls and tool text included; without `<eos>`"""
    data: Mapping[str, Any]
    """what verifier and tool must know; plain values, as in JSON"""


class Task(Protocol):
    """A source of examples that can tell good completions from bad ones."""

    @property
    def name(self) -> str:
        """Name, as in `TASKS`."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the longest completion, tool text and `<eos>` included; a tag is one token."""

    @property
    def stop(self) -> str | None:
        """The closing tag of a tool call, after which the tool must answer; None without a tool."""

    def example(self, rng: np.random.Generator) -> Example:
        """Draw an example."""

    def verify(self, example: Example, completion: str) -> float:
        """Return how good a completion is, from 0 to 1; `completion` is without `<eos>`."""


@runtime_checkable
class ToolTask(Task, Protocol):
    """A task with a tool."""

    def tool(self, example: Example, call: str) -> str:
        """Return the answer to the text between the tags of a call; without tags of its own."""


@runtime_checkable
class FlawedTask(Task, Protocol):
    """A task whose `verify` can be fooled, to study reward hacking."""

    def truth(self, example: Example, completion: str) -> float:
        """Return what `verify` should have said."""


def true_score(task: Task, example: Example, completion: str) -> float:
    """Return how good a completion really is: by `truth` where the task has one, else `verify`."""
    judge = task.truth if isinstance(task, FlawedTask) else task.verify
    return judge(example, completion)


def after_marker(completion: str) -> str | None:
    """Return what stands behind the last marker; None without one.

    Only one answer counts, so that a policy gains nothing by writing several.
    """
    _, marker, answer = completion.rpartition(MARKER)
    return answer if marker else None
