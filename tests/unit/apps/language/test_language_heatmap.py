"""The heat-map of tokens: what it says, what it lets through, and how it is written."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.apps.language import heatmap
from keel.apps.language.heatmap import (
    TokenTable,
    checked,
    page_rows,
    peaks,
    total,
    write_heatmap,
)
from keel.apps.language.heatmap_page import level, number, page, plain
from keel.apps.language.heatmap_style import LEVELS, mix, shades
from keel.errors import InputError
from keel.look import BLUE, INK, ORANGE
from keel.tracking import RunError


def table(**changes: Any) -> TokenTable:
    """Two completions: one of four tokens, the third from a tool; one of two, two of padding."""
    base = TokenTable(
        run="lookup",
        step=1200,
        prompts=["ask k?\n", "ask m?\n"],
        tokens=[["a", " ", "tool", "b"], ["c", "d"]],
        weight=np.array([[1, 1, 0, 1], [1, 1, 0, 0]], np.float32),
        reward=np.array([1.0, 0.0]),
        kl_old_new=np.array([[0.1, 0.0, 9.0, 0.4], [0.2, 0.0, 9.0, 9.0]]),
        log_ratio=np.array([[0.5, 0.0, 9.0, -2.0], [0.1, 0.0, 0.0, 0.0]]),
        clipped=np.array([[0, 0, 1, 1], [0, 0, 0, 0]], bool),
    )
    return replace(base, **changes)


def html(**changes: Any) -> str:
    return page(checked(table(**changes)), max_tokens=1000)


class Seen(HTMLParser):
    """Tags, attributes and texts, as a browser takes them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def token(self, row: int, position: int) -> dict[str, str | None]:
        (found,) = [a for _, a in self.tags if a.get("id") == f"t{row}-{position}"]
        return found


def test_totals_by_hand():
    """0.1 + 0.4 + 0.2 over five tokens that count, in two sequences; tool and padding left out."""
    found = total(table().kl_old_new, table().weight)
    assert found.per_token == pytest.approx(0.7 / 5)
    assert found.per_sequence == pytest.approx(0.7 / 2)
    text = Seen(html()).text
    assert "0.14" in text
    assert "nats a token; 0.35 a completion" in text


def test_tokens_that_are_not_finite_are_counted_and_left_out():
    kl = np.array([[np.nan, 0.0, 9.0, 0.4], [np.inf, 0.0, 9.0, np.nan]])
    found = total(kl, table().weight)
    assert found == (pytest.approx(0.4 / 3), pytest.approx(0.4 / 2), 2)
    seen = Seen(html(kl_old_new=kl))
    assert "not finite: 2" in seen.text
    assert "ax" in (seen.token(0, 0)["class"] or "").split()


def test_the_peaks_are_the_largest_that_count():
    found = peaks(table())
    assert [(p.row, p.position) for p in found] == [(0, 3), (1, 0), (0, 0)]
    assert [p.share for p in found] == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert len(peaks(table(), count=1)) == 1


def test_what_is_not_finite_comes_first_among_the_peaks():
    kl = np.array([[0.1, np.nan, 9.0, 0.4], [0.2, 0.0, 9.0, 9.0]])
    found = peaks(table(kl_old_new=kl))
    assert (found[0].row, found[0].position) == (0, 1)
    assert np.isnan(found[0].share)
    assert found[1].share == pytest.approx(4 / 7)


def test_a_masked_token_is_no_peak_even_if_it_is_infinite():
    kl = np.array([[0.1, 0.0, np.inf, 0.4], [0.2, 0.0, 9.0, 9.0]])
    assert peaks(table(kl_old_new=kl)) == peaks(table())
    assert page_rows(table(kl_old_new=kl), 4) == [0]


def test_weights_count_in_the_peaks():
    weight = np.array([[1, 1, 0, 0.1], [1, 1, 0, 0]])
    first = peaks(table(weight=weight))[0]
    assert (first.row, first.position) == (1, 0)


def test_an_update_that_moved_nothing_says_so():
    assert "nothing moved" in html(kl_old_new=np.zeros((2, 4)))
    assert peaks(table(kl_old_new=np.zeros((2, 4)))) == []


