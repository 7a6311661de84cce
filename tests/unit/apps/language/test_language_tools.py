"""Tools that answer while a policy writes, functions loaded by name, and the tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.apps.language.rewards import Rewards, load_function
from keel.apps.language.tasks import CHARACTERS, TAGS, TASKS, Example, segments, task_named
from keel.apps.language.tokenizer import build_tokenizer, encode
from keel.apps.language.tools import ToolError, ToolLoop, ToolReport, tool_loop
from keel.errors import InputError, KeelError

FACTS = {"ab": "xy", "cd": "uv"}


def find(data: Mapping[str, Any], call: str) -> str:
    return str(data[call])


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("<search>ab</search>", "<result>xy</result>"),
        ("hm<search>ab</search>", "<result>xy</result>"),
        ("<search>ab</search><result>xy</result><search>cd</search>", "<result>uv</result>"),
        ("<search>zz<search>ab</search>", "<result>xy</result>"),
        ("", None),
        ("<search>ab", None),
        ("ab</search>", None),
        ("<search>ab</search> ", None),
        ("<search>ab</search><result>xy</result>", None),
        ("<search>ab</search></search>", None),
    ],
)
def test_only_a_call_at_the_end_is_answered(text: str, reply: str | None):
    loop = ToolLoop(find)
    assert loop.reply(FACTS, text) == reply
    assert loop.report().calls == int(reply is not None)


def test_a_call_may_be_empty_and_may_have_lines():
    loop = ToolLoop(lambda data, call: call.upper())
    assert loop.reply({}, "<search></search>") == "<result></result>"
    assert loop.reply({}, "<search>a\nb</search>") == "<result>A\nB</result>"


def test_tags_can_be_others():
    loop = ToolLoop(find, tags=("[(", ")]"), result_tags=("{", "}"))
    assert loop.stop == ")]"
    assert loop.reply(FACTS, "[(ab)]") == "{xy}"
    assert loop.reply(FACTS, "<search>ab</search>") is None


@pytest.mark.parametrize("hops", [1, 2, 4])
def test_a_perfect_policy_writes_the_warm_up_answer(hops: int):
    """Own pieces written one after the other, the rest put in by the loop."""
    task = task_named("lookup", hops=hops)
    loop = tool_loop(task)
    assert loop.stop == task.stop
    rng = np.random.default_rng(0)
    for _ in range(20):
        example = task.example(rng)
        text = ""
        for piece, own in segments(task, example):
            text += piece if own else ""
            text += loop.reply(example.data, text) or ""
        assert text == example.answer
    assert loop.report() == ToolReport(20 * hops, {}, 0, 0, 0)


def test_a_task_without_a_tool_is_named():
    with pytest.raises(InputError, match="task sort: has no tool"):
        tool_loop(task_named("sort"))


def test_calls_beyond_the_limit_get_no_answer():
    loop = ToolLoop(find, max_calls=2)
    text = ""
    for expected in ("<result>xy</result>", "<result>xy</result>", None, None):
        text += "<search>ab</search>"
        reply = loop.reply(FACTS, text)
        assert reply == expected
        text += reply or ""
    report = loop.report()
    assert (report.calls, report.refused) == (2, 2)
    assert loop.reply(FACTS, "<search>ab</search>") is not None  # another completion


def test_long_answers_are_cut_and_counted():
    loop = ToolLoop(lambda data, call: call * 5, max_length=10)
    assert loop.reply({}, "<search>abc</search>") == "<result>abcabcabca</result>"
    assert loop.reply({}, "<search>ab</search>") == "<result>ababababab</result>"
    assert loop.report().cut == 1


@pytest.mark.parametrize(
    ("answer", "clean"),
    [
        ("a</result>b", "ab"),
        ("<search>q</search>", "q"),
        ("<eos>over<pad>", "over"),
        ("<sea<search>rch>q</search>", "q"),
        ("<e<bos>os>", ""),
        ("a\x00b<eéos>", "ab"),
    ],
)
def test_answers_hold_no_tags_and_nothing_unknown(answer: str, clean: str):
    loop = ToolLoop(lambda data, call: answer, characters=CHARACTERS + "<>")
    assert loop.reply({}, "<search>x</search>") == f"<result>{clean}</result>"
    assert loop.report().cleaned == 1


@given(
    st.text(alphabet="<>/searchultéo", max_size=60) | st.lists(st.sampled_from(TAGS)).map("".join)
)
def test_no_answer_is_a_call(answer: str):
    loop = ToolLoop(lambda data, call: answer)
    reply = loop.reply({}, "<search>x</search>")
    assert reply is not None
    inner = reply.removeprefix("<result>").removesuffix("</result>")
    assert not any(tag in inner for tag in (*TAGS, "<eos>", "<pad>", "<bos>"))
    assert loop.reply({}, "<search>x</search>" + reply) is None


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


def fail(data: Mapping[str, Any], call: str) -> Any:
    if call == "ok":
        return "fine"
    if call == "number":
        return 5
    if call == "exit":
        raise SystemExit(1)
    raise Unspeakable


def test_failures_are_told_to_the_policy_and_counted():
    loop = ToolLoop(fail, max_failures=0.75)
    replies = [loop.reply({}, f"<search>{x}</search>") for x in ("ok", "number", "exit", "raise")]
    assert replies == [
        "<result>fine</result>",
        "<result>error: not text</result>",
        "<result>error: SystemExit</result>",
        "<result>error: Unspeakable</result>",
    ]
    report = loop.report()
    assert report.calls == 4
    assert report.failures == {"not text": 1, "raised": 2}
    assert loop.report() == ToolReport(0, {}, 0, 0, 0)


def test_too_many_failures_stop_the_run():
    loop = ToolLoop(find, max_failures=0.2)
    for call in ["ab"] * 4 + ["zz"]:
        loop.reply(FACTS, f"<search>{call}</search>")
    assert loop.report().failures == {"raised": 1}  # a fifth is allowed
    for call in ("zz", "yy", "ab"):
        loop.reply(FACTS, f"<search>{call}</search>")
    said = (
        r"tool: 2 of 3 calls failed \(2 raised\), more than max_failures = 0.2 of them; "
        r"the first was 'zz': KeyError: 'zz'; mend the function, or raise max_failures"
    )
    with pytest.raises(ToolError, match=said):
        loop.report()
    assert issubclass(ToolError, KeelError)
    assert loop.report().calls == 0  # counted once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": ("<a>", "<a>")}, "tags: expected four different ones"),
        ({"tags": ("", "</a>")}, "tags: expected four different ones"),
        ({"max_calls": 0}, "max_calls and max_length: expected at least 1, got 0 and 200"),
        ({"max_length": 0}, "max_calls and max_length: expected at least 1, got 8 and 0"),
        ({"max_failures": 1.5}, "max_failures: expected a share from 0 to 1, got 1.5"),
    ],
)
def test_bad_limits_are_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        ToolLoop(find, **options)


FILE = """
import math
constant = 5
def right(example, completion): return 1.0
def one(example): return 1.0
def more(example, completion, extra): return 1.0
def many(*args): return 1.0
"""


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "language_toys.py").write_text(FILE)
    (tmp_path / "language_broken.py").write_text("1 / 0\n")
    (tmp_path / "language_unread.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "language_toys", raising=False)


@pytest.mark.usefixtures("_folder")
def test_functions_are_loaded_by_name():
    for name in ("right", "many"):
        function = load_function(f"language_toys:{name}")
        assert Rewards({"x": function})([Example("", "", {})], ["4"]).score.tolist() == [1.0]
    assert load_function("operator:eq") is not None  # in C


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("language_toys", "language_toys: expected module:function, such as my_rewards:right"),
        ("language_toys:", "expected module:function"),
        (":right", "expected module:function"),
        ("a/b:c", "expected module:function"),
        ("language_toys:wrong", "cannot be imported .*no attribute 'wrong'"),
        ("no_such_toys:right", "cannot be imported .*No module named 'no_such_toys'"),
        ("..:right", "failed on import"),
        ("language_broken:right", "its module failed on import: ZeroDivisionError: division by"),
        ("language_unread:right", "its module failed on import: SyntaxError"),
        ("language_toys:constant", "language_toys:constant: is no function"),
        ("language_toys:one", "must take an example .* too many positional arguments"),
        ("language_toys:more", "must take an example .* missing a required argument: 'extra'"),
    ],
)
def test_functions_that_cannot_be_used_are_named(name: str, message: str):
    with pytest.raises(InputError, match=message):
        load_function(name)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("transformers")
    return build_tokenizer()


def test_tokens_are_numbered_as_promised(tokenizer: Any):
    names = ["<pad>", "<eos>", "<bos>", *TAGS, *CHARACTERS]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == names
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert 50 <= len(tokenizer) == len(names) <= 100


texts = st.lists(st.sampled_from([*CHARACTERS, *TAGS]), max_size=40)


@given(pieces=texts)
def test_every_text_comes_back(tokenizer: Any, pieces: list[str]):
    """Spaces and line breaks at both ends too; a character or a tag is one token."""
    text = "".join(pieces)
    ids = encode(tokenizer, text)
    assert len(ids) == len(pieces)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, 0, 2, *ids, 1], skip_special_tokens=True) == text


def test_prompts_are_padded_on_the_left(tokenizer: Any):
    found = tokenizer(["a", "<search>b"], padding=True)
    a, b = encode(tokenizer, "ab")
    assert found["input_ids"] == [[0, a], [3, b]]
    assert found["attention_mask"] == [[0, 1], [1, 1]]


def test_unknown_characters_are_named(tokenizer: Any):
    said = r"text '<search>aé': character 'é' at position 9 is not in the tokenizer's alphabet; "
    with pytest.raises(InputError, match=said):
        encode(tokenizer, "<search>aé")
    with pytest.raises(InputError, match="character '<' at position 0"):
        encode(tokenizer, "<unk>")
    with pytest.raises(Exception, match="Missing"):  # never left out in silence
        tokenizer(["é"])


def test_other_troubles_of_a_tokenizer_are_not_hidden(tokenizer: Any):
    with pytest.raises(TypeError):
        encode(tokenizer, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("beside", [None, "Qwen3Config", "LlamaConfig"])
def test_a_saved_tokenizer_is_the_same(tokenizer: Any, tmp_path: Path, beside: str | None):
    """Also beside a model, whose kind has another tokenizer by default."""
    transformers = pytest.importorskip("transformers")
    if beside is not None:
        getattr(transformers, beside)().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = " <search> a\n b</search>  x "
    assert again.get_vocab() == tokenizer.get_vocab()
    assert encode(again, text) == encode(tokenizer, text)
    assert again.decode([0, 2, *encode(again, text), 1], skip_special_tokens=True) == text
    assert again.padding_side == "left"
    assert again.pad_token_id == 0
    with pytest.raises(InputError, match="character 'é' at position 0"):
        encode(again, "é")


@pytest.mark.parametrize("name", TASKS.names())
@pytest.mark.parametrize("wide", [False, True])
def test_tasks_are_written_in_the_alphabet_and_have_room(tokenizer: Any, name: str, wide: bool):
    options: dict[str, dict[str, Any]] = {
        "lookup": {"hops": 2},
        "parity": {"chain": "long"},
        "countdown": {"count": 4, "largest": 25},
    }
    task = task_named(name, **(options.get(name, {}) if wide else {}))
    rng = np.random.default_rng(1)
    longest = 0
    for _ in range(100):
        example = task.example(rng)
        encode(tokenizer, example.prompt)
        longest = max(longest, len(encode(tokenizer, example.answer)))
        if task.stop is not None:
            assert len(encode(tokenizer, task.stop)) == 1
    assert longest + 1 <= task.max_new_tokens <= 2.5 * longest


@pytest.mark.parametrize(
    ("characters", "specials", "message"),
    [
        ("", [], "characters: expected at least one"),
        ("aba", [], "characters: 'a' is there twice"),
        ("ab", ["<x>", "<x>"], "specials: '<x>' is taken already"),
        ("ab", ["<eos>"], "specials: '<eos>' is taken already"),
        ("ab", ["<unk>"], "specials: '<unk>' is taken already"),
        ("ab", ["a"], "specials: 'a' is too short for a tag"),
        ("ab", [""], "specials: '' is too short for a tag"),
    ],
)
def test_bad_alphabets_are_named(characters: str, specials: list[str], message: str):
    with pytest.raises(InputError, match=message):
        build_tokenizer(characters, specials)
