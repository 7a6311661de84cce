"""What environments do wrong, as errors that say which one, when and what to do."""

from __future__ import annotations

from keel.errors import InputError, KeelError


class EnvError(KeelError):
    """The base of everything that goes wrong with an environment."""


class UnknownEnvError(EnvError, InputError):
    """No environment has this name; the message lists near names."""


class MissingExtraError(EnvError, ImportError):
    """An optional dependency is not installed; the message is the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f'{what} needs an extra: pip install "keel-rl[{extra}]"')


class UnsupportedSpaceError(EnvError, InputError):
    """A space that Keel has no layout for; the message names it."""


class ClosedEnvError(EnvError):
    """A step or a reset after `close`, or a step before `reset`."""


class BadStepError(EnvError, ValueError):
    """An observation, reward, mask or action that must not be stored; says where it came from."""


class EnvFaultError(EnvError):
    """One environment failed; `index`, `seed` and `step` let it be reproduced."""

    def __init__(self, what: str, index: int, seed: int, step: int, detail: str = "") -> None:
        self.what, self.detail = what, detail
        self.index, self.seed, self.step = index, seed, step
        message = f"environment {index} {what} (seed {seed}, step {step})"
        super().__init__(f"{message}\n{detail}" if detail else message)


class EnvRaisedError(EnvFaultError):
    """The environment's own code raised; its traceback is in the message."""


class EnvHungError(EnvFaultError):
    """A worker gave no answer within the timeout and was killed."""


class WorkerDiedError(EnvFaultError):
    """A worker process ended by a signal or an exit; the message names it."""


class EnvWarning(UserWarning):
    """Something about an environment that is worth knowing, but does not stop the run."""
