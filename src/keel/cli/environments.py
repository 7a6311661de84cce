"""`keel train ENV`: settings, help and summaries of runs on environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from keel.cli.arguments import check_file, find_option, read_options
from keel.cli.legacy_flags import settle, translate_train
from keel.cli.settings import SHORT_HELP, Grammar, Resolved, TrainOptions, resolved, short_help
from keel.config import Config, check, from_dict, read
from keel.errors import InputError
from keel.kernels import cache_folder
from keel.presets import names, path_of, preset, preset_for

if TYPE_CHECKING:
    from keel.training.persist import Progress


@dataclass(frozen=True)
class Train(TrainOptions):
    """Train an agent inside an exact, enforced trust region.

    Example: keel train CartPole-v1 --seed 1 --region.max-kl 0.02
    """

    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


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
    return resolved(options, args, path_of(name), ("env",) if _environment(args) else ())


def _environment(args: list[str]) -> str:
    """Return the environment that is named on the command line, or nothing."""
    if args and not args[0].startswith("-"):
        return args[0]
    # which of the words it is, only the whole grammar can tell
    return read_options(Train, args, "keel train", Train(env="")).env


def _help(words: list[str]) -> str:
    """Return the short help, with the defaults of the environment that is named."""
    named = bool(words) and not words[0].startswith("-")
    shown = resolve(words if named else ["ENV", *words])
    config = shown.options.config
    whose = shown.layers[0].source
    whose = f"{config.env} ({whose})" if named else f"the {whose}"
    about = (
        "Train an agent inside an exact, enforced trust region.\n"
        f"Defaults below are those of {whose}"
        + ("." if named else "; `keel train HalfCheetah-v5 --help` shows those of HalfCheetah-v5.")
    )
    natural = ("natural.cg_iters", "natural.damping") if config.algo == "trpo" else ()
    usage = "keel train ENV [settings and options]"
    return short_help(shown, usage, about, (*SHORT_HELP.environments, *natural))


def on_top(base: Config, args: list[str], prog: str) -> Train:
    """Return the options on top of a configuration."""
    options = read_options(Train, args, prog, Train(env=base.env, config=base))
    return dataclasses.replace(options, config=dataclasses.replace(options.config, env=options.env))


def _opening(config: Config, choices: Mapping[str, object], terminal: bool) -> list[str]:
    from keel.networks.accelerate import slow_lines

    lines = [] if terminal else [f"keel train {config.env}: starting"]
    lines += slow_lines(choices)
    if never_compiled(config.algo):
        lines.append("first run: kernels are compiled once, about ten seconds")
    return lines


def never_compiled(algo: str) -> bool:
    """Return whether no compiled kernels of an algorithm are on disk yet."""
    kernels = "natural" if algo == "trpo" else "mlp"
    return next(cache_folder().rglob(f"{kernels}.*.nbi"), None) is None


def _draw(path: Path, config: Config) -> list[tuple[str, Path]]:
    from keel.tracking.plots import draw_run

    return [("picture", picture) for picture in draw_run(path)]


def _summary(newest: Progress) -> dict[str, Any]:
    state = newest.iteration.state
    return {
        "return_mean": newest.metrics.get("eval/return_mean"),
        "steps_per_second": state.steps / state.seconds if state.seconds else None,
        "training_return_mean": newest.metrics.get("rollout/return_mean"),
    }


def _outcome(result: dict[str, Any]) -> list[str]:
    evaluated = result["return_mean"]
    return [] if evaluated is None else [f"evaluation: {evaluated:,.1f}"]


def _acceleration(config: Config) -> dict[str, str]:
    from keel.training.session import planned_acceleration

    return planned_acceleration(config)


def _evaluate(options: Any) -> tuple[dict[str, Any], str]:
    from keel.cli.evaluate import play

    return play(options)


GRAMMAR = Grammar(
    presets=names,
    translate=translate_train,
    settle=lambda words: settle(words, resolve),
    resolve=resolve,
    check=check,
    help=_help,
    title=lambda config: f"keel train {config.env}",
    opening=_opening,
    progress_line=lambda config, metrics: "",
    draw=_draw,
    summary=_summary,
    outcome=_outcome,
    acceleration=_acceleration,
    evaluate=_evaluate,
)
