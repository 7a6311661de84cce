"""Trust in code that a file names: whether it may be imported.

The configuration of a run can name code: an environment, a network, a loss, a controller, functions
that reward or group rows. Typed on the command line or passed from Python, that is the user's own
choice. In a file it may come from anywhere: a downloaded run would execute code as soon as it is
opened. So a command that would import code named by a file refuses, with a list, unless

- the code belongs to a registry: Gymnasium's, EnvPool's, PettingZoo's, or Keel's own;
- this user has trained with the same code from the same place on this machine;
- `--trust-code` (Python: `trust_code=True`) is given.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from keel.config.values import named_values, options_text
from keel.errors import InputError
from keel.registry import is_object, module_origin, not_importable, texts, was_passed

ENVIRONMENT = ("env", "envs.options", "envs.wrappers")
"""Fields whose code runs when environments are made."""
NETWORK = ("network.kind", "network.distribution")
"""Fields whose code runs when a policy is opened."""
PLUGGED = (
    "network.kind",
    "network.distribution",
    "region.loss",
    "controllers",
    "advantage.estimator",
    "advantage.group",
    "algo",
    "task",
    "reward.functions",
)
"""Fields that name entries of a registry, or code as `module:attribute`."""
OWN_FUNCTIONS = ("task", "keel.ablate.groups:by_environment")
"""Functions of Keel that a file may name."""
PETTINGZOO = re.compile(r"(pettingzoo\.\w+|mpe2)\.\w+_v\d+:(parallel_env|env)")
CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_][\w./-]*")
"""A value of an environment's option that names code, by its form."""
WRAPPERS = "gymnasium.wrappers:"
"""Beginning of the names of Gymnasium's own wrappers."""
SECRET = "secret"


class UntrustedCodeError(InputError):
    """Error of a file that names code to import which is not known to be trusted."""


class TrustWarning(UserWarning):
    """Warning that trust in code could not be noted for the next time."""


class Reference(NamedTuple):
    """Code that a configuration names."""

    field: str
    """dotted name of the setting"""
    name: str
    """`module:attribute`, or `module:Name-v0`"""
    options: str = ""
    """Options that an environment is made with."""

    def __str__(self) -> str:
        options = f" ({_short(self.options)})" if self.options else ""
        return f"{self.field} {_short(self.name)}{options}"


def code_in(config: Mapping[str, Any]) -> list[Reference]:
    """Return the code from outside of all registries that a configuration names.

    Args:
        config: settings as plain data, of a run on environments or on tokens.
    """
    return [reference for reference in _references(config) if not is_object(reference.name)]


def require_importable(config: Mapping[str, Any], source: Path | str) -> None:
    """Raise an `InputError` if settings stand for objects that no other process can have.

    Args:
        config: settings as plain data.
        source: the run that they come from.
    """
    for reference in _references(config):
        if is_object(reference.name) and not was_passed(reference.name):
            raise InputError(f"{source}: {reference.field} {not_importable(reference.name)}")


def require_trust(
    config: Mapping[str, Any],
    source: Path | str,
    trust_code: bool = False,
    *,
    typed: Collection[str] = (),
    fields: Collection[str] | None = None,
) -> None:
    """Raise an `UntrustedCodeError` if code that a file names must not be imported.

    Args:
        config: settings as plain data, as they will be used.
        source: the file or the run that they come from.
        trust_code: the user trusts it.
        typed: words of the command line, or texts passed from Python: code that stands there is
            the user's own.
        fields: the settings whose code will be imported, by default all.
    """
    if trust_code:
        return
    typed_names = {part.strip() for text in typed for part in (text, *re.split("[,*=]", text))}
    foreign = [
        reference
        for reference in code_in(config)
        if (fields is None or reference.field in fields)
        and reference.name not in typed_names
        and not was_passed(reference.name)
        and not is_remembered(reference)
    ]
    if foreign:
        raise UntrustedCodeError(
            f"{source}: names code from outside of Keel, of which nothing was imported: "
            f"{'; '.join(map(str, foreign))}. If you know it and trust it, add --trust-code "
            "(Python: trust_code=True)"
        )


def remember(config: Mapping[str, Any]) -> None:
    """Note that this user trains with the code that a configuration names, on this machine.

    What cannot be written is a warning: no training fails for it.
    """
    references = code_in(config)
    if not references:
        return
    folder = trust_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = _read_secret(folder) or _make_secret(folder)
        for reference in references:
            (folder / _fingerprint(reference, secret)).touch(mode=0o600)
    except OSError as error:
        warnings.warn(
            f"{folder}: cannot be written ({error.strerror}), so this run will need --trust-code",
            TrustWarning,
            stacklevel=2,
        )


