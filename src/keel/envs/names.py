"""Names of environments: aliases, registries and which of them an id is from, typos."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.faults import (
    EnvError,
    EnvWarning,
    MissingExtraError,
    UnknownEnvError,
    describe,
)
from keel.envs.protocol import Request
from keel.errors import similar
from keel.registry import ImportFailed, import_function, import_module

if TYPE_CHECKING:
    from keel.envs.makers import Maker

ATARI_GAMES = """
Adventure AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider
Berzerk Bowling Boxing Breakout Carnival Centipede ChopperCommand CrazyClimber Defender DemonAttack
DoubleDunk ElevatorAction Enduro FishingDerby Freeway Frostbite Gopher Gravitar Hero IceHockey
Jamesbond JourneyEscape Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix
Pitfall Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris
SpaceInvaders StarGunner Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor
YarsRevenge Zaxxon
""".split()  # noqa: SIM905
"""Games with an alias of their own; any other game of the ALE goes by `ALE/Name-v5`."""


PARALLEL = {
    "land": "keel.apps.land.vector:parallel_env",
    "simple_spread": "mpe2.simple_spread_v3:parallel_env",
    "simple_speaker_listener": "mpe2.simple_speaker_listener_v4:parallel_env",
}
"""Environments with several agents that have an alias; any other goes by `module:parallel_env`."""


NATIVE = {"serving": "keel.apps.serving.vector:vector_env"}
"""Environments of one agent that are written for many copies at once: `(num_envs, …) -> Envs`."""


POOL = "envpool:"
"""Prefix of an id that asks for EnvPool's own environment."""
_decided: dict[str, EnvSpec] = {}
"""Meaning of `module:ID` when its module was imported: another package may take the id later."""


class GivenEnv(NamedTuple):
    """An environment that was passed from Python, under its name."""

    name: str
    """as `make_envs` takes it"""
    num: int | None = None
    """of a vector environment: how many it has"""
    copies: bool = True
    """whether there can be more than the one that was passed"""


def given_env(env: Any) -> GivenEnv:
    """Return the name of an environment, however it was passed.

    Args:
        env: an id or `module:attribute`; a class; a callable without arguments; an environment of
            Gymnasium, one or a vector of them; a parallel environment of PettingZoo.
    """
    if isinstance(env, str):
        return GivenEnv(env)
    from keel.envs.objects import name_object

    return name_object(env)


def native(env_id: str) -> Callable[..., Any] | None:
    """Return the constructor of an environment that comes with Keel, or None."""
    if env_id not in NATIVE:
        return None
    return import_function(NATIVE[env_id])


def named_maker(env_id: str, kwargs: Mapping[str, Any]) -> Maker | None:
    """Return what makes the environment that `module:attribute` or an alias for several agents
    names, checked but not called; None for an id of a registry."""
    full = PARALLEL.get(env_id, env_id)
    module, _, name = full.rpartition(":")
    if not module or not name.isidentifier():
        return None
    from keel.envs.makers import find_maker

    try:
        return find_maker(full, kwargs)
    except EnvError as error:
        if env_id in PARALLEL and isinstance(error.__cause__, ImportFailed):
            raise MissingExtraError(env_id, "multi-agent") from error
        raise


def atari_game(env_id: str) -> str | None:
    """Return the game that `Breakout` or `ALE/Breakout-v5` names, as `Breakout`, or None."""
    if env_id in ATARI_GAMES:
        return env_id
    match = re.fullmatch(r"ALE/(\w+)-v5", env_id)
    return match[1] if match else None


def find_spec(env_id: str) -> EnvSpec | None:
    """Return the registered environment, or None; `module:Name-v0` imports the module first."""
    module, _, name = env_id.rpartition(":")
    if name.startswith("ALE/") and importlib.util.find_spec("ale_py") is not None:
        module = "ale_py"  # importing it registers its games
    if not module:
        return registered(name)
    before, is_new = registered(name), module not in sys.modules
    try:
        import_module(module, env_id)
    except ImportFailed as error:
        cause, reason = error.__cause__, error.reason
        if cause is not None and not isinstance(cause, ImportError):
            reason = f"it {describe(cause, 'import')}"
        raise EnvError(f"{env_id}: cannot import {module!r}: {reason}") from error
    return decided(f"{module}:{name}", before, is_new)


