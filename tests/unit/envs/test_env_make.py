"""`make_envs`: which backend, and what the errors say."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import env_toys
import gymnasium
import numpy as np
import pytest

import keel.envs.make
from keel.envs import (
    AtariOptions,
    EnvError,
    EnvWarning,
    MissingExtraError,
    UnknownEnvError,
    UnsupportedSpaceError,
    make_envs,
)
from keel.envs.make import Backend
from keel.errors import InputError

env_toys.register_toys()


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """As if these packages were not installed."""
    real = keel.envs.make._installed
    monkeypatch.setattr(
        keel.envs.make, "_installed", lambda name: name not in missing and real(name)
    )
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)


def test_auto_takes_the_vector_entry_point_and_else_one_process() -> None:
    assert make_envs("CartPole-v1", 2, seed=0).backend == "gymnasium vector"
    assert make_envs("Pendulum-v1", 2, seed=0).backend == "gymnasium sync"
    assert make_envs("keel/Walk-v0", 2, seed=0).backend == "gymnasium sync"
    assert make_envs("CartPole-v1", 2, seed=0, autoreset="same_step").backend == "gymnasium sync"


def test_an_alias_with_wrappers_is_the_plain_game() -> None:
    """Gymnasium's own picture, 210 × 160 in colour, since the wrappers are the user's."""
    pytest.importorskip("ale_py")
    envs = make_envs("Pong", 1, seed=0, wrappers=[env_toys.Louder])
    assert envs.backend == "gymnasium sync"
    assert envs.reset(0)["obs"].shape == (1, 3, 210, 160)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_games_that_gymnasium_steps_are_shown_as_the_ale_shows_them(backend: Backend) -> None:
    pytest.importorskip("ale_py")
    options = AtariOptions(frame_stack=3, size=42, noop_max=0)
    shown = []
    for each in ("ale", backend):
        envs = make_envs("Breakout", 1, seed=0, backend=each, atari=options)
        frames = [envs.reset(0)["obs"]]
        frames += [envs.step(np.array([action])).obs["obs"] for action in (0, 2, 2, 2, 3)]
        shown.append(frames)
        envs.close()
    for ale, gym in zip(*shown, strict=True):
        assert gym.shape == ale.shape == (1, 3, 42, 42)
    # the same paddle and the same ball in the last picture: both have pressed FIRE
    assert np.abs(shown[0][-1][0, -1].astype(float) - shown[1][-1][0, -1]).mean() < 1.0


def test_a_game_shown_otherwise_than_its_stepper_can_is_refused() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(InputError, match=r"episodic_life .* need backend ale or envpool"):
        make_envs("Breakout", 1, seed=0, backend="sync", atari=AtariOptions(episodic_life=True))
    with pytest.raises(InputError, match="takes its options as atari=AtariOptions"):
        make_envs("Breakout", 1, seed=0, backend="sync", env_kwargs={"frameskip": 4})


class BrokenVector:
    def __init__(self, **_: Any) -> None:
        raise RuntimeError("no such accelerator")


def test_a_vector_entry_point_that_fails_is_replaced_with_a_word() -> None:
    if "keel/Broken-v0" not in gymnasium.registry:
        gymnasium.register(
            "keel/Broken-v0",
            env_toys.Walk,  # type: ignore[arg-type]
            vector_entry_point=BrokenVector,  # type: ignore[arg-type]
        )
    with pytest.warns(EnvWarning, match="keel/Broken-v0: its vector entry point failed .*accel"):
        envs = make_envs("keel/Broken-v0", 2, seed=0)
    assert envs.backend == "gymnasium sync"


def test_without_envpool_mujoco_runs_on_gymnasium_and_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mujoco")
    without(monkeypatch, "envpool")
    with pytest.warns(EnvWarning, match=r'pip install "keel-rl\[envpool\]"'):
        assert make_envs("HalfCheetah-v5", 1, seed=0).backend == "gymnasium sync"


def test_without_the_ale_atari_goes_to_envpool(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("envpool")
    without(monkeypatch, "ale_py")
    assert make_envs("Breakout", 1, seed=0).backend == "envpool"


@pytest.mark.parametrize(
    ("name", "backend", "extra", "missing"),
    [
        ("Breakout", "auto", "atari", ["ale_py", "envpool"]),
        ("ALE/Pong-v5", "ale", "atari", ["ale_py"]),
        ("CartPole-v1", "envpool", "envpool", ["envpool"]),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: Any, extra: str, missing: list[str]
) -> None:
    without(monkeypatch, *missing)
    with pytest.raises(MissingExtraError) as caught:
        make_envs(name, 1, backend=backend, seed=0)
    assert f'pip install "keel-rl[{extra}]"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_mujoco_is_an_extra_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(*_: Any, **__: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed, run …")

    monkeypatch.setattr(gymnasium, "make", complain)
    with pytest.raises(MissingExtraError, match=r'HalfCheetah-v5 .*"keel-rl\[mujoco\]"'):
        make_envs("HalfCheetah-v5", 1, backend="sync", seed=0)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("HalfCheeta-v5", "HalfCheetah-v5"),
        ("Breakot", "Breakout"),
        ("pong", "Pong"),
        ("keel/Wak-v0", "keel/Walk-v0"),
    ],
)
def test_an_unknown_name_lists_near_ones(typo: str, meant: str) -> None:
    with pytest.raises(UnknownEnvError, match=f"no environment is called '{typo}'") as caught:
        make_envs(typo, 1, seed=0)
    assert meant in str(caught.value)
    assert "gymnasium.register" in str(caught.value)


def test_an_unknown_atari_game_is_unknown() -> None:
    pytest.importorskip("ale_py")
    with pytest.raises(UnknownEnvError, match="ALE/Breakout-v5"):
        make_envs("ALE/Brekout-v5", 1, seed=0)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(EnvError, match="cannot import 'no_such_module'"):
        make_envs("no_such_module:Thing-v0", 1, seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs: expected at least 1, got 0"),
        ({"threads": 0}, "threads: expected at least 1"),
        ({"backend": "asinc"}, "did you mean 'async'"),
        ({"autoreset": "never"}, "autoreset: 'never' is not one of next_step, same_step"),
        (
            {"env_id": "Pong", "backend": "ale", "env_kwargs": {"difficulty": 1}},
            "the ALE takes its options as atari=AtariOptions",
        ),
        ({"backend": "ale"}, "ale plays Atari games, not CartPole-v1"),
        ({"backend": "vector", "wrappers": [env_toys.Louder]}, "wrappers: need backend sync"),
        ({"backend": "vector", "autoreset": "same_step"}, "same_step needs backend sync or async"),
        ({"env_id": "Pendulum-v1", "backend": "vector"}, "has no vector entry point"),
        ({"num_envs": 10**12, "backend": "sync"}, "num_envs: 1000000000000 environments: needs"),
    ],
)
def test_what_cannot_be_is_said(arguments: dict[str, Any], message: str) -> None:
    given = {"env_id": "CartPole-v1", "num_envs": 1, "seed": 0, **arguments}
    with pytest.raises(InputError, match=message):
        make_envs(**given)


def test_an_unsupported_space_is_named_at_once() -> None:
    space = gymnasium.spaces.Text(4)
    with pytest.raises(UnsupportedSpaceError, match="Text"):
        make_envs("keel/Echo-v0", 1, backend="sync", seed=0, env_kwargs={"action_space": space})


def test_importing_the_environments_does_not_import_torch() -> None:
    script = "import sys, keel.envs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_mujocos_warnings_leave_no_file_behind(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    envs = make_envs("HalfCheetah-v5", 1, backend="sync", seed=0)
    envs.reset(0)
    envs.step(np.zeros((1, 6), np.float32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nope", "`keel envs` lists them"),
        ("Hoper", "did you mean Hopper-v5"),
        ("cartpole", "did you mean CartPole-v1"),
        ("Ant-v9", "did you mean Ant-v5"),
    ],
)
def test_only_a_name_that_is_close_is_suggested(name: str, hint: str) -> None:
    with pytest.raises(UnknownEnvError) as caught:
        make_envs(name, 1, seed=0)
    assert hint in str(caught.value)
    assert ("did you mean" in str(caught.value)) == ("did you mean" in hint)
