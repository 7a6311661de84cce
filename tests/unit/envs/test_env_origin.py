"""Ids that several packages have, and the backend of `auto`: the same in every command."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import env_toys
import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from keel.envs import EnvWarning, make_envs, step_time
from keel.envs.names import also_offered, source_of
from keel.envs.spawning import pack, unpack
from keel.errors import InputError

env_toys.register_toys()

PACKAGE = """
import env_toys, gymnasium

class Own(env_toys.Walk):
    pass

gymnasium.register("Shared-v0", Own)
"""


@pytest.fixture
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two modules that register the same id."""
    for name in ("package_a", "package_b"):
        (tmp_path / f"{name}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("package_a", "package_b"):
        sys.modules.pop(name, None)
    gymnasium.registry.pop("Shared-v0", None)


def module_of(envs: Any) -> str:
    return type(envs.envs._lanes.envs[0].unwrapped).__module__


@pytest.mark.usefixtures("_packages")
def test_the_module_before_an_id_decides_whoever_registered_it_last() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnvWarning)
        for name in ("package_a", "package_b", "package_a"):
            envs = make_envs(f"{name}:Shared-v0", 1, seed=0)
            assert module_of(envs) == name
            assert source_of(f"{name}:Shared-v0", envs.backend) == f"{name}:Own"
        assert source_of("Shared-v0", "gymnasium sync") == "package_b:Own", "the last one"


def test_a_module_that_does_not_have_the_id_is_told() -> None:
    message = (
        r"packaging:keel/Walk-v0: keel/Walk-v0 is registered as env_toys:Walk, not by packaging"
    )
    with pytest.warns(EnvWarning, match=message):
        make_envs("packaging:keel/Walk-v0", 1, seed=0)


def test_an_id_that_becomes_envpools_says_so_and_how_to_have_the_other() -> None:
    pytest.importorskip("envpool")
    with pytest.warns(
        EnvWarning,
        match=r"MiniGrid-Empty-5x5-v0: taken from EnvPool \(envpool:MiniGrid-Empty-5x5-v0\); "
        r"\w+:MiniGrid-Empty-5x5-v0 takes that of",
    ):
        envs = make_envs("MiniGrid-Empty-5x5-v0", 1, seed=0)
    assert source_of("MiniGrid-Empty-5x5-v0", envs.backend) == "envpool"
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnvWarning)
        assert make_envs("envpool:Pendulum-v1", 1, seed=0).backend == "envpool"
        assert make_envs("gymnasium:Pendulum-v1", 1, seed=0).backend == "gymnasium sync"
    with pytest.raises(InputError, match="is that of gymnasium; EnvPool's own is envpool:Pend"):
        make_envs("gymnasium:Pendulum-v1", 1, seed=0, backend="envpool")
    with pytest.raises(InputError, match="backend of envpool:Pendulum-v1: 'sync' is not one of"):
        make_envs("envpool:Pendulum-v1", 1, seed=0, backend="sync")


def test_what_is_said_names_the_package_that_has_it_too() -> None:
    spec = gymnasium.spec("HalfCheetah-v5")
    assert also_offered("HalfCheetah-v5", spec).endswith(
        "; gymnasium:HalfCheetah-v5 takes that of gymnasium"
    )
    assert "numpy:NumPy-A-v0 takes that of the installed package numpy" in also_offered(
        "NumPy-A-v0", None
    )


def test_specs_are_sent_by_name_and_one_that_breaks_breaks_no_other() -> None:
    """A worker imports nothing but its own environment."""
    specs = [
        EnvSpec("keel/Named-v0", entry_point=env_toys.Walk),  # type: ignore[arg-type]
        EnvSpec("keel/Lost-v0", entry_point="no_such_module:Env"),
    ]
    gymnasium.registry.update({spec.id: spec for spec in specs})
    try:
        payload = pack(len, 1)
        for spec in specs:
            gymnasium.registry.pop(spec.id)
        assert unpack(payload) == (len, 1)
        assert gymnasium.registry["keel/Named-v0"].entry_point == "env_toys:Walk"
        assert "keel/Lost-v0" in gymnasium.registry
    finally:
        for spec in specs:
            gymnasium.registry.pop(spec.id, None)


class Slow(env_toys.Walk):
    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


@pytest.fixture
def _slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_CACHE_DIR", str(tmp_path))
    if "keel/MeasuredSlow-v0" not in gymnasium.registry:
        gymnasium.register("keel/MeasuredSlow-v0", Slow)  # type: ignore[arg-type]


def known(env_id: str, make: Any, **kwargs: Any) -> step_time.StepTime:
    return step_time.step_time(env_id, gymnasium.spec(env_id).entry_point, kwargs, make)


def never() -> Any:
    raise AssertionError("measured again")


@pytest.mark.usefixtures("_slow")
def test_a_step_is_timed_once_and_the_choice_stays(tmp_path: Path) -> None:
    first = known("keel/MeasuredSlow-v0", Slow)
    assert first.is_slow
    (file,) = (tmp_path / "step-times").iterdir()
    assert first.reason.endswith(f"ms (measured once, and kept in {file})")
    assert known("keel/MeasuredSlow-v0", never) == first
    assert known("keel/MeasuredSlow-v0", env_toys.Walk, size=3).is_slow is False, "other options"
    file.write_text("half a f")
    assert known("keel/MeasuredSlow-v0", Slow).is_slow, "a damaged file is written anew"
    assert json.loads(file.read_text())["env"] == "keel/MeasuredSlow-v0"


@pytest.mark.usefixtures("_slow")
def test_of_two_that_measure_at_once_the_first_decides() -> None:
    """Seeds that start together must not choose different backends."""
    earlier: list[step_time.StepTime] = []

    def make() -> Any:
        earlier.append(known("keel/MeasuredSlow-v0", Slow))  # another process, meanwhile
        return env_toys.Walk()

    assert known("keel/MeasuredSlow-v0", make) == earlier[0]
    assert known("keel/MeasuredSlow-v0", never) == earlier[0]


class Faulty(env_toys.Walk):
    def step(self, action: Any) -> Any:
        raise ValueError("not written yet")


@pytest.mark.usefixtures("_slow")
def test_a_measurement_that_failed_is_not_kept(tmp_path: Path) -> None:
    assert not known("keel/MeasuredSlow-v0", Faulty).is_slow
    assert known("keel/MeasuredSlow-v0", Slow).is_slow, "once it is mended"


@pytest.mark.usefixtures("_slow")
def test_gymnasiums_own_are_never_timed(tmp_path: Path) -> None:
    for name in ("Pendulum-v1", "FrozenLake-v1", "HalfCheetah-v5", "LunarLander-v3"):
        assert not known(name, never).is_slow
    assert known("CarRacing-v3", never).is_slow
    assert not (tmp_path / "step-times").exists()


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KEEL_CACHE_DIR", str(tmp_path / "file"))
    assert "cannot be written" in known("keel/Walk-v0", env_toys.Walk).reason


@pytest.mark.usefixtures("_slow")
def test_auto_says_why_it_takes_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(EnvWarning, match=r"a step takes .* ms \(measured once, .*worker processes"):
        make_envs("keel/MeasuredSlow-v0", 2, seed=0, threads=2).close()
    assert make_envs("keel/MeasuredSlow-v0", 1, seed=0, threads=2).backend == "gymnasium sync"
