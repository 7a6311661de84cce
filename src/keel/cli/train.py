"""`keel train ENV …` and `keel resume RUN …`: train, show, and leave a run behind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from keel.cli.kinds import grammar_for
from keel.cli.settings import Grammar, prepare
from keel.cli.strict_json import print_json, strict
from keel.tracking.health import Breach
from keel.tracking.live import NOT_STARTED, Display, print_health, print_line, verdict_style
from keel.tracking.progress import PipedConsole, is_interactive

if TYPE_CHECKING:
    from keel.doctor.watching import Watching
    from keel.training.persist import Progress

Begin = Callable[..., Generator["Progress", None, Any]]
"""Starts a run; takes `evaluating` and `on_progress`, which are called as it goes on."""


def run(args: Sequence[str]) -> int:
    """Train from scratch."""
    grammar = grammar_for(args)
    if "--presets" in args:
        print("\n".join(grammar.presets()))  # noqa: T201
        return 0
    typed = grammar.translate(args)
    words = grammar.settle(typed)
    options = prepare(words, grammar, typed)
    if options is None:
        return 0
    if len(options.seeds) > 1:
        from keel.cli.seeds import train_seeds

        return train_seeds(words, options)
    from keel.training.runner import start

    config, verbose = options.config, not (options.json or options.quiet)

    def announce(choices: Mapping[str, object]) -> None:
        if verbose:
            _announce(grammar, config, choices)

    begin = partial(start, config, options.runs, options.name, announce=announce)
    return drive(begin, grammar, config, options.json, options.quiet)


def _announce(grammar: Grammar, config: Any, choices: Mapping[str, object]) -> None:
    """Say that training begins, after every check."""
    console = PipedConsole()
    for line in grammar.opening(config, choices, is_interactive(console)):
        print_line(console, line, "dim", else_told=NOT_STARTED)


def drive(begin: Begin, grammar: Grammar, config: Any, as_json: bool, quiet: bool) -> int:
    """Consume a run: show it, stop it on request, sum it up; returns the exit status."""
    from keel.training.signals import graceful_stop

    console = PipedConsole()
    newest: Progress | None = None
    display = Display(
        config, f"keel train {config.env}", console, quiet or as_json, watching(config)
    )

    def on_progress(metrics: dict[str, float]) -> None:
        if not (quiet or as_json):
            print_line(console, grammar.progress_line(config, metrics), "dim")

    progress = begin(evaluating=display.evaluating, on_progress=on_progress)
    with graceful_stop() as stop, display:
        try:
            with closing(progress):
                for newest in progress:
                    display.update(newest.iteration.steps, newest.metrics, newest.done)
                    stop.safe = newest.done or stop.requested is not None
                    if stop.requested is not None:
                        break
        except KeyboardInterrupt:
            if stop.requested is None:
                raise
            print_stopped(newest, config.total_steps, at_once=True)
            return stop.exit_code
    if newest is not None:
        finish(newest, grammar, console, as_json, quiet, display.health.summary())
    if stop.requested is not None and not is_complete(newest):
        print_stopped(newest, config.total_steps)
    return stop.exit_code


def watching(config: Any) -> Watching | None:
    """Return what looks at a run while it goes on, unless that is switched off."""
    from keel.doctor.watching import Watching

    return Watching(config) if config.doctor else None


def is_complete(newest: Progress | None) -> bool:
    """Return whether a run has nothing left to do, its last evaluation included."""
    return newest is not None and newest.done and "eval/return_mean" in newest.metrics


def print_stopped(newest: Progress | None, total: int, *, at_once: bool = False) -> None:
    """Say on standard error where a run stopped that was asked to, and how it goes on."""
    if newest is None:
        line = "stopped before the first update"
    else:
        where = "stopped at once, after" if at_once else "stopped at"
        line = f"{where} {newest.steps:,} of {total:,} steps; go on with: keel resume {newest.path}"
    print(f"keel: {line}", file=sys.stderr)  # noqa: T201


def summary(newest: Progress, grammar: Grammar, breaches: list[Breach]) -> dict[str, Any]:
    """Return the last line of `--json`."""
    from keel.doctor.watching import read_verdict

    verdict = read_verdict(newest.path)
    state, session = newest.iteration.state, newest.iteration.session
    entries = {
        "run": str(newest.path),
        "steps": state.steps,
        **grammar.summary(newest),
        "kl_exact_max": state.kl_exact_max,  # infinite where a fault rules out an action
        "max_kl": session.config.region.max_kl,
        "rollbacks": state.rollbacks,
        "seconds": state.seconds,
        "health": [breach.as_dict() for breach in breaches],
        "doctor": None
        if verdict is None
        else dict(zip(("verdict", "sentence"), verdict, strict=True)),
        **session.choices,
    }
    finite: dict[str, Any] = strict(entries)
    return finite


def finish(
    newest: Progress,
    grammar: Grammar,
    console: Console,
    as_json: bool,
    quiet: bool,
    breaches: list[Breach],
) -> None:
    """Draw pictures, and print the return and a summary of the trust region."""
    session, state = newest.iteration.session, newest.iteration.state
    pictures = grammar.draw(newest.path, session.config)
    result = summary(newest, grammar, breaches)
    if as_json:
        print_json(result)
        return
    if quiet:
        return
    undone = "rejected" if session.config.algo == "trpo" else "walked back"
    console.soft_wrap = True
    console.print()
    for line in grammar.outcome(result):
        console.print(line, style="bold", highlight=False)
    console.print(
        f"trust region: largest exact KL(old‖new) of any update {state.kl_exact_max:.4f} "
        f"{grammar.unit}, bound {result['max_kl']:g}; {state.rollbacks} of {state.iteration} "
        f"updates {undone}",
        highlight=False,
    )
    print_health(console, breaches)
    print_verdict(console, newest.path, result["doctor"])
    console.print(f"run: {newest.path}", highlight=False)
    for what, path in pictures:
        if path.is_file():
            console.print(f"{what}: {path}", highlight=False)


def print_verdict(console: Console, run: Path, doctor: Mapping[str, str] | None) -> None:
    """Print the doctor's verdict in a line, and where there is more of it."""
    if doctor is None:
        return
    verdict = doctor["verdict"]
    console.print(
        f"doctor: {verdict}: {doctor['sentence']}", style=verdict_style(verdict), highlight=False
    )
    if verdict in ("sick", "watch"):
        console.print(f"  evidence and fix: keel doctor {run}", style="dim", highlight=False)
