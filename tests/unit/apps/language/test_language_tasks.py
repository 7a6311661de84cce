"""Tasks and their tokenizer: what is drawn, what is verified, what is held out, what is encoded."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise, permutations, product
from operator import add, mul, sub
from typing import Any

import numpy as np
import pytest
from hypothesis import example as tried
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from keel.apps.language.tasks import (
    TASKS,
    Example,
    FlawedTask,
    Task,
    ToolTask,
    held_out,
    is_held_out,
    prompts,
    segments,
    streams,
    task_named,
    true_score,
    warmup_data,
)
from keel.apps.language.tasks.addition import scratchpad
from keel.apps.language.tasks.expressions import evaluate, expressions
from keel.apps.language.tasks.lookup import Lookup
from keel.errors import InputError

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in TASKS.names()],
    ("parity", {"chain": "long"}),
    ("lookup", {"hops": 2}),
    ("lookup", {"hops": 3, "facts": 3, "letters": 1}),
]


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}{list(variant[1].values())}")
def task(request: pytest.FixtureRequest) -> Task:
    name, options = request.param
    return task_named(name, **options)


def drawn(task: Task, count: int = 200) -> list[Example]:
    rng = np.random.default_rng(7)
    return [task.example(rng) for _ in range(count)]


def test_the_tasks_are_these():
    names = ["sort", "sort-flawed", "reverse", "addition", "countdown", "parity", "lookup"]
    assert sorted(TASKS.names()) == sorted(names)
    assert [task_named(name).name for name in names] == names
    assert [name for name in names if isinstance(task_named(name), ToolTask)] == ["lookup"]
    assert [name for name in names if task_named(name).stop] == ["lookup"]
    assert [name for name in names if isinstance(task_named(name), FlawedTask)] == ["sort-flawed"]


def test_answers_are_perfect_and_others_answers_are_not(task: Task):
    examples = drawn(task)
    assert all(true_score(task, example, example.answer) == 1.0 for example in examples)
    spoilt = [true_score(task, example, example.answer + "0") for example in examples]
    assert spoilt == [0.0] * len(examples)
    assert not any(true_score(task, example, "") for example in examples)
    strange = [true_score(task, x, y.answer) for x, y in pairwise(examples)]
    assert np.mean(strange) < (0.75 if task.name == "parity" else 0.1)


def test_every_completion_has_a_score_from_0_to_1(task: Task):
    example = drawn(task, 1)[0]
    for text in ("", "#", "((((", "</search>", "<search>", "é\x00", "9" * 5000, "²", "(" * 5000):
        assert 0.0 <= task.verify(example, text) <= 1.0


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "wrong"),
    [
        ("sort", "sort h7c7a:", "77ach", "7ach"),
        ("reverse", "reverse h7c7a:", "a7c7h", "h7c7a"),
        ("addition", "add 478+95:", "8+5+0=13,7+9+1=17,4+0+1=5#573", "#0573"),
        ("parity", "parity 1011:", "1101#1", "1101#0"),
    ],
)
def test_examples_worked_by_hand(name: str, prompt: str, answer: str, wrong: str):
    text = prompt.split()[1].rstrip(":")
    data: dict[str, dict[str, Any]] = {
        "sort": {"text": text},
        "reverse": {"text": text},
        "addition": {"left": 478, "right": 95},
        "parity": {"bits": text},
    }
    example = Example(prompt, answer, data[name])
    assert task_named(name).verify(example, answer) == 1.0
    assert task_named(name).verify(example, wrong) == 0.0


def test_lengths_are_those_asked_for():
    lengths = Counter(len(x.data["text"]) for x in drawn(task_named("sort"), 800))
    assert set(lengths) == {5, 6, 7, 8}
    assert min(lengths.values()) > 150
    digits = Counter(len(str(x.data["left"])) for x in drawn(task_named("addition"), 600))
    assert set(digits) == {2, 3, 4}
    assert min(digits.values()) > 150
    bits = {len(x.data["bits"]) for x in drawn(task_named("parity", shortest=2, longest=3))}
    assert bits == {2, 3}


def test_thinking_is_free_and_only_the_last_answer_counts():
    example = Example("add 12+9:", "", {"left": 12, "right": 9})
    addition = task_named("addition")
    for good in ("#21", "let me see...#21", "#99#21"):
        assert addition.verify(example, good) == 1.0
    for bad in ("21", "#21#99", "#21 ", "# 21", "#021", "#21#", "#2 1"):
        assert addition.verify(example, bad) == 0.0


numbers = st.text("0123456789", min_size=1, max_size=12).map(lambda text: int("1" + text))


@tried(195, 5)  # a carry that makes a carry
@given(numbers, numbers)
def test_the_scratchpad_is_an_addition(left: int, right: int):
    """Each line is right by itself, takes over the carry, and the last digits are the sum."""
    lines = [line.split("=") for line in scratchpad(left, right).split(",")]
    summands = [[int(x) for x in line[0].split("+")] for line in lines]
    sums = [int(line[1]) for line in lines]
    assert [sum(three) for three in summands] == sums
    assert [three[2] for three in summands] == [0, *(total // 10 for total in sums[:-1])]
    digits = [total % 10 for total in sums[:-1]] + [sums[-1]]
    assert sum(digit * 10**place for place, digit in enumerate(digits)) == left + right


def test_the_long_chain_of_parity():
    example = next(x for x in drawn(task_named("parity", chain="long", shortest=3, longest=3)))
    bits = [int(bit) for bit in example.data["bits"]]
    odd = np.cumsum(bits) % 2
    expected = ",".join(f"{bit}:{x}" for bit, x in zip(bits, odd, strict=True))
    assert example.answer == f"{expected}#{odd[-1]}"


Tree = tuple[str, int, list[int]]
"""A text with all parentheses, its value, its numbers."""
OPERATORS = {"+": add, "-": sub, "*": mul}


def joined(pair: tuple[Tree, Tree], operator: str) -> Tree:
    (left, x, used), (right, y, more) = pair
    return f"({left}{operator}{right})", OPERATORS[operator](x, y), used + more


trees = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), n, [n])),
    lambda inner: st.builds(joined, st.tuples(inner, inner), st.sampled_from("+-*")),
    max_leaves=8,
)


@given(trees)
def test_expressions_are_worth_what_their_tree_is(tree: Tree):
    text, value, numbers = tree
    assert evaluate(text) == (value, tuple(numbers))


def test_products_bind_stronger_and_minus_goes_from_the_left():
    for text, value in {"2+3*4": 14, "9-4-3": 2, "9-(4-3)": 8, "((7))": 7, "2*3-4*5": -14}.items():
        assert evaluate(text).value == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected whole numbers, operators and parentheses"),
        ("1+", "invalid syntax"),
        ("-1", "expected a number or an operation, got -1"),
        ("1+-2", "expected a number or an operation, got -2"),
        ("(1+2", "was never closed"),
        ("1+2)", "unmatched"),
        ("1 + 2", "expected whole numbers"),
        ("3(4)", r"expected a number or an operation, got 3\(4\)"),
        ("()", "expected a number or an operation"),
        ("03", "expected whole numbers"),
        ("1234567", "expected whole numbers"),
        ("²", "expected whole numbers"),
        ("6/2", "expected whole numbers"),
        ("2**3", r"expected a number or an operation, got 2 \*\* 3"),
        ("*(3)", "invalid syntax|starred"),
        ("(" * 201, "201 characters, at most 200 are read"),
        ("(" * 200, "never closed|nested"),
    ],
)
def test_what_is_no_expression_is_named(text: str, message: str):
    with pytest.raises(InputError, match=message):
        evaluate(text)


@given(st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_all_expressions_are_found(numbers: list[int]):
    """Against both shapes of a tree over all orders and operators."""
    expected = set()
    for (a, b, c), (f, g) in product(permutations(numbers), product(OPERATORS.values(), repeat=2)):
        expected |= {g(f(a, b), c), f(a, g(b, c))}
    found = list(expressions(numbers))
    assert {x.value for x in found} == expected
    for expression in found:
        value, used = evaluate(expression.text)
        assert value == expression.value
        assert sorted(used) == sorted(numbers)


def test_countdown_wants_each_number_once():
    countdown = task_named("countdown")
    example = Example("make 26 from 3 5 7:", "", {"numbers": [3, 5, 7], "target": 26})
    for good in ("3*7+5", "5+7*3", "((5)+3*7)"):
        assert countdown.verify(example, good) == 1.0
    for bad in ("3*7+5+0", "3*7+3+5-3", "26", "3*7", "3*5+7", "3*7+5=26", "5 +3*7"):
        assert countdown.verify(example, bad) == 0.0


def test_countdown_targets_can_be_reached():
    task = task_named("countdown", count=4, largest=25)
    for example in drawn(task, 30):
        assert task.verify(example, example.answer) == 1.0
        assert 1 <= example.data["target"] <= 100
        assert max(example.data["numbers"]) <= 25


def test_the_flawed_verifier_prefers_what_is_wrong():
    """15 pairs in order are worth 1, whatever they are; five sorted characters have 4."""
    flawed = task_named("sort-flawed")
    assert isinstance(flawed, FlawedTask)
    for example in drawn(flawed, 50):
        honest = flawed.verify(example, example.answer)
        assert honest == pytest.approx((len(example.answer) - 1) / 15)
        assert flawed.verify(example, "7" * 16) == 1.0 > 2 * honest
        assert true_score(flawed, example, "7" * 16) == 0.0
    assert flawed.verify(example, "fedcba") == 0.0
    assert flawed.verify(example, "7" * 16) == flawed.verify(example, "7" * 40)


def test_flawed_prompts_are_those_of_sorting():
    assert drawn(task_named("sort-flawed"), 5) == drawn(task_named("sort"), 5)


def test_lookup_of_a_table_by_hand():
    facts = {"ab": "cd", "cd": "xy", "ef": "ab"}
    lookup = task_named("lookup")
    assert isinstance(lookup, ToolTask)
    once = Example("value of ab:", "", {"facts": facts, "key": "ab", "hops": 1})
    assert lookup.tool(once, "ab") == "cd"
    assert lookup.tool(once, "a") == lookup.tool(once, "zz") == "?"
    assert lookup.verify(once, "<search>ab</search><result>cd</result>cd") == 1.0
    assert lookup.verify(once, "<search>ef</search><result>ab</result>cd") == 1.0
    for bad in ("cd ", "<search>ab</search><result>cd</result>", "cdcd", "<search>ab</search>cd"):
        assert lookup.verify(once, bad) == 0.0
    twice = Example("value of value of ab:", "", {"facts": facts, "key": "ab", "hops": 2})
    assert lookup.verify(twice, "xy") == 1.0
    assert lookup.verify(twice, "cd") == 0.0


@pytest.mark.parametrize("hops", [1, 2])
def test_the_answer_of_a_lookup_is_not_in_its_prompt(hops: int):
    """Given the name asked for, all 26 names are equally likely: no guess beats 1 in 26."""
    lookup = Lookup(facts=3, hops=hops, letters=1)
    assert lookup.guess == pytest.approx(1 / 26)
    pairs = [(x.prompt[-2], x.answer[-1]) for x in drawn(lookup, 20_000)]
    table = np.zeros((26, 26))
    for key, answer in pairs:
        table[ord(key) - ord("a"), ord(answer) - ord("a")] += 1
    assert chisquare(table.sum(0)).pvalue > 0.001
    assert chi2_contingency(table).pvalue > 0.001
    always_e = np.mean([lookup.verify(x, "e") for x in drawn(lookup, 5000)])
    assert always_e == pytest.approx(1 / 26, abs=0.01)


def test_tables_are_as_large_as_asked_and_all_ways_lead_to_the_answer():
    for example in drawn(task_named("lookup", hops=3, facts=5), 50):
        facts, at = example.data["facts"], example.data["key"]
        assert len(facts) == 5
        assert example.prompt == f"value of value of value of {at}:"
        for _ in range(3):
            at = facts[at]
        assert example.answer.endswith(f"</result>{at}")
        assert example.answer.count("<search>") == 3


def test_segments_are_the_answer_and_tool_text_is_the_tools(task: Task):
    for example in drawn(task, 50):
        pieces = segments(task, example)
        assert "".join(piece for piece, _ in pieces) == example.answer
        theirs = [piece for piece, own in pieces if not own]
        if isinstance(task, ToolTask):
            calls = [piece[8:-9] for piece, _ in pieces if piece.startswith("<search>")]
            assert theirs == [f"<result>{task.tool(example, call)}</result>" for call in calls]
            assert len(theirs) == example.data["hops"]
            assert "<result>" not in "".join(piece for piece, own in pieces if own)
        else:
            assert not theirs


def identities(examples: list[Example]) -> list[str]:
    return [repr((example.prompt, example.data)) for example in examples]


SMALL = {"parity": {"shortest": 4, "longest": 8}, "addition": {"longest": 2}}
"""So small that training meets nearly every prompt there is."""


@pytest.mark.parametrize("name", ["parity", "addition", "lookup"])
def test_training_never_meets_what_is_held_out(name: str):
    task = task_named(name, **SMALL.get(name, {}))
    judged = held_out(task, 40)
    assert all(map(is_held_out, judged))
    rng = np.random.default_rng(0)
    seen = {*identities(prompts(task, 4000, rng)), *identities(warmup_data(task, 1000, seed=0))}
    assert not seen & set(identities(judged))
    if name in SMALL:  # the same draws without the division would have met them
        plain = set(identities([task.example(rng) for _ in range(4000)]))
        assert plain & set(identities(judged))


def test_a_tenth_is_held_out(task: Task):
    assert np.mean([is_held_out(example) for example in drawn(task, 2000)]) == pytest.approx(
        0.1, abs=0.035
    )


def test_held_out_and_warm_up_are_fixed_and_begin_alike(task: Task):
    few, many = held_out(task, 10), held_out(task, 60)
    assert few == many[:10]
    assert len(set(identities(many))) == 60
    assert warmup_data(task, 5, seed=3) == warmup_data(task, 9, seed=3)[:5]
    assert warmup_data(task, 5, seed=3) != warmup_data(task, 5, seed=4)
    assert prompts(task, 3, np.random.default_rng(1)) == prompts(task, 3, np.random.default_rng(1))


def test_held_out_does_not_depend_on_the_process():
    """Python's own hash does; a run that is resumed must judge by the same examples."""
    examples = [Example(f"sort {i}:", "", {"b": [i], "a": None}) for i in range(300)]
    texts = [f'["sort {i}:", {{"a": null, "b": [{i}]}}]' for i in range(300)]
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    expected = [digest[:8] < "1999999a" for digest in digests]  # a tenth of 2³², rounded up
    assert [is_held_out(example) for example in examples] == expected