def spec_for(request: Request) -> EnvSpec | None:
    """Return the specification with which Gymnasium makes what is asked for, or None."""
    if request.maker is not None:
        return EnvSpec(id=request.maker.name, entry_point=request.maker.make)
    game = atari_game(request.env_id)
    return find_spec(request.env_id if game is None else f"ALE/{game}-v5")


def registered(name: str) -> EnvSpec | None:
    """Return the specification that Gymnasium has for an id, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a newer version exists: the user chose this one
            return gymnasium.spec(name)
    except gymnasium.error.Error:
        return None


def decided(env_id: str, before: EnvSpec | None, is_new: bool) -> EnvSpec | None:
    """Return the specification that `module:ID` names, once the module is imported.

    Args:
        env_id: `module:ID`.
        before: what the id meant before the import.
        is_new: whether the module had not been imported before.
    """
    module, _, name = env_id.rpartition(":")
    root = module.partition(".")[0]
    spec = registered(name)
    if spec is None:
        return None
    if origin(spec) != root:
        if env_id in _decided:
            return _decided[env_id]
        if spec is before or not is_new:
            warnings.warn(
                f"{env_id}: {name} is registered as {entry_point(spec)}, not by {module}",
                EnvWarning,
                stacklevel=6,
            )
    _decided[env_id] = spec
    return spec


def entry_point(spec: EnvSpec) -> str:
    """Return the constructor of a specification as `module:name`."""
    entry: Any = spec.entry_point
    if isinstance(entry, str) or entry is None:
        return str(entry)
    return f"{getattr(entry, '__module__', '?')}:{getattr(entry, '__qualname__', entry)}"


def origin(spec: EnvSpec) -> str:
    """Return the package that the constructor of a specification lies in."""
    return re.split(r"[.:]", entry_point(spec))[0]


def also_offered(env_id: str, spec: EnvSpec | None) -> str:
    """Return what to say where EnvPool's environment is taken for an id without a module."""
    source = f"taken from EnvPool ({POOL}{env_id})"
    if spec is not None:
        return f"{source}; {origin(spec)}:{env_id} takes that of {origin(spec)}"
    family = re.split(r"[-/]", env_id)[0].lower()
    if family.isidentifier() and importlib.util.find_spec(family) is not None:
        return f"{source}; {family}:{env_id} takes that of the installed package {family}"
    return f"{source}; module:{env_id} takes that of a package"


def source_of(env_id: str, backend: str) -> str:
    """Return where environments come from, for the record of a run."""
    if backend in ("envpool", "ale"):
        return backend
    spec = _decided.get(env_id) or registered(env_id.rpartition(":")[2])
    if spec is not None and backend.startswith("gymnasium"):
        return entry_point(spec)
    return env_id


def unknown(env_id: str, more_names: Iterable[str] = ()) -> UnknownEnvError:
    """Return the error for an unknown name, with up to three similar names."""
    known_names = sorted(
        {*gymnasium.registry, *ATARI_GAMES, *PARALLEL, *NATIVE, *more_names}, reverse=True
    )
    # the newest version of each name
    bare = {re.sub(r"-v\d+$", "", name): name for name in reversed(known_names)}
    similar_names = [
        bare.get(name, name) for name in similar(env_id, [*bare, *known_names], limit=3)
    ]
    names = list(dict.fromkeys(similar_names))
    hint = f"; did you mean {', '.join(names)}?" if names else ". `keel envs` lists them."
    return UnknownEnvError(
        f"no environment is called {env_id!r}{hint} "
        "An environment of your own is registered with gymnasium.register before it is used, "
        "or named as module:Name-v0 or module:Class"
    )
