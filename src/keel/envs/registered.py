"""Origin of environments, where several packages offer the same id."""

from __future__ import annotations

import importlib.util
import re
import warnings
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.faults import EnvWarning

POOL = "envpool:"
"""Prefix of an id that asks for EnvPool's own environment."""
_decided: dict[str, EnvSpec] = {}
"""Meaning of `module:ID` when its module was imported: another package may take the id later."""


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
