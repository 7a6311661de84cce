"""Errors of environments, which say which one failed, when, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium

from keel.errors import InputError, KeelError


class EnvError(KeelError):
    """Base class of everything that goes wrong with an environment."""


class UnknownEnvError(EnvError, InputError):
    """No environment has this name; the message lists near names."""


class MissingExtraError(EnvError, ImportError):
    """An optional dependency is not installed; the message is the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f'{what} needs an extra: pip install "keel-rl[{extra}]"')


class UnsupportedSpaceError(EnvError, InputError):
    """A space that Keel has no layout for; the message names it."""


class EnvMakeError(EnvError, InputError):
    """Error of a constructor of an environment; the message names the environment and the line."""


class ClosedEnvError(EnvError):
    """A step or a reset after `close`, or a step before `reset`."""


class BadStepError(EnvError, ValueError):
    """An observation, reward, mask or action that must not be stored; says where it came from."""


class EnvFaultError(EnvError):
    """One environment failed; `index`, `seed` and `step` let it be reproduced.

    `index` is −1 where all of them are stepped by one call, and `seed` is −1 where none is known.
    """

    def __init__(self, what: str, index: int, seed: int, step: int, detail: str = "") -> None:
        self.what, self.detail = what, detail
        self.index, self.seed, self.step = index, seed, step
        name = f"environment {index}" if index >= 0 else "the environments, stepped together,"
        at = f"step {step}" if seed < 0 else f"seed {seed}, step {step}"
        message = f"{name} {what} ({at})"
        super().__init__(f"{message}\n{detail}" if detail else message)

    @property
    def brief(self) -> str:
        """The message with the last line of the environment's traceback, which names the error."""
        first, *trace = [line.strip() for line in str(self).splitlines() if line.strip()]
        return f"{first}: {trace[-1]}" if trace else first


class EnvRaisedError(EnvFaultError):
    """The environment's own code raised; its traceback is in the message."""


class EnvHungError(EnvFaultError):
    """An environment gave no answer within the timeout; its worker, if it has one, was killed."""


class WorkerDiedError(EnvFaultError):
    """A worker process ended by a signal or an exit; the message names it."""


class EnvWarning(UserWarning):
    """Something about an environment that is worth knowing, but does not stop the run."""


@contextmanager
def constructor_of(env_id: str) -> Iterator[None]:
    """Name the environment in whatever its constructor raises, in one line."""
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        if "mujoco" in str(error).lower():
            raise MissingExtraError(env_id, "mujoco") from error
        raise EnvMakeError(f"{env_id}: {_first_line(error)}") from error
    except EnvRaisedError as error:  # in a worker, which sent its traceback
        reason = error.detail.strip().rpartition("\n")[2]
        raise EnvMakeError(f"{env_id}: cannot be made in a worker process: {reason}") from error
    except KeelError:
        raise
    except (Exception, SystemExit) as error:  # the environment's own
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise EnvMakeError(
            f"{env_id}: cannot be made: {type(error).__name__}: {_first_line(error)} "
            f"({Path(frame.filename).name}, line {frame.lineno})"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def describe(error: BaseException, doing: str) -> str:
    """Return what an environment did: raised an error, or left with `sys.exit` while `doing`."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)}) in {doing}"
    return f"raised {type(error).__name__}: {error}"
