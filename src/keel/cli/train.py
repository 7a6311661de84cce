"""`keel train ENV …` and `keel resume RUN …`: train, show, and leave a run behind."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from keel.cli.arguments import check_file, find_option, read_options, translate
from keel.cli.live import NOT_STARTED, Display, print_health, print_line
from keel.cli.note_flags import settle, translate_train
from keel.cli.progress import is_interactive
from keel.cli.render import PipedConsole
from keel.cli.settings import Grammar, Resolved, add_flags, prepare, short_help
from keel.config import Config, check, from_dict, read
from keel.config.origins import Layer, dotted
from keel.errors import InputError
from keel.kernels.compiling import cache_folder
from keel.presets import names, path_of, preset, preset_for
from keel.tracking.health import Breach

if TYPE_CHECKING:
    from keel.training.persist import Progress


@dataclass(frozen=True)
class Train:
    """Train an agent inside an exact, enforced trust region.

    Example: keel train CartPole-v1 --seed 1 --region.max-kl 0.02
    """

    env: Annotated[Positional[str], arg(metavar="ENV")]
    """A Gymnasium id such as CartPole-v1, an alias such as Breakout, or module:Class; by default
    the environment that the file of --config names."""
    preset: str | None = None
    """Settings to start from; by default those of the environment and the algorithm.
    `keel presets` lists them."""
    config_file: Annotated[Path | None, arg(name="config", metavar="FILE.yaml")] = None
    """A YAML file of settings; flags go before it, it goes before the preset."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    name: str | None = None
    """Name of the run; by default environment, algorithm and time."""
    seeds: tuple[int, ...] = ()
    """Train several seeds, as many at a time as there are cores for."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that FILE names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object at the end, and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the settings in force and where each comes from, as a YAML file; train nothing."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def run(args: Sequence[str]) -> int:
    """Train from scratch."""
    if "--presets" in args:
        print("\n".join(names()))  # noqa: T201
        return 0
    if is_language(args):
        from keel.cli import language

        return language.run(args)
    typed = translate_train(args)
    words = settle(typed, resolve)
    grammar = Grammar(resolve, check, _help, lambda x: f"keel train {x.env}")
    options = prepare(words, grammar, typed)
    if options is None:
        return 0
    if len(options.seeds) > 1:
        from keel.cli.seeds import train_seeds

        return train_seeds(words, options)
    from keel.training.runner import start

    config = options.config

    def announce() -> None:
        if not (options.json or options.quiet):
            _announce(config)

    begin = partial(start, config, options.runs, options.name, announce=announce)
    return drive(begin, config, options.json, options.quiet)


def _announce(config: Config) -> None:
    """Say that training begins, after every check."""
    console = PipedConsole()
    if not is_interactive(console):
        print_line(console, f"keel train {config.env}: starting", else_told=NOT_STARTED)
    if never_compiled(config.algo):
        line = "first run: kernels are compiled once, about ten seconds"
        print_line(console, line, "dim", else_told=NOT_STARTED)


def never_compiled(algo: str) -> bool:
    """Whether numba has nothing on disk yet for the loops that an algorithm needs."""
    kernels = "kernels_natural" if algo == "trpo" else "kernels"
    return next(cache_folder().rglob(f"{kernels}.*.nbi"), None) is None


def is_language(args: Sequence[str]) -> bool:
    """Return whether the first word, or else the file of --config, asks for a run on tokens."""
    if args and not args[0].startswith("-"):
        return args[0] == "language"
    file = find_option(translate(args), "--config")
    return file is not None and read(Path(file)).get("env") == "language"


def parse(args: list[str], trust_code: bool = False) -> Train:
    """Return the options, on top of the preset and the file that they name.

    Args:
        args: words of the command line, translated.
        trust_code: import code that the file names, as `--trust-code` among `args` does.
    """
    options: Train = resolve(settle(args, resolve)).options
    check_file(options.config, args, trust_code or options.trust_code)
    return options


def resolve(args: list[str]) -> Resolved:
    """Read the options on top of the preset and the file that they name, and remember the layers.

    The environment is the first word, or else that of the file or of the preset.
    """
    chosen, file = find_option(args, "--preset"), find_option(args, "--config")
    settings = read(Path(file)) if file else {}
    algo = find_option(args, "--algo") or str(settings.get("algo", "ppo"))
    env = (
        _environment(args) or str(settings.get("env", "")) or (preset(chosen).env if chosen else "")
    )
    if not env:
        raise InputError("train what? keel train CartPole-v1; `keel envs` lists what there is")
    name = chosen or preset_for(env, algo)[0]
    base = from_dict(settings, preset(name))
    options = on_top(dataclasses.replace(base, env=env), args, "keel train")
    layers = [Layer(f"preset {name}", dotted(read(path_of(name))))]
    if file:
        layers.append(Layer(f"file {file}", dotted(settings)))
    return add_flags(options, args, layers, ("env",) if _environment(args) else ())


def _environment(args: list[str]) -> str:
    """Return the environment that is named on the command line, or nothing."""
    if args and not args[0].startswith("-"):
        return args[0]
    # which of the words it is, only the whole grammar can tell
    return read_options(Train, args, "keel train", Train(env="")).env


SHORT_HELP = (
    "algo", "seed", "total_steps", "rollout_steps", "envs.num", "envs.normalize_obs",
    "envs.normalize_reward", "network.hidden", "advantage.gamma", "advantage.lam", "region.max_kl",
    "region.clip", "region.epochs", "region.minibatch", "region.learning_rate",
    "explore.entropy_coef", "evaluation.every", "evaluation.episodes", "device", "log",
)  # fmt: skip
"""Settings of the short help: those that most runs change."""
OPTIONS = {
    "--preset NAME": "Settings to start from; `keel presets` lists them.",
    "--config FILE.yaml": "A file of settings; flags go before it, it goes before the preset.",
    "--runs DIR": "Where runs are kept (runs).",
    "--name NAME": "Name of the run; by default environment, algorithm and time.",
    "--seeds 0 1 2": "Train several seeds, as many at a time as there are cores for.",
    "--trust-code": "Import code that FILE names, also from outside of Keel.",
    "--json, --quiet": "Print one JSON object at the end, or nothing.",
    "--print-config": "Print the settings in force and where each comes from; train nothing.",
    "--help-all": "Show every setting.",
}


def _help(words: list[str]) -> str:
    """Return the short help, with the defaults of the environment that is named."""
    named = bool(words) and not words[0].startswith("-")
    resolved = resolve(words if named else ["ENV", *words])
    config = resolved.options.config
    whose = resolved.layers[0].source
    whose = f"{config.env} ({whose})" if named else f"the {whose}"
    about = (
        "Train an agent inside an exact, enforced trust region.\n"
        f"Defaults below are those of {whose}"
        + ("." if named else "; `keel train HalfCheetah-v5 --help` shows those of HalfCheetah-v5.")
    )
    natural = ("natural.cg_iters", "natural.damping") if config.algo == "trpo" else ()
    usage = "keel train ENV [settings and options]"
    return short_help(resolved, usage, about, (*SHORT_HELP, *natural), OPTIONS)


def on_top(base: Config, args: list[str], prog: str) -> Train:
    """The options, on top of a configuration."""
    options = read_options(Train, args, prog, Train(env=base.env, config=base))
    return dataclasses.replace(options, config=dataclasses.replace(options.config, env=options.env))


Begin = Callable[..., Generator["Progress", None, Any]]
"""Starts a run; takes `evaluating`, which is told when an evaluation begins."""
Finish = Callable[["Progress", Console, bool, bool, list[Breach]], None]


def drive(
    begin: Begin, config: Any, as_json: bool, quiet: bool, sum_up: Finish | None = None
) -> int:
    """Consume a run: show it, stop it on request, sum it up; returns the exit status."""
    from keel.training.signals import graceful_stop

    console = PipedConsole()
    newest: Progress | None = None
    display = Display(config, f"keel train {config.env}", console, quiet or as_json)
    progress = begin(evaluating=display.evaluating)
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
        (sum_up or finish)(newest, console, as_json, quiet, display.health.summary())
    if stop.requested is not None and not is_complete(newest):
        print_stopped(newest, config.total_steps)
    return stop.exit_code


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


def summary(newest: Progress, breaches: list[Breach]) -> dict[str, Any]:
    """The last line of `--json`."""
    state = newest.iteration.state
    evaluated = newest.metrics.get("eval/return_mean")
    return {
        "run": str(newest.path),
        "steps": state.steps,
        "return_mean": evaluated,
        "kl_exact_max": _finite(state.kl_exact_max),  # infinite where a fault rules out an action
        "max_kl": newest.iteration.session.config.region.max_kl,
        "rollbacks": state.rollbacks,
        "steps_per_second": state.steps / state.seconds if state.seconds else None,
        "training_return_mean": _finite(newest.metrics.get("rollout/return_mean")),
        "health": [breach.as_dict() for breach in breaches],
        **newest.iteration.session.choices,
    }


def finish(
    newest: Progress, console: Console, as_json: bool, quiet: bool, breaches: list[Breach]
) -> None:
    """Pictures and a summary of the trust region."""
    from keel.tracking.plots import draw_run

    pictures = draw_run(newest.path)
    result = summary(newest, breaches)
    if as_json:
        print(json.dumps(result, allow_nan=False))  # noqa: T201
        return
    if quiet:
        return
    state = newest.iteration.state
    evaluated = result["return_mean"]
    undone = "rejected" if newest.iteration.session.config.algo == "trpo" else "walked back"
    console.soft_wrap = True
    console.print()
    if evaluated is not None:
        console.print(f"evaluation: {evaluated:,.1f}", style="bold", highlight=False)
    console.print(
        f"trust region: largest exact KL(old‖new) of any update {state.kl_exact_max:.4f} nats, "
        f"bound {result['max_kl']:g}; {state.rollbacks} of {state.iteration} updates {undone}",
        highlight=False,
    )
    print_health(console, breaches)
    console.print(f"run: {newest.path}", highlight=False)
    for picture in pictures:
        console.print(f"picture: {picture}", highlight=False)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