def test_the_table_shows_context_and_links_to_the_token():
    seen = Seen(html())
    links = [a["href"] for tag, a in seen.tags if tag == "a"]
    assert links == ["#t0-3", "#t1-0", "#t0-0"]
    assert "ask k?↵a toolb57.1%" in seen.text  # prompt, tokens, then its share
    assert "These 3 of 5 tokens carry 100% of it." in seen.text


def test_masked_tokens_are_hatched_whatever_they_measure():
    seen = Seen(html())
    assert seen.token(0, 2)["class"] == "t off"
    assert "masked: not trained on" in (seen.token(0, 2)["data-told"] or "")
    assert "2 × padding" in seen.text
    assert "repeating-linear-gradient" in html()


def test_a_token_tells_its_numbers():
    told = Seen(html()).token(0, 3)["data-told"] or ""
    assert told.splitlines()[0] == "b   completion 1, token 4"
    numbers = [line.split() for line in told.splitlines()[1:]]
    assert numbers == [
        ["KL(old‖new)", "0.4", "nats"],
        ["log-ratio", "−2", "nats"],
        ["clipped", "yes"],
    ]


def test_levels_follow_the_measures():
    """0.4 is the largest KL; √(0.1/0.4) is half way; −2 is the end of the other colour."""
    seen = Seen(html())
    assert (seen.token(0, 3)["class"] or "").split() == ["t", "a12", "bm10", "c1", "d1"]
    assert (seen.token(0, 0)["class"] or "").split() == ["t", "a6", "b5", "d1"]


def test_measures_that_are_missing_have_no_button():
    labels = re.findall(r"<label for=m\d>([^<]*)</label>", html())
    assert labels == ["KL(old‖new)", "log-ratio", "clipped", "masked"]
    full = html(kl_reference=np.ones((2, 4)), entropy=np.ones((2, 4)), advantage=np.ones((2, 4)))
    assert len(re.findall("<label", full)) == 7


def test_every_button_shows_its_own_legend_and_colours():
    text = html()
    for index, letter in enumerate("abcd"):
        assert f"id=m{index}" in text
        assert f"#m{index}:checked~main .l{index} {{ display: flex; }}" in text
        assert f"#m{index}:checked~main .{letter}" in text
    assert text.count(" checked>") == 1


HOSTILE = "<script>alert('x')</script><img src=x onerror=y>\"'&"


def test_what_comes_from_outside_is_escaped():
    text = html(
        run=HOSTILE, prompts=[HOSTILE, "x"], tokens=[["<script>", HOSTILE, "", "b"], ["c", "d"]]
    )
    seen = Seen(text)
    tags = {tag for tag, _ in seen.tags}
    assert not tags & {"script", "img"}
    assert "<script" not in text
    assert (seen.token(0, 0)["data-told"] or "").startswith("<script>   completion 1")
    assert HOSTILE in seen.text


