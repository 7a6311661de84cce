"""Options of an environment's constructor, from the command line and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.apps.language import config as language
from keel.cli.arguments import translate
from keel.cli.environments import parse
from keel.config import Config, Envs, from_dict, load, named_values, options, to_dict
from keel.config.values import in_text
from keel.errors import InputError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("size=8,maps=held_out", {"size": 8, "maps": "held_out"}),
        ("a=1e-3, b=1e6, c=2.5, d=-3", {"a": 1e-3, "b": 1e6, "c": 2.5, "d": -3}),
        ("slippery=false, seed=null", {"slippery": False, "seed": None}),
        ('a={"b": [1, 2]}', {"a": {"b": [1, 2]}}),
        ("a={b: [1, {c: 2e3}]}, d=[x, y]", {"a": {"b": [1, {"c": 2000.0}]}, "d": ["x", "y"]}),
        ("text=\"one, two\", other='a]b'", {"text": "one, two", "other": "a]b"}),
        ('text="a \\" b, c"', {"text": 'a " b, c'}),
        ("name=it's, n=1", {"name": "it's", "n": 1}),
        ("rule=a=b", {"rule": "a=b"}),
    ],
)
def test_values_may_be_nested(text: str, values: dict[str, Any]) -> None:
    assert named_values(text, "envs.options") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=[1", r"envs\.options: ']' is missing at the end of 'a=\[1'"),
        ('a={"b": [1, 2}', r"envs\.options: '}' closes nothing in"),
        ("a=1]", r"envs\.options: ']' closes nothing in"),
        ('a="x', r"envs\.options: '\"' is missing at the end"),
        ("a", r"envs\.options: expected name=value, got 'a'"),
        ("a=1, 2", r"envs\.options: expected name=value, got '2'"),
        ("a=1, a=2", r"envs\.options: a is given twice"),
        ("a={b: c: d}", r"envs\.options: a={b: c: d} cannot be read"),
        ("a=[&x [1, 2], *x]", r"envs\.options: a=\[&x \[1, 2\], \*x\] cannot be read \(aliases"),
        ("a=!!python/name:os.system", r"envs\.options: a=!!python.* cannot be read"),
    ],
)
def test_bad_syntax_is_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        from_dict({"envs": {"options": text}})
    assert "\n" not in str(caught.value)


def test_a_mapping_in_a_file_is_the_same_as_the_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("envs:\n  options:\n    a:\n      b: [1, 2]\n    c: 'x, y'\n    d: true\n")
    config = load(path)
    assert options(config) == {"a": {"b": [1, 2]}, "c": "x, y", "d": True}
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("written", [{"size": 8, "maps": ["a", "b"]}, "size=8, maps=[a, b]"])
def test_mappings_and_text_are_the_same_setting(written: Any) -> None:
    config = from_dict({"envs": {"options": written}})
    assert config.envs.options == {"size": 8, "maps": ["a", "b"]}
    task = language.from_dict({"task": "sort", "task_options": written})
    assert task.task_options == config.envs.options
    assert Envs(options=written) == config.envs
    assert hash(config) == hash(from_dict({"envs": {"options": written}}))


@pytest.mark.parametrize(
    "written", [["tensorboard", "wandb"], "tensorboard, wandb", "tensorboard,wandb,"]
)
def test_lists_and_commas_are_the_same_setting(written: Any) -> None:
    assert from_dict({"log": written}).log == ("tensorboard", "wandb")
    assert Config(log=written).log == ("tensorboard", "wandb")
    assert language.from_dict({"log": written}).log == ("tensorboard", "wandb")
    assert language.Reward(functions="a:b, task*2").functions == ("a:b", "task*2")  # type: ignore


@pytest.mark.parametrize("read", [from_dict, language.from_dict])
def test_lists_of_something_else_are_one_line(read: Any) -> None:
    with pytest.raises(InputError, match=r"^log: expected text, got 3$"):
        read({"log": [3]})
    with pytest.raises(InputError, match=r"^log: expected a list of texts, got 3$"):
        read({"log": 3})
    with pytest.raises(InputError, match=r"^log: 'wand' is not one of .*did you mean 'wandb'"):
        read({"log": ["wand"]})
    with pytest.raises(InputError, match=r"options: expected names and values, got \[1\]$"):
        read({"envs": {"options": [1]}} if read is from_dict else {"task_options": [1]})


@pytest.mark.parametrize(
    "flags",
    [
        ["--log", "tensorboard", "wandb", "--envs.options", "size=8", "maps=[a, b]"],
        ["--log", "tensorboard,wandb", "--envs.options", "size=8,maps=[a, b]"],
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_takes_commas_and_words(flags: list[str], first: bool) -> None:
    words = ["CartPole-v1", *flags] if first else [*flags, "CartPole-v1"]
    config = parse(translate(words)).config
    assert (config.env, config.log) == ("CartPole-v1", ("tensorboard", "wandb"))
    assert config.envs.options == {"size": 8, "maps": ["a", "b"]}


def test_runs_of_version_01_are_compared_by_what_their_text_means(tmp_path: Path) -> None:
    old = in_text("envs.options", 'size=8,maps="a"')
    assert old == in_text("envs.options", {"size": 8, "maps": "a"})
    assert in_text("task_options", "") == in_text("task_options", {}) == ""
    assert in_text("log", "wandb,trackio") == in_text("log", ["wandb", "trackio"])
    assert in_text("envs.options", "not like this") == "not like this"


def test_aliases_that_stand_for_gigabytes_are_refused(tmp_path: Path) -> None:
    lines = ["envs:", "  options:", "    a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 6):
        lines += [f"    a{level}: &a{level}", *[f"      - *a{level - 1}"] * 10]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"a\d must be .* \(larger than 1 MiB\)"):
        load(path)


@pytest.mark.parametrize("values", [{"a": object()}, {"a": float("nan")}, {"a b": 1}, {3: 1}])
def test_what_cannot_be_written_down_is_refused(values: dict[Any, Any]) -> None:
    with pytest.raises(InputError, match=r"envs\.options: "):
        from_dict({"envs": {"options": values}})
