"""The kinds of runs, and the way from what `keel.train` is called with to one that can begin.

A kind has settings, and something that opens the source of its experience. Nothing is made here.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.config import Config, anchored, check, from_dict, nested, read, to_dict
from keel.envs import EnvWarning
from keel.envs.names import GivenEnv, given_env
from keel.errors import InputError
from keel.presets import preset, preset_for
from keel.registry import OBJECT, bind, import_attribute, is_object, name_of
from keel.tracking.directory import run_name
from keel.tracking.record import warn_if_changed
from keel.training.persist import Progress
from keel.trust import require_trust, texts_in

if TYPE_CHECKING:
    from keel.training.checkpoint import Checkpoint
    from keel.training.session import Session

KINDS = {"language": "keel.apps.language.kind:KIND"}
"""Kinds of runs by the name that stands in place of an environment; all others are environments."""
MAY_CHANGE = (
    "total_steps",
    "checkpoints",
    "evaluation",
    "tag",
    "log",
    "doctor",
    "threads",
    "compile",
    "device",
)
"""What a resumed run may set anew."""


@dataclass(frozen=True)
class RunKind:
    """One kind of run."""

    read: Callable[..., Any]
    """(settings, base) to a configuration, strictly"""
    base: Callable[[Mapping[str, Any], str | None], Any]
    """(settings, name of a preset) to the configuration that settings go on top of"""
    check: Callable[[Any], None]
    """raises where settings do not go together"""
    anchored: Callable[[Any], Any]
    """with absolute paths, so that the run can be opened from anywhere"""
    title: Callable[[Any], str]
    """the environment or the task, as names of runs begin"""
    open: Callable[[Any, Checkpoint | None], Session]
    """of a new run: configuration, checkpoint whose weights it begins with"""
    reopen: Callable[[Any, Path, Checkpoint | None], Session]
    """of an interrupted run: configuration, folder, checkpoint"""


def kind_of(env: object) -> RunKind:
    """Return the kind of runs on an environment, by its name."""
    if isinstance(env, str) and env in KINDS:
        module, _, name = KINDS[env].partition(":")
        kind: RunKind = getattr(importlib.import_module(module), name)
        return kind
    return ENVIRONMENTS


def _base(settings: Mapping[str, Any], name: str | None) -> Any:
    if name:
        return preset(name)
    return preset_for(str(settings["env"]), str(settings.get("algo", "ppo")))[1]


def _open(config: Any, start_from: Checkpoint | None) -> Session:
    from keel.training.session import open_session

    if start_from is None:
        return open_session(config)
    from keel.training.reopen import saved_encoding

    return open_session(config, saved_encoding(start_from))


def _reopen(config: Any, path: Path, checkpoint: Checkpoint | None) -> Session:
    from keel.training.reopen import reopen_session

    return reopen_session(config, path, checkpoint)


ENVIRONMENTS = RunKind(
    read=from_dict,
    base=_base,
    check=check,
    anchored=anchored,
    title=lambda config: str(config.env),
    open=_open,
    reopen=_reopen,
)


Begin = Callable[..., Generator[Progress, None, Any]]
"""Starts a run, with the options of `keel.training.runner.start`."""


def plan(
    env: Any,
    file: str | Path | None,
    runs: str | Path,
    name: str | None,
    preset_name: str | None,
    start_from: str | Path | None,
    trust_code: bool,
    wrappers: Sequence[Any],
    settings: Mapping[str, Any],
) -> tuple[Any, Begin]:
    """Return the configuration of a training, and what begins it.

    Args:
        env: as for `keel.train`, like all that follows.
        file: its settings.
        runs: the folder of all runs.
        name: of the run.
        preset_name: settings to start from.
        start_from: a run to take weights from.
        trust_code: import code that the file names.
        wrappers: of each environment.
        settings: as they were passed.
    """
    stored = read(Path(file)) if file is not None else {}
    wanted = stored.get("env") if env is None else env
    if wanted is None or wanted == "":
        raise InputError("train: which environment? Give env, or a config file that names one")
    given = given_env(wanted)
    kind = kind_of(given.name)
    passed = nested(settings, kind.read({}))
    if wrappers:
        names = [name_of(wrapper) for wrapper in wrappers]
        passed["envs"] = {**passed.get("envs", {}), "wrappers": names}
    named = {"env": given.name}
    base = kind.base({**stored, **passed, **named}, preset_name)
    config = kind.read({**passed, **named}, kind.read({**stored, **named}, base))
    if kind is ENVIRONMENTS:
        config = _with_given(config, given, _asked_num(stored, passed))
    if file is not None:
        warn_if_changed(Path(file))
        typed = [*texts_in(passed), *([] if env is None else [given.name])]
        require_trust(to_dict(config), file, trust_code, typed=typed)

    def begin(**options: Any) -> Generator[Progress, None, Any]:
        from keel.training.runner import start

        label = kind.title(config)
        if is_object(label):  # without the number that tells it from others of its name
            label = label.removeprefix(OBJECT).rpartition("_")[0]
        chosen = name or run_name(label, config.algo, Path(runs))
        source = None
        if start_from is not None:
            from keel.training.policy import load_checkpoint, locate

            source = load_checkpoint(*locate(Path(start_from)))
        return start(config, Path(runs), chosen, start_from=source, **options)

    return config, begin


def bind_again(config: Any, env: Any, wrappers: Sequence[Any], path: Path) -> None:
    """Let a run's names of objects mean what is passed now.

    Args:
        config: of the run.
        env: its environment, or None.
        wrappers: its wrappers, or nothing.
        path: the run, for errors.
    """
    pairs = [] if env is None else [("env", config.env, given_env(env).name)]
    if wrappers:
        stored = config.envs.wrappers
        if len(wrappers) != len(stored):
            raise InputError(f"wrappers: {path} has {len(stored)}, {len(wrappers)} were passed")
        pairs += [("wrappers", a, name_of(b)) for a, b in zip(stored, wrappers, strict=True)]
    for what, before, now in pairs:
        if is_object(before):
            bind(before, import_attribute(now))
        elif before != now:
            raise InputError(f"{what}: {path} was trained with {before}, not with {now}")


def _asked_num(stored: Mapping[str, Any], passed: Mapping[str, Any]) -> int | None:
    """Return the number of environments that file or arguments ask for, None if neither does."""
    for settings in (passed, stored):
        section = settings.get("envs")
        if isinstance(section, Mapping) and "num" in section:
            return int(section["num"])
    return None


def _with_given(config: Config, given: GivenEnv, asked: int | None) -> Config:
    """Return the configuration with as many environments as an instance allows."""
    if given.num is not None:
        if asked not in (None, given.num):
            raise InputError(f"envs.num: is {asked}, the vector environment has {given.num}")
        config = replace(config, envs=replace(config.envs, num=given.num))
    if given.copies:
        return config
    if given.num is None and (asked or 1) > 1:
        raise InputError(
            f"envs.num: is {asked}, and the environment cannot be copied; pass a callable that "
            "makes one (env=lambda: …)"
        )
    warnings.warn(
        "env: cannot be copied, so there are no evaluations beside training, and no more than the "
        "environments that were passed; pass a callable that makes one (env=lambda: …)",
        EnvWarning,
        stacklevel=4,
    )
    return replace(
        config,
        envs=replace(config.envs, num=given.num or 1),
        evaluation=replace(config.evaluation, episodes=0),
    )