def test_nothing_is_loaded_and_only_this_style_is_allowed():
    text = html()
    sheet = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    (policy,) = [
        a["content"] for _, a in Seen(text).tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in sheet
    assert "@import" not in sheet
    for _, attributes in Seen(text).tags:
        assert not {"src", "style", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")


@given(st.text(st.characters(), max_size=20))
def test_any_token_can_be_written(text: str):
    """Lone surrogates, control and direction marks included; nothing of it acts."""
    tokens = [[text, "x", "y", "z"], ["c", "d"]]
    result = html(tokens=tokens, run=text, prompts=[text, text])
    result.encode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", result)
    seen = Seen(result)
    assert sum(tag == "script" for tag, _ in seen.tags) == 0
    assert sum("data-told" in attributes for _, attributes in seen.tags) == 6


def test_blanks_and_line_breaks_are_seen():
    text = html(tokens=[[" ", "\n", "", "\t"], ["c", "d"]])
    seen = Seen(text)
    for sign in "␣↵∅⇥":
        assert sign in seen.text
    assert "↵</span><br>" in text
    assert plain("\u202e") == "\\u202e"


@given(st.floats(0, 1e6), st.floats(1e-9, 1e6))
def test_levels_grow_with_the_size_and_never_leave_the_scale(x: float, top: float):
    assert 0 <= level(x, top, 12) <= 12
    assert level(-x, top, 12) == -level(x, top, 12)
    assert level(top, top, 12) == 12
    assert level(x, 0.0, 12) == 0
    assert level(x / 2, top, 12) <= level(x, top, 12)


@pytest.mark.parametrize("kind", LEVELS)
def test_ink_is_readable_on_every_colour(kind: str):
    """WCAG 2: a contrast of 4.5 to 1 for text."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for _, colour in shades(kind):
        assert (light(colour) + 0.05) / (light(INK) + 0.05) > 4.5


def test_colours_are_those_of_keel():
    assert (mix(BLUE, 1.0), mix(ORANGE, 1.0), mix(ORANGE, 0.0)) == (BLUE, ORANGE, "#ffffff")


def test_numbers_have_three_digits_and_a_true_minus():
    assert [number(x) for x in (0.123456, -0.001, 1234.0, float("inf"), float("nan"))] == [
        "0.123",
        "−0.001",
        "1.23e+03",
        "∞",
        "not a number",
    ]


def test_completions_beyond_the_limit_are_left_out_by_their_kl():
    kl = np.array([[0.0, 0.0, 9.0, 0.1], [0.2, 0.0, 9.0, 9.0]])
    wide = checked(table(kl_old_new=kl))
    assert page_rows(wide, 1000) == [0, 1]
    assert page_rows(wide, 4) == [1]
    assert page_rows(wide, 1) == [1]  # one is always shown
    text = page(wide, max_tokens=4)
    assert "1 of 2 completions are left out" in text
    assert "Completion 1<" not in text
    assert "1, token 4" in text  # still in the table, without a link
    assert "#t0-3" not in text


def test_tensors_are_taken_too(tmp_path: Path):
    write_heatmap(
        table(weight=torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]), reward=torch.ones(2)),
        tmp_path / "deep" / "page.html",
    )
    assert "lookup · step 1,200" in (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": np.ones(4)}, r"weight: expected \[B, L\], got shape \[4\]"),
        ({"weight": -np.ones((2, 4))}, "weight: expected numbers of 0 or more"),
        ({"weight": np.full((2, 4), np.nan)}, "weight: expected numbers of 0 or more"),
        ({"weight": np.ones((2, 4))}, "weight: row 1 has 2 tokens; expected 0 after them"),
        ({"weight": [["a"]]}, "weight: expected numbers, got list"),
        ({"reward": np.ones(3)}, r"reward: expected shape \[2\] \(that of weight\), got \[3\]"),
        ({"kl_old_new": np.ones((2, 3))}, r"kl_old_new: expected shape \[2, 4\]"),
        ({"clipped": np.ones((4, 2))}, r"clipped: expected shape \[2, 4\]"),
        ({"prompts": ["a"]}, r"prompts: expected 2 \(the rows of weight\), got 1"),
        ({"tokens": [["a"]]}, "tokens: expected 2"),
        ({"tokens": [["a"] * 5, []]}, "tokens: row 0 has 5 tokens, weight 4 columns"),
        (
            {"kl_old_new": np.array([[0.1, -0.3, 0, 0], [0, 0, 0, 0]])},
            "kl_old_new: -0.3 at row 0, token 1; a KL is never below 0",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        write_heatmap(table(**changes), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_negative_kl_on_a_masked_token_or_from_rounding_passes():
    checked(table(kl_old_new=np.array([[0.1, -1e-6, -5.0, 0.4], [0.2, 0.0, 0.0, 0.0]])))


def test_a_page_needs_room_for_a_token():
    with pytest.raises(InputError, match="max_tokens: expected at least 1, got 0"):
        page_rows(table(), 0)


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "page.html"
    write_heatmap(table(), place)
    before = place.read_bytes()

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heatmap, "replace_file", full)
    with pytest.raises(RunError, match=r"page.html: cannot be written: No space left"):
        write_heatmap(table(step=1), place)
    assert place.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["page.html"]
