"""`keel train language`: token-level PPO, GRPO and their kin on a language model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from keel.apps.language.checks import check
from keel.apps.language.config import Language, decoding, from_dict
from keel.cli.arguments import find_option, read_options
from keel.cli.live import NOT_STARTED, print_health, print_line
from keel.cli.note_flags import translate_language
from keel.cli.render import PipedConsole
from keel.cli.settings import Grammar, Resolved, add_flags, prepare, short_help
from keel.config import read
from keel.config.origins import Layer, dotted
from keel.tracking.health import Breach

if TYPE_CHECKING:
    from keel.training.persist import Progress


@dataclass(frozen=True)
class TrainLanguage:
    """Train a language model on a task with a verifier, inside an exact, enforced trust region.

    Examples: keel train language --task lookup --algo grpo
              keel train language --task addition --algo ppo --kl.place reward
    """

    env: Annotated[Positional[str], arg(metavar="language")] = "language"
    preset: str | None = None
    """Settings to start from; by default those of the task. `keel presets` lists them."""
    config_file: Annotated[Path | None, arg(name="config", metavar="FILE.yaml")] = None
    """A YAML file of settings; flags go before it, it goes before the preset."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    name: str | None = None
    """Name of the run; by default task, algorithm and time."""
    seeds: tuple[int, ...] = ()
    """Train several seeds, one after the other or as many at a time as there are cores for."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that FILE names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object at the end, and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the settings in force and where each comes from, as a YAML file; train nothing."""
    config: Annotated[Language, arg(name="")] = field(default_factory=Language)


def run(args: Sequence[str]) -> int:
    """Train from scratch."""
    if "--presets" in args:
        from keel.apps.language.presets import names

        print("\n".join(names()))  # noqa: T201
        return 0
    words = translate_language(args)
    options = prepare(words, Grammar(resolve, check, _help, _title))
    if options is None:
        return 0
    if len(options.seeds) > 1:
        from keel.cli.seeds import train_seeds

        return train_seeds(words, options)
    from keel.apps.language.config import task_options
    from keel.apps.language.tasks import task_named
    from keel.cli.train import drive
    from keel.training.runner import start

    config = options.config
    task_named(config.task, **task_options(config))  # a typo is reported before anything else
    console, verbose = PipedConsole(), not (options.json or options.quiet)

    def on_progress(warm: dict[str, float]) -> None:
        if verbose:
            stage, of = ("control", f" of {warm['of']:.0f}") if "of" in warm else ("warm-up", "")
            print_line(
                console,
                f"{stage}, pass {warm['epoch']:.0f}{of}: loss {warm['loss']:.3f}, "
                f"{warm['success']:.0%} solved, {decoding(config)}",
                "dim",
            )

    def announce() -> None:
        if verbose:
            line = f"keel train language: {config.task} by {config.algo}"
            print_line(console, line, else_told=NOT_STARTED)

    begin = partial(
        start, config, options.runs, options.name, on_progress=on_progress, announce=announce
    )
    return drive(begin, config, options.json, options.quiet, finish)


def _title(config: Language) -> str:
    return f"keel train language --task {config.task}"


def resolve(args: list[str]) -> Resolved:
    """Read the options on top of the preset and the file that they name; remember the layers."""
    from keel.apps.language.presets import name_for, path_of, preset, preset_for

    file = find_option(args, "--config")
    settings = read(Path(file)) if file else {}
    chosen = find_option(args, "--preset")
    task = find_option(args, "--task") or settings.get("task")
    algo = find_option(args, "--algo") or settings.get("algo")
    wanted = str(task or Language().task)
    base = preset(chosen) if chosen else preset_for(wanted, algo)
    base = from_dict({**settings, "env": "language"}, base)
    options = read_options(TrainLanguage, args, "keel train", TrainLanguage(config=base))
    layers = []
    name = chosen or name_for(wanted, algo)
    if name is not None:
        layers.append(Layer(f"preset {name}", dotted(read(path_of(name)))))
    if file:
        layers.append(Layer(f"file {file}", dotted(settings)))
    return add_flags(options, args, layers, ("env",))


