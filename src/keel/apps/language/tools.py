"""Tools that answer while a policy writes: `<search>ab</search>` → `<result>xy</result>`.

The policy writes up to the closing tag of a call; what the tool answers is put behind it, and the
policy goes on. The text put in is not the policy's own and must be masked in training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from keel.apps.language.rewards import describe
from keel.apps.language.tasks.protocol import (
    RESULT,
    RESULT_END,
    SEARCH,
    SEARCH_END,
    TAGS,
    Example,
    Task,
    ToolTask,
)
from keel.apps.language.tokenizer import CONTROLS
from keel.errors import InputError, KeelError

Tool = Callable[[Mapping[str, Any], str], str]
"""From the data of an example and the text of a call to an answer."""


class ToolError(KeelError):
    """Too large a share of the calls of a tool failed."""


class ToolReport(NamedTuple):
    """Counts since the last report."""

    calls: int
    """answered, failures included"""
    failures: dict[str, int]
    """by kind: `raised`, `not text`"""
    cut: int
    """answers that were too long"""
    cleaned: int
    """answers with tags, or with characters the tokenizer does not know, which were left out"""
    refused: int
    """calls beyond the limit of a completion, which got no answer"""


class ToolLoop:
    """A Python function as a tool.

    A tool that raises, or answers with something other than text, gives the policy a short error
    text and is counted; `report` raises a `ToolError` if that happened too often. The function runs
    in this process, without a time limit: one that may hang must limit itself.

    Examples:
        >>> loop = ToolLoop(lambda data, call: data[call])
        >>> loop.reply({"ab": "xy"}, "<search>ab</search>")
        '<result>xy</result>'
        >>> loop.reply({"ab": "xy"}, "<search>ab</search><result>xy</result>x") is None
        True
        >>> loop.reply({"ab": "xy"}, "<search>q</search>")
        '<result>error: KeyError</result>'
    """

    def __init__(
        self,
        function: Tool,
        *,
        tags: tuple[str, str] = (SEARCH, SEARCH_END),
        result_tags: tuple[str, str] = (RESULT, RESULT_END),
        max_calls: int = 8,
        max_length: int = 200,
        max_failures: float = 0.2,
        reserved: Collection[str] = (*TAGS, *CONTROLS),
        characters: str | None = None,
    ) -> None:
        """`tags` stand around a call, `result_tags` around an answer.

        A completion may hold `max_calls` calls; an answer is cut after `max_length` characters
        between its tags. An answer must not end a completion or look like another call: names in
        `reserved` and both pairs of tags are taken out of it, and so is all that is not in
        `characters`, if these are given.
        """
        if len({*tags, *result_tags}) < 4 or not all((*tags, *result_tags)):
            raise InputError(f"tags: expected four different ones, got {tags} and {result_tags}")
        if max_calls < 1 or max_length < 1:
            raise InputError(
                f"max_calls and max_length: expected at least 1, got {max_calls} and {max_length}"
            )
        if not 0.0 <= max_failures <= 1.0:
            raise InputError(f"max_failures: expected a share from 0 to 1, got {max_failures}")
        self.stop = tags[1]
        self._function, self._result_tags = function, result_tags
        self._max_calls, self._max_length = max_calls, max_length
        self._max_failures, self._characters = max_failures, characters
        first, last = map(re.escape, tags)
        self._call = re.compile(f"{first}((?:(?!{first}|{last}).)*){last}", re.DOTALL)
        unwanted = sorted({*tags, *result_tags, *reserved}, key=len, reverse=True)
        self._unwanted = re.compile("|".join(map(re.escape, unwanted)))
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._first_failure = ""

    def reply(self, data: Mapping[str, Any], text: str) -> str | None:
        """Return the text to put behind `text`; None if it ends with no call, or calls too often.

        Args:
            data: of the example.
            text: all that a completion holds so far, with earlier answers.
        """
        calls = list(self._call.finditer(text))
        if not calls or calls[-1].end() != len(text):
            return None
        if len(calls) > self._max_calls:
            self._counts["refused"] += 1
            return None
        self._counts["calls"] += 1
        answer = self._cleaned(self._cut(self._answer(data, calls[-1][1])))
        first, last = self._result_tags
        return f"{first}{answer}{last}"

    def report(self) -> ToolReport:
        """Return the counts since the last report; raise if too many calls failed."""
        counts, failures, example = self._counts, self._failures, self._first_failure
        self._counts, self._failures, self._first_failure = Counter(), Counter(), ""
        failed, calls = failures.total(), counts["calls"]
        if calls and failed / calls > self._max_failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            raise ToolError(
                f"tool: {failed} of {calls} calls failed ({kinds}), more than max_failures = "
                f"{self._max_failures:g} of them; the first was {example}; mend the function, or "
                "raise max_failures"
            )
        return ToolReport(
            calls, dict(failures), counts["cut"], counts["cleaned"], counts["refused"]
        )

    def _answer(self, data: Mapping[str, Any], call: str) -> str:
        try:
            answer = self._function(data, call)
        except (Exception, SystemExit) as error:
            self._note("raised", call, describe(error))
            return f"error: {type(error).__name__}"
        if isinstance(answer, str):
            return answer
        self._note("not text", call, f"{type(answer).__name__} in place of text")
        return "error: not text"

    def _note(self, kind: str, call: str, what: str) -> None:
        self._failures[kind] += 1
        self._first_failure = self._first_failure or f"{call[:60]!r}: {what}"

    def _cut(self, answer: str) -> str:
        self._counts["cut"] += len(answer) > self._max_length
        return answer[: self._max_length]

    def _cleaned(self, answer: str) -> str:
        """Remove what must not be in it; the rest may look like a tag again, so once more."""
        clean = self._without_unwanted(answer)
        self._counts["cleaned"] += clean != answer
        while (cleaner := self._without_unwanted(clean)) != clean:
            clean = cleaner
        return clean

    def _without_unwanted(self, answer: str) -> str:
        text = self._unwanted.sub("", answer)
        characters = self._characters
        return text if characters is None else "".join(x for x in text if x in characters)


def tool_loop(task: Task, **limits: Any) -> ToolLoop:
    """Return the tool of a task, ready to answer; `limits` as those of `ToolLoop`."""
    if not isinstance(task, ToolTask):
        raise InputError(f"task {task.name}: has no tool")
    tool = task.tool

    def answer(data: Mapping[str, Any], call: str) -> str:
        return tool(Example("", "", data), call)

    return ToolLoop(answer, **limits)
