"""Whatever a settings file holds: a configuration, or one line that says why not."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from keel import config as rl
from keel.apps.language import config as language
from keel.errors import KeelError

EXAMPLES = 2_000 // 4
"""Examples of each of the four tests with random input: 2,000 together."""


def leaves(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every field of a dataclass of settings."""
    paths: list[tuple[str, ...]] = []
    for field in dataclasses.fields(value):
        content, path = getattr(value, field.name), (*prefix, field.name)
        paths += leaves(content, path) if dataclasses.is_dataclass(content) else [path]
    return paths


PATHS = {"rl": leaves(rl.Config()), "language": leaves(language.Language())}
PATHS["language"] += [("kl_ctrl", "type"), ("kl_ctrl",), ("state_masking",), ("kl",), ("sample",)]
PATHS["rl"] += [("region",), ("envs",), ("nope",)]
READ: dict[str, Callable[[Any], Any]] = {"rl": rl.from_dict, "language": language.from_dict}
WRITE: dict[str, Callable[[Any], Any]] = {"rl": rl.to_dict, "language": rl.to_dict}

WORDS = """
auto none both 1e6 1e400 -1 nan 0.5 a=[1 a=1 meta cpu tensorboard = a:b ppo trpo k3 foo
""".split()  # noqa: SIM905
HUGE = [10**30, -(10**400), 2**63, 2**64, 1e308, 1e-320, 10**18]
PIECES = r"""
env region kl seed : - { } [ ] , !!int !!float !!bool !!timestamp !!binary !!set !!omap !!pairs
!!null "abc" ' " &a *a <<: 2020-99-99 2020-01-01 0x 1:99 .inf .nan 1e6 ~ | > # %YAML --- ... ? =
""".split()  # noqa: SIM905

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from(HUGE),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=8),
    st.dates(),
    st.datetimes(),
    st.sampled_from([*WORDS, "\ud800", "a\nb", "x" * 5000]),
)
keys = st.one_of(st.text(max_size=8), st.integers(), st.none(), st.dates())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def documents(draw: st.DrawFn, kind: str) -> dict[Any, Any]:
    """Settings with real names and any values, and now and then a name that does not exist."""
    document: dict[Any, Any] = {}
    for path in draw(st.lists(st.sampled_from(PATHS[kind]), max_size=4)):
        place = document
        for name in path[:-1]:
            below = place.setdefault(name, {})
            place = below if isinstance(below, dict) else {}
        name = path[-1]
        place[name.replace("_", "-") if draw(st.booleans()) else name] = draw(values)
    if draw(st.integers(0, 9)) == 0:
        document[draw(keys)] = draw(values)
    return document


def read_or_refuse(kind: str, read: Callable[[], Any]) -> Any:
    """The configuration, or None after an error that is one short line."""
    try:
        config = read()
    except KeelError as error:
        message = str(error)
        assert message
        assert len(message) < 700
        assert message.isprintable()
        return None
    WRITE[kind](config)
    return config


@pytest.mark.parametrize("kind", ["rl", "language"])
def test_structured_settings_are_read_or_refused_in_one_line(kind: str) -> None:
    @given(documents(kind))
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    def run(document: dict[Any, Any]) -> None:
        config = read_or_refuse(kind, lambda: READ[kind](document))
        if config is not None:
            assert config.iterations >= 1
            assert isinstance(config.log, tuple)
            again = yaml.safe_load(yaml.safe_dump(WRITE[kind](config)))
            assert WRITE[kind](READ[kind](again)) == WRITE[kind](config)

    run()


pieces = st.sampled_from([*PIECES, " ", ": ", "\n", "\n  ", "\t", "\x00", "\x85", "\ufeff"])
texts = st.lists(pieces | st.text(max_size=4), max_size=14).map("".join)


@pytest.mark.parametrize("kind", ["rl", "language"])
def test_any_bytes_of_a_file_are_read_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"

    @given(st.one_of(texts.map(lambda text: text.encode("utf-8", "replace")), st.binary()))
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    def run(data: bytes) -> None:
        path.write_bytes(data)
        read_or_refuse(kind, lambda: READ[kind](rl.read(path)))

    run()


@pytest.mark.parametrize("kind", ["rl", "language"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"env: 2020-99-99\n", "month must be in 1..12"),
        (b'seed: !!int "abc"\n', "invalid literal for int"),
        (b"seed: !!bool maybe\n", "not plain YAML"),
        (b"seed: !!timestamp now\n", "not plain YAML"),
        (b"seed: [1\n", "line 2: not plain YAML (expected ',' or ']'"),
        (b"env: \xff\xfe\n", "not UTF-8 text (byte 0xff at position 5)"),
        (b"a: " + b"[" * 2000, "nested too deeply"),
        (b"threads: 1e8\n", "threads: expected at most 1,024, got 100,000,000"),
        (b"seed: 1e30\n", "seed: expected at most 9,223,372,036,854,775,807"),
        (b"tag: \"a\\nb\"\n", "tag: expected text on one line"),
        (b"x" * (1 << 20) + b": 1", "larger than 1 MiB"),
        (b"- a\n", "expected keys and values, got list"),
        (b"? [1]\n: 2\n", "not plain YAML"),
        (b"log: nope\n", "log: 'nope' is not one of tensorboard"),
    ],
)  # fmt: skip
def test_files_that_used_to_end_in_a_traceback(
    kind: str, text: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(text)
    with pytest.raises(KeelError) as caught:
        READ[kind](rl.read(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_keep_every_digit() -> None:
    assert rl.from_dict({"seed": 2**53 + 1}).seed == 2**53 + 1
    assert rl.from_dict({"seed": str(2**53 + 1)}).seed == 2**53 + 1


@pytest.mark.parametrize(
    "options", ["a=[1", "a={", "a", "=1", "a=!!int x", "a=2020-99-99", "a=!!bool x"]
)
def test_options_that_cannot_be_read_are_refused_with_their_field(options: str) -> None:
    with pytest.raises(KeelError, match=r"^envs\.options: "):
        rl.from_dict({"envs": {"options": options}})
    with pytest.raises(KeelError, match=r"^task_options: "):
        language.from_dict({"task_options": options})


def test_a_number_of_more_digits_than_python_writes_is_refused() -> None:
    with pytest.raises(KeelError, match="seed: expected"):
        rl.from_dict({"seed": int("f" * 6000, 16)})


def test_dates_and_bytes_are_no_text() -> None:
    for value in (datetime.date(2020, 1, 1), b"CartPole-v1", math.inf):
        with pytest.raises(KeelError, match="env: expected text, got"):
            rl.from_dict({"env": value})
