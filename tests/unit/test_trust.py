"""Trust in code that files name: what counts as foreign, and what is remembered."""

from __future__ import annotations

import dataclasses
import errno
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import gymnasium
import pytest

from keel.apps.language.config import Language
from keel.config import Config
from keel.trust import (
    Reference,
    TrustWarning,
    UntrustedCodeError,
    code_in,
    is_remembered,
    remember,
    require_trust,
    trust_folder,
)

FOREIGN = {
    "env": "toys:Env",
    "envs": {
        "options": "level=3, teacher=other.toys:Teacher-v0",
        "wrappers": ["gymnasium.wrappers:ClipReward", "toys:Wrap"],
    },
    "network": {"kind": "toys:make", "distribution": "toys:spread"},
    "region": {"loss": "toys:loss"},
    "controllers": ["toys:one", "mine, toys:two"],
    "advantage": {"estimator": "toys:advantage", "group": "toys:by_level"},
    "algo": "toys:estimate",
    "task": "toys:Task",
    "reward": {"functions": "task*0.5, toys:score*0.2,toys:length"},
}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "state"
    monkeypatch.setenv("KEEL_STATE_DIR", str(place))
    monkeypatch.chdir(tmp_path)
    return place


def test_every_field_that_names_code_is_listed() -> None:
    assert [str(reference) for reference in code_in(FOREIGN)] == [
        "env toys:Env (level=3, teacher=other.toys:Teacher-v0)",
        "envs.wrappers toys:Wrap",
        "envs.options other.toys:Teacher-v0",
        "network.kind toys:make",
        "network.distribution toys:spread",
        "region.loss toys:loss",
        "controllers toys:one",
        "controllers toys:two",
        "advantage.estimator toys:advantage",
        "advantage.group toys:by_level",
        "algo toys:estimate",
        "task toys:Task",
        "reward.functions toys:score",
        "reward.functions toys:length",
    ]


DATA = {
    "device", "tag", "log", "task_options", "demos.path", "model.path", "kl.reward",
    "kl.loss",
}  # fmt: skip
"""Texts that choose among Keel's own names, or name files that are read as data."""


@pytest.mark.parametrize("config", [Config(), Language()], ids=["environments", "tokens"])
def test_every_setting_that_is_free_text_is_known_to_name_code_or_not(config: Any) -> None:
    """A new one must be added here, and to `keel.trust` if it names code."""

    def texts(part: Any, prefix: str = "") -> Iterator[str]:
        for field, hint in get_type_hints(type(part)).items():
            value, name = getattr(part, field), f"{prefix}{field}"
            if dataclasses.is_dataclass(value):
                yield from texts(value, f"{name}.")
            elif hint in (str, str | None, tuple[str, ...]):
                yield name

    code = {reference.field for reference in code_in(FOREIGN)}
    assert set(texts(config)) <= code | DATA


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "Breakout",
        "ALE/Pong-v5",
        "ale_py:ALE/Pong-v5",
        "land",
        "serving",
        "envpool:Pendulum-v1",
        "simple_spread",
        "keel.apps.land.vector:parallel_env",
        "keel.apps.demonstrations.sparse:HalfCheetahFar-v0",
        "mpe2.simple_spread_v3:parallel_env",
        "pettingzoo.butterfly.pistonball_v6:parallel_env",
        "gymnasium:CartPole-v1",
        "gymnasium.envs.classic_control:CartPole-v1",
        "NoSuchThing-v3",
        "language",
        "",
    ],
)
def test_names_of_registries_are_nobodys_code(env: str) -> None:
    assert code_in({"env": env}) == []


@pytest.mark.parametrize(
    "env",
    [
        "subprocess:getoutput",
        "toys:Env-v0",
        "toys:CartPole-v1",
        "keel.__main__:X-v0",
        "keel.cli:main",
        "keel.apps.land.rendering:write_gif",
        "pettingzoo.evil:parallel_env",
        "mpe2.evil:parallel_env",
        "mpe2.simple_v3:os",
        "ale_py:Env-v0",
        "a:b:C-v0",
    ],
)
def test_other_names_are_foreign(env: str) -> None:
    assert code_in({"env": env}) == [Reference("env", env)]


