"""Names of environments: Atari aliases, the Gymnasium registry, and suggestions for typos."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.faults import EnvError, MissingExtraError, UnknownEnvError, describe
from keel.envs.makers import Maker, find_maker
from keel.envs.registered import decided, registered
from keel.errors import similar
from keel.imports import ImportFailed, import_function, import_module

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
