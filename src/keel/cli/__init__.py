"""The command line: `keel COMMAND …`, each command a thin call of a library function.

Commands are imported when they are called, so that `keel --help` needs neither torch nor patience.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train an agent inside an exact, enforced trust region",
    "resume": "go on with a run where it stopped",
    "evaluate": "play whole episodes with a trained policy",
    "export": "write a trained policy as an ONNX file",
    "compare": "groups of runs side by side: keep, roll back, or not distinguishable",
    "ablate": "train a grid of settings over seeds, and compare",
    "tune": "search settings with Optuna, inside the trust region",
    "demos": "record episodes to learn from",
    "land": "the land-development game: a policy beside the baselines, on maps it has never seen",
    "serving": "replicas of a language model, simulated: heuristics, headroom, trained routers",
    "route": "a trained router in front of real servers, held to a heuristic by guards",
    "runs": "list runs, or export one as CSV",
    "bench": "measure training speed side by side with a peer",
    "explain": "what KL, clipping, penalties and trust regions do to your numbers",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status (0 done, 2 bad input, 130 interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())  # noqa: T201
        return 0
    if args[0] in ("-V", "--version"):
        from keel import __version__

        print(f"keel {__version__}")  # noqa: T201
        return 0
    if args[0] not in COMMANDS:
        return _fail(_unknown("command", args[0], list(COMMANDS)) + " (`keel --help` lists them)")
    return _run(args[0], args[1:])


def _run(command: str, args: list[str]) -> int:
    from keel.errors import KeelError

    try:
        status: int = importlib.import_module(f"keel.cli.{command}").run(args)
        sys.stdout.flush()
        return status
    except KeelError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader (`head`, a closed pager) has what it wanted; do not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        "usage: keel COMMAND …\n\n"
        "Trust-region policy optimization: exact, visible, enforced.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n"
        "  -h, --help     show this help, or that of a command: keel explain --help\n"
        "  -V, --version  show the version"
    )


def _unknown(what: str, value: str, known: list[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {value!r}{hint or '; there are: ' + ', '.join(known)}"


def _fail(message: str, status: int = 2) -> int:
    print(f"keel: {message}", file=sys.stderr)  # noqa: T201
    return status