SHORT_HELP = (
    "task", "task_options", "algo", "seed", "total_steps", "model.path", "model.hidden",
    "model.layers", "sample.prompts", "sample.group", "sample.temperature", "kl.place", "kl.coef",
    "region.max_kl", "region.clip", "region.epochs", "region.minibatch", "region.learning_rate",
    "warmup.examples", "warmup.until", "evaluation.every", "evaluation.prompts",
    "evaluation.greedy", "device", "log",
)  # fmt: skip
"""Settings of the short help: those that most runs change."""


def _help(args: list[str]) -> str:
    """Return the short help, with the defaults of the task that is named."""
    from keel.cli.train import OPTIONS

    resolved = resolve(args)
    config = resolved.options.config
    about = (
        "Train a language model on a task with a verifier, inside an exact, enforced trust "
        f"region.\nDefaults below are those of task {config.task}."
    )
    return short_help(resolved, "keel train language [settings and options]", about, SHORT_HELP,
                      OPTIONS)  # fmt: skip


def summary(newest: Progress, breaches: list[Breach]) -> dict[str, Any]:
    """The last line of `--json`."""
    state, metrics = newest.iteration.state, newest.metrics
    return {
        "run": str(newest.path),
        "steps": state.steps,
        "return_mean": metrics.get("eval/success"),
        "success": metrics.get("eval/success"),
        "decoding": decoding(newest.iteration.session.config),
        "warmup_success": metrics.get("eval/warmup_success"),
        "control_success": metrics.get("eval/control_success"),
        "kl_exact_max": state.kl_exact_max,
        "max_kl": newest.iteration.session.config.region.max_kl,
        "rollbacks": state.rollbacks,
        "seconds": state.seconds,
        "health": [breach.as_dict() for breach in breaches],
        **newest.iteration.session.choices,
    }


def finish(
    newest: Progress, console: Console, as_json: bool, quiet: bool, breaches: list[Breach]
) -> None:
    """Pictures, and what came of it beside warm-up and control."""
    from keel.apps.language.picture import draw_language
    from keel.tracking.plots import draw_run

    config = newest.iteration.session.config
    target = config.kl.target if config.kl.controller == "adaptive" else None
    pictures = [draw_language(newest.path, target), *draw_run(newest.path)]
    totals = summary(newest, breaches)
    if as_json:
        print(json.dumps(totals, allow_nan=False))  # noqa: T201
        return
    if quiet:
        return
    console.soft_wrap = True
    console.print()
    for name, key in (
        ("after the warm-up", "warmup_success"),
        ("more imitation, equal computing", "control_success"),
        ("after RL", "success"),
    ):
        if totals[key] is not None:
            solved = f"solved {name}: {totals[key]:.1%} ({totals['decoding']})"
            console.print(solved, highlight=False)
    console.print(
        f"trust region: largest exact KL(old‖new) of any update {totals['kl_exact_max']:.4f} nats "
        f"per token, bound {totals['max_kl']:g}; {totals['rollbacks']} of "
        f"{newest.iteration.state.iteration} updates walked back",
        highlight=False,
    )
    print_health(console, breaches)
    console.print(f"run: {newest.path}", highlight=False)
    page = newest.path / "tokens.html"
    for what, path in (*(("picture", x) for x in pictures), ("tokens", page)):
        if path.is_file():
            console.print(f"{what}: {path}", highlight=False)


def resume(
    run_path: Path, total_steps: int | None, as_json: bool, quiet: bool, trust_code: bool = False
) -> int:
    """`keel resume` of a run on tokens."""
    from keel.cli.train import drive
    from keel.tracking.config_file import read_config
    from keel.training import runner

    config = from_dict(read_config(run_path))
    if total_steps is not None:
        config = dataclasses.replace(config, total_steps=total_steps)
    run = partial(runner.resume, run_path, config, trust_code=trust_code)
    return drive(run, config, as_json, quiet, finish)


def evaluate(run_path: Path, checkpoint: str | None, prompts: int, greedy: bool) -> dict[str, Any]:
    """`keel evaluate` of a run on tokens: held-out prompts, one completion each."""
    from keel.apps.language.inspect import judge_run

    return judge_run(run_path, checkpoint, prompts, greedy=greedy)
