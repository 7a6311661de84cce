"""Worker processes that do not run the user's script again, and what is sent to them.

`multiprocessing` imports the main script in every process that it spawns, so that a script without
`if __name__ == "__main__":` starts itself over and over. Workers of Keel need nothing of it: what
was defined in the script travels by value.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import spawn
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from keel.envs.faults import EnvError

PREFIX = "keel-env-"
"""Prefix of the names of worker processes."""
_starting = threading.Lock()


class ScriptlessProcess(SpawnProcess):
    """A spawned process that begins without the main script of its parent."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        with _without_script():
            return SpawnProcess._Popen(process_obj)


@contextmanager
def _without_script() -> Iterator[None]:
    """Leave the main script out of what processes called `PREFIX…` are prepared with.

    Processes that other threads start meanwhile have other names, and are prepared as ever.
    """
    with _starting:
        original: Callable[[str], dict[str, Any]] = spawn.get_preparation_data

        def prepare(name: str) -> dict[str, Any]:
            data = original(name)
            if name.startswith(PREFIX):
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        vars(spawn)["get_preparation_data"] = prepare
        try:
            yield
        finally:
            vars(spawn)["get_preparation_data"] = original


def pack(factory: Callable[[], Any], *others: Any) -> bytes:
    """Return what a worker needs, as bytes; classes and functions of the script go by value."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        body: bytes = cloudpickle.dumps((factory, *others))
    except Exception as error:  # whatever the parts raise when they are asked to be copied
        raise EnvError(
            f"the environment cannot be sent to a worker process "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
            "use envs.backend sync, or define it in a module"
        ) from error
    registered: bytes = cloudpickle.dumps((body, _sendable(cloudpickle.dumps)))
    return registered


def unpack(payload: bytes) -> tuple[Any, ...]:
    """Return what `pack` was given, and register what the parent had registered."""
    import cloudpickle

    body, specs = cloudpickle.loads(payload)
    for data in specs:
        with contextlib.suppress(Exception):  # not this worker's environment: it says so if used
            spec = cloudpickle.loads(data)
            gymnasium.registry.setdefault(spec.id, spec)
    parts: tuple[Any, ...] = cloudpickle.loads(body)
    return parts


def _sendable(dumps: Callable[[Any], bytes]) -> list[bytes]:
    """Return the specs that a fresh process would lack, but for those that cannot be copied."""
    packed = []
    for spec in gymnasium.registry.values():
        if not str(spec.entry_point).startswith("gymnasium."):
            try:
                packed.append(dumps(_by_name(at_hand(spec))))
            except Exception:
                continue
    return packed


def _by_name(spec: EnvSpec) -> EnvSpec:
    """Return `spec` with the name of its class, unless the script has it: nothing is imported then
    before the environment is made."""
    entry: Any = spec.entry_point
    module, name = (getattr(entry, key, "") for key in ("__module__", "__qualname__"))
    if isinstance(entry, str) or module in ("", "__main__") or not name.isidentifier():
        return spec
    return replace(spec, entry_point=f"{module}:{name}", vector_entry_point=None)


def at_hand(spec: EnvSpec) -> EnvSpec:
    """Return `spec` with the class itself where it names one of the script by `__main__:Class`."""
    entry = spec.entry_point
    if not (isinstance(entry, str) and entry.startswith("__main__:")):
        return spec
    creator: Any = gymnasium.envs.registration.load_env_creator(entry)
    return replace(spec, entry_point=creator)