def is_remembered(reference: Reference) -> bool:
    """Return whether this user has trained with this code, imported from the same place."""
    folder = trust_folder()
    secret = _read_secret(folder)
    return secret is not None and (folder / _fingerprint(reference, secret)).is_file()


def trust_folder() -> Path:
    """Return where it is noted which code is trusted: below KEEL_STATE_DIR, or XDG_STATE_HOME."""
    state_dir = os.environ.get("KEEL_STATE_DIR")
    if state_dir:
        return Path(state_dir) / "trust"
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "keel" / "trust"


def is_registered(env: str) -> bool:
    """Return whether the name of an environment imports nothing but what a registry knows."""
    return _is_known(env) and not _is_local(_package_of(env))


def _package_of(env: str) -> str:
    """Return the package that is imported for the name of an environment."""
    from keel.envs.names import PARALLEL, atari_game

    module, colon, _ = PARALLEL.get(env, env).rpartition(":")
    if not colon:
        is_atari = env.startswith("ALE/") or atari_game(env) is not None
        module = "ale_py" if is_atari else "gymnasium"
    return module.partition(".")[0]


def _is_local(package: str) -> bool:
    """Return whether a package would be imported from the working directory itself.

    A folder that was downloaded may hold one with the name of a registry's. Keel and Gymnasium are
    loaded already, from wherever Keel itself came.
    """
    if package in ("keel", "gymnasium"):
        return False
    working_directory = Path.cwd().resolve()
    origins = [Path(origin) for origin in module_origin(package).split(":")]
    return any(
        origin.is_relative_to(working_directory / package) or origin.parent == working_directory
        for origin in origins
    )


def _is_known(env: str) -> bool:
    from keel.envs.names import NATIVE, PARALLEL, POOL

    module, colon, name = env.rpartition(":")
    if (
        not colon
        or env.startswith(POOL)
        or env in (*PARALLEL.values(), *NATIVE.values())
        or PETTINGZOO.fullmatch(env)
    ):
        return True
    if name.isidentifier():
        return False
    if module.startswith("keel.apps.") or (module == "ale_py" and name.startswith("ALE/")):
        return True
    return _package_in_registry(name) == module.partition(".")[0]


def _package_in_registry(name: str) -> str | None:
    """Return the package whose environment Gymnasium already knows by this id."""
    import gymnasium

    spec = gymnasium.registry.get(name)
    entry = None if spec is None else spec.entry_point or spec.vector_entry_point
    if entry is None:
        return None
    module = entry if isinstance(entry, str) else str(getattr(entry, "__module__", ""))
    return re.split(r"[.:]", module)[0]


def _references(config: Mapping[str, Any]) -> Iterator[Reference]:
    given = _at(config, "envs", "options")
    options = given if isinstance(given, str) else options_text(given, "envs.options")
    env = str(config.get("env") or "")
    if not (is_object(env) or is_registered(env)):
        yield Reference("env", env, options)
    for wrapper in _at(config, "envs", "wrappers"):
        if not (is_object(str(wrapper)) or str(wrapper).startswith(WRAPPERS)):
            yield Reference("envs.wrappers", str(wrapper))
    for value in texts_in(named_values(given, "envs.options")):
        if CODE.fullmatch(value):
            yield Reference("envs.options", value)
    for field in PLUGGED:
        part, dot, name = field.rpartition(".")
        for named in texts(_at(config, part, name) if dot else config.get(name)):
            if (":" in named or is_object(named)) and named not in OWN_FUNCTIONS:
                yield Reference(field, named)


def _at(config: Mapping[str, Any], part: str, name: str) -> Any:
    section = config.get(part)
    return (section.get(name) or "") if isinstance(section, Mapping) else ""


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in (*value.keys(), *value.values()):
            yield from texts_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_in(part)


def _fingerprint(reference: Reference, secret: bytes) -> str:
    """Return a keyed hash of a name and of where it would be imported from.

    A module of the same name in another folder is other code.
    """
    module = reference.name.rpartition(":")[0] or reference.name
    text = json.dumps([*reference, module_origin(module)])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _read_secret(folder: Path) -> bytes | None:
    """Return the key of this user's hashes: no file from elsewhere can hold a valid one."""
    path = folder / SECRET
    try:
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            return None
        return path.read_bytes() or None
    except OSError:
        return None


def _make_secret(folder: Path) -> bytes:
    draft = folder / f".{secrets.token_hex(8)}"
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):  # another process was faster: its secret counts
            os.link(draft, folder / SECRET)
    finally:
        draft.unlink(missing_ok=True)
    return (folder / SECRET).read_bytes()


def _short(text: str, limit: int = 120) -> str:
    """Return a text on one short line, without what would steer a terminal."""
    from keel.printing import printable

    line = printable(" ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]}…"