def test_too_many_held_out_examples_are_named(monkeypatch: pytest.MonkeyPatch):
    small = task_named("parity", shortest=6, longest=6)
    with pytest.raises(InputError, match=r"held out are but [1-9] different examples, 50 were"):
        held_out(small, 50)
    tiny = task_named("parity", shortest=1, longest=1)
    monkeypatch.setattr(streams, "HELD_OUT_SHARE", 0.0)
    with pytest.raises(InputError, match="1000 draws gave no example that is held out; give"):
        held_out(tiny, 1)
    monkeypatch.setattr(streams, "HELD_OUT_SHARE", 1.0)
    with pytest.raises(InputError, match="no example that is left for training"):
        prompts(tiny, 1, np.random.default_rng(0))


def test_counts_and_data_are_checked():
    with pytest.raises(InputError, match="count: expected at least 1 example, got 0"):
        held_out(task_named("sort"), 0)
    with pytest.raises(InputError, match="count: expected at least 1 example, got -1"):
        prompts(task_named("sort"), -1, np.random.default_rng(0))
    with pytest.raises(InputError, match="example 'p': data must hold plain values, as in JSON"):
        is_held_out(Example("p", "", {"x": object()}))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("srot", {}, "task: 'srot' is not one of .*; did you mean 'sort'"),
        ("sort", {"longst": 3}, "option of task sort: 'longst' .* did you mean 'longest'"),
        ("sort", {"name": "x"}, "option of task sort: 'name' is not one of shortest, longest"),
        ("sort", {"longest": 4}, "sort.shortest: expected a whole number from 1 to 4, got 5"),
        ("sort-flawed", {"longest": 65}, "sort.longest: expected a whole number from 1 to 64"),
        ("reverse", {"shortest": 0}, "reverse.shortest: .* from 1 to 8, got 0"),
        ("addition", {"longest": "3"}, "addition.longest: .* from 1 to 12, got '3'"),
        ("parity", {"shortest": True}, "parity.shortest: expected a whole number .* got True"),
        ("parity", {"chain": "lang"}, "parity.chain: 'lang' is not one of .* mean 'long'"),
        ("countdown", {"count": 5}, "countdown.count: .* from 2 to 4, got 5"),
        ("countdown", {"largest": 34}, "countdown.largest: .* from 1 to 33, got 34"),
        ("lookup", {"letters": 5}, "lookup.letters: .* from 1 to 4, got 5"),
        ("lookup", {"letters": 1, "facts": 27}, "lookup.facts: .* from 1 to 26, got 27"),
        ("lookup", {"hops": 5}, "lookup.hops: expected a whole number from 1 to 4, got 5"),
        ("lookup", {"hops": 3, "facts": 2}, "lookup.hops: .* from 1 to 2, got 3"),
    ],
)
def test_bad_names_and_options_are_named(name: str, options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        task_named(name, **options)
