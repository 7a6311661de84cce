"""The command line: `keel COMMAND …`, each command a thin call of a library function.

Commands are imported when they are called, so that `keel --help` needs neither torch nor patience.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from keel.printing import printable

COMMANDS = {
    "train": "train an agent inside an exact, enforced trust region",
    "resume": "go on with a run where it stopped",
    "evaluate": "play whole episodes with a trained policy",
    "envs": "list what can be trained here, and what it needs",
    "presets": "list the settings that come with Keel, or show some",
    "export": "write a trained policy as an ONNX file",
    "doctor": "what is wrong with a run, why, and what to do, from the log of any trainer",
    "case": "a run that was sick: its diagnosis from the log alone, the cure, before and after",
    "compare": "groups of runs side by side: keep, roll back, or not distinguishable",
    "ablate": "train a grid of settings over seeds, and compare",
    "tune": "search settings with Optuna, inside the trust region",
    "demos": "record episodes to learn from",
    "land": "the land-development game: a policy beside the baselines, on maps it has never seen",
    "serving": "replicas of a language model, simulated: heuristics, headroom, trained routers",
    "route": "a trained router in front of real servers, held to a heuristic by guards",
    "probe": "is it the algorithm or the environment? small experiments with one cause each",
    "runs": "list runs, or export one as CSV",
    "bench": "measure training speed side by side with a peer",
    "explain": "what KL, clipping, penalties and trust regions do to your numbers",
}
TRACEBACK = "--traceback"
DEBUG = "KEEL_DEBUG"
"""The environment variable that asks for the same as `--traceback`."""
BAD_INPUT, UNEXPECTED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Returns:
        0 done; 1 an error that Keel did not expect, or a job that failed; 2 bad input; 130
        interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if TRACEBACK in args:
        args.remove(TRACEBACK)
        os.environ[DEBUG] = "1"
    _write_any_character()
    try:
        status = _dispatch(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not _lost_reader():  # the pipe to another process, which died
            return _report(error)
        # The reader (`head`, a closed pager) has what it wanted; do not complain at exit either.
        _discard_stdout()
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        return _report(error)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())  # noqa: T201
        return 0
    if args[0] in ("-V", "--version"):
        from keel import __version__

        print(f"keel {__version__}")  # noqa: T201
        return 0
    if args[0] not in COMMANDS:
        return _fail(_unknown("command", args[0], list(COMMANDS)) + " (`keel --help` lists them)")
    with _short_warnings():
        status: int = importlib.import_module(f"keel.cli.{args[0]}").run(args[1:])
    return status


def _report(error: Exception) -> int:
    """Say in one line what went wrong; the whole traceback goes before it where it is asked for."""
    from keel.errors import KeelError

    _flush_or_discard()
    if _debugging():
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeelError):
        return _fail(error.brief)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, BrokenPipeError):
        return _fail(_system_error(error))
    if isinstance(error, MemoryError):
        return _fail("out of memory: use smaller batches, networks or fewer environments")
    return _fail(
        f"unexpected {type(error).__name__}: {error or 'no message'} (a bug: please report it with "
        f"the traceback that {DEBUG}=1 or {TRACEBACK} shows)",
        UNEXPECTED,
    )


def _debugging() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")


def _system_error(error: OSError) -> str:
    """Describe what the operating system refused; a failed write does not say to which file."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    subject = " → ".join(names) or "the standard output, or a file, cannot be written"
    return f"{subject}: {error.strerror}"


def _lost_reader() -> bool:
    """Return whether the reader of the standard output or the standard error has closed it."""
    if not hasattr(select, "poll"):  # Windows does not tell
        return True
    for stream in (sys.stdout, sys.stderr):
        poll = select.poll()
        try:
            poll.register(stream.fileno(), 0)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
                return True
        except (OSError, ValueError):  # no file behind it
            continue
    return False


def _flush_or_discard() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_stdout()


def _discard_stdout() -> None:
    """Send what is still to be written nowhere, so that Python does not complain at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # no file behind it: nothing is flushed at exit either
        return


def _write_any_character() -> None:
    """Print a question mark where the encoding of the terminal lacks a character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(
        f"  {name:<{width}}  {description}" for name, description in COMMANDS.items()
    )
    return (
        "usage: keel COMMAND …\n\n"
        "Trust-region policy optimization: exact, visible, enforced.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help     show this help, or that of a command: keel explain --help\n"
        "  -V, --version  show the version\n"
        f"  {TRACEBACK}    show where an error came from, in any command"
    )


def _unknown(kind: str, value: str, choices: list[str]) -> str:
    from keel.errors import similar

    similar_choices = similar(value, choices)
    hint = f", did you mean {similar_choices[0]!r}?" if similar_choices else ""
    return f"unknown {kind} {value!r}{hint or '; there are: ' + ', '.join(choices)}"


def _fail(message: str, status: int = BAD_INPUT) -> int:
    """Print one line on the standard error; a closed one is no reason for another error."""
    with contextlib.suppress(OSError):
        print(f"keel: {printable(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201
    return status


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Show each of Keel's own warnings once, as one line without its place in the code."""
    original = warnings.formatwarning
    printed: set[str] = set()

    def short(
        message: Warning | str, category: type[Warning], *position: Any, **options: Any
    ) -> str:
        if category.__module__.partition(".")[0] == "keel":
            line = f"keel: warning: {printable(' '.join(str(message).split()))}\n"
            if line in printed:
                return ""
            printed.add(line)
            return line
        return printable(original(message, category, *position, **options))

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = original