@pytest.mark.parametrize(
    ("package", "env"),
    [
        ("mpe2", "mpe2.simple_spread_v3:parallel_env"),
        ("mpe2", "simple_spread"),
        ("pettingzoo", "pettingzoo.butterfly.pistonball_v6:parallel_env"),
        ("ale_py", "ALE/Pong-v5"),
        ("ale_py", "ALE/Pong-v4"),
        ("ale_py", "Breakout"),
        ("envpool", "envpool:Pendulum-v1"),
    ],
)
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_package_of_the_working_directory_is_no_registry(
    package: str, env: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert code_in({"env": env}) == []
    place = tmp_path / file.format(package)
    place.parent.mkdir(exist_ok=True)
    place.touch()
    assert code_in({"env": env}) == [Reference("env", env)]
    assert code_in({"env": "CartPole-v1"}) == []


def test_an_id_is_known_with_the_package_that_registered_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Own-v0", entry_point="own_package.envs:Own")
    monkeypatch.setitem(gymnasium.registry, "Own-v0", spec)
    assert code_in({"env": "own_package:Own-v0"}) == []
    assert code_in({"env": "other_package:Own-v0"}) != []


def test_functions_of_keels_own_plans_are_known() -> None:
    assert code_in({"advantage": {"group": "keel.ablate.groups:by_environment"}}) == []
    assert code_in({"reward": {"functions": "task*2"}}) == []


@pytest.mark.parametrize("value", ["azure.csv", "http://10.0.0.1:80", "12:30", "3", "true"])
def test_options_that_are_data_name_no_code(value: str) -> None:
    assert code_in({"env": "serving", "envs": {"options": f"x={value}"}}) == []


def test_the_refusal_lists_everything_on_one_line() -> None:
    with pytest.raises(UntrustedCodeError) as caught:
        require_trust(FOREIGN, "runs/theirs")
    message = str(caught.value)
    assert message.startswith("runs/theirs: names code from outside of Keel")
    assert all(str(reference) in message for reference in code_in(FOREIGN))
    assert "add --trust-code (Python: trust_code=True)" in message
    assert "\n" not in message


def test_a_refusal_does_not_steer_the_terminal() -> None:
    with pytest.raises(UntrustedCodeError) as caught:
        require_trust({"env": "toys:Env\x1b[2J\n\rsafe"}, "x")
    assert str(caught.value).isprintable()


def test_trust_is_given_by_the_flag_or_by_typing_the_name() -> None:
    require_trust(FOREIGN, "x", trust_code=True)
    typed = {
        "env": "toys:Env",
        "envs.options": "level=3, teacher=other.toys:Teacher-v0",
        "envs.wrappers": "toys:Wrap",
        "network.kind": "toys:make",
        "network.distribution": "toys:spread",
        "region.loss": "toys:loss",
        "controllers": "toys:one,toys:two",
        "advantage.estimator": "toys:advantage",
        "advantage.group": "toys:by_level",
        "algo": "toys:estimate",
        "task": "toys:Task",
        "reward.functions": "toys:score*.2,toys:length",
    }
    require_trust(FOREIGN, "x", typed=list(typed.values()))
    for missing in typed:
        rest = [word for name, word in typed.items() if name != missing]
        with pytest.raises(UntrustedCodeError):
            require_trust(FOREIGN, "x", typed=rest)


def test_only_what_will_be_imported_is_asked_about() -> None:
    require_trust({"advantage": {"group": "toys:g"}}, "x", fields=("env", "envs.options"))
    with pytest.raises(UntrustedCodeError):
        require_trust({"advantage": {"group": "toys:g"}}, "x")


def test_what_this_user_trained_with_is_remembered() -> None:
    remember(FOREIGN)
    require_trust(FOREIGN, "x")
    for changes in (
        {"env": "toys:Other"},
        {"envs": {"options": "level=4"}},
        {"advantage": {"group": "toys:other"}},
        {"reward": {"functions": "toys:score,toys:other"}},
    ):
        with pytest.raises(UntrustedCodeError):
            require_trust({**FOREIGN, **changes}, "x")


def test_a_module_of_the_same_name_elsewhere_is_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that brings a `toys.py` of its own is not what was trained with."""
    for folder in ("mine", "theirs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "toys.py").write_text("")
    config = {"env": "toys:Env"}
    monkeypatch.chdir(tmp_path / "mine")
    remember(config)
    require_trust(config, "x")
    monkeypatch.chdir(tmp_path / "theirs")
    with pytest.raises(UntrustedCodeError):
        require_trust(config, "x")


def test_hashes_of_another_user_are_worth_nothing(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(FOREIGN)
    theirs = sorted(place.name for place in trust_folder().iterdir() if place.name != "secret")
    monkeypatch.setenv("KEEL_STATE_DIR", str(tmp_path / "other"))
    remember({"env": "another:Env"})
    for name in theirs:
        (trust_folder() / name).touch()
    assert not any(is_remembered(reference) for reference in code_in(FOREIGN))


def test_what_is_remembered_is_private(state: Path) -> None:
    remember(FOREIGN)
    assert stat.S_IMODE(trust_folder().stat().st_mode) == 0o700
    assert {stat.S_IMODE(place.stat().st_mode) for place in trust_folder().iterdir()} == {0o600}
    assert not any("toys" in place.read_text("latin-1") for place in trust_folder().iterdir())


def test_nothing_is_written_for_code_of_registries(state: Path) -> None:
    remember({"env": "CartPole-v1"})
    assert not state.exists()


def test_a_secret_that_cannot_be_made_leaves_no_file(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr("os.link", link)
    with pytest.warns(TrustWarning, match="no hard links here"):
        remember(FOREIGN)
    assert list(trust_folder().iterdir()) == []


def test_a_state_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEEL_STATE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(TrustWarning, match="cannot be written .* will need --trust-code"):
        remember(FOREIGN)
    assert not is_remembered(code_in(FOREIGN)[0])


def test_the_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KEEL_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert trust_folder() == tmp_path / "xdg" / "keel" / "trust"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trust_folder() == tmp_path / ".local" / "state" / "keel" / "trust"
