"""`keel train language`: token-level PPO, GRPO and their kin on a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from keel.apps.language.checks import check
from keel.apps.language.config import Language, decoding, from_dict
from keel.apps.language.presets import name_for, names, path_of, preset, preset_for
from keel.apps.language.tasks import task_named
from keel.cli.arguments import find_option, read_options
from keel.cli.legacy_flags import translate_language
from keel.cli.settings import SHORT_HELP, Grammar, Resolved, TrainOptions, resolved, short_help
from keel.config import read

if TYPE_CHECKING:
    from keel.cli.evaluate import Evaluate
    from keel.training.persist import Progress


@dataclass(frozen=True)
class TrainLanguage(TrainOptions):
    """Train a language model on a task with a verifier, inside an exact, enforced trust region.

    Examples: keel train language --task lookup --algo grpo
              keel train language --task addition --algo ppo --kl.place reward
    """

    env: Annotated[Positional[str], arg(metavar="language")] = "language"
    config: Annotated[Language, arg(name="")] = field(default_factory=Language)


def resolve(args: list[str]) -> Resolved:
    """Read the options on top of the preset and the file that they name; remember the layers."""
    file = find_option(args, "--config")
    settings = read(Path(file)) if file else {}
    chosen = find_option(args, "--preset")
    task = find_option(args, "--task") or settings.get("task")
    algo = find_option(args, "--algo") or settings.get("algo")
    wanted = str(task or Language().task)
    base = preset(chosen) if chosen else preset_for(wanted, algo)
    base = from_dict({**settings, "env": "language"}, base)
    options = read_options(TrainLanguage, args, "keel train", TrainLanguage(config=base))
    name = chosen or name_for(wanted, algo)
    return resolved(options, args, None if name is None else path_of(name), ("env",))


def _help(args: list[str]) -> str:
    """Return the short help, with the defaults of the task that is named."""
    shown = resolve(args)
    config = shown.options.config
    about = (
        "Train a language model on a task with a verifier, inside an exact, enforced trust "
        f"region.\nDefaults below are those of task {config.task}."
    )
    return short_help(
        shown, "keel train language [settings and options]", about, SHORT_HELP.language
    )


def _progress_line(config: Language, metrics: dict[str, float]) -> str:
    stage, of = ("control", f" of {metrics['of']:.0f}") if "of" in metrics else ("warm-up", "")
    return (
        f"{stage}, pass {metrics['epoch']:.0f}{of}: loss {metrics['loss']:.3f}, "
        f"{metrics['success']:.0%} solved, {decoding(config)}"
    )


def _draw(path: Path, config: Language) -> list[tuple[str, Path]]:
    from keel.apps.language.picture import draw_language
    from keel.apps.language.source import HEATMAP
    from keel.tracking.plots import draw_run

    target = config.kl.target if config.kl.controller == "adaptive" else None
    pictures = [draw_language(path, target), *draw_run(path)]
    return [*(("picture", picture) for picture in pictures), ("tokens", path / HEATMAP)]


def _summary(newest: Progress) -> dict[str, Any]:
    metrics = newest.metrics
    return {
        "return_mean": metrics.get("eval/success"),
        "success": metrics.get("eval/success"),
        "decoding": decoding(newest.iteration.session.config),
        "warmup_success": metrics.get("eval/warmup_success"),
        "control_success": metrics.get("eval/control_success"),
    }


def _outcome(result: dict[str, Any]) -> list[str]:
    """Say what came of it beside warm-up and control."""
    names = {
        "warmup_success": "after the warm-up",
        "control_success": "more imitation, equal computing",
        "success": "after RL",
    }
    return [
        f"solved {name}: {result[key]:.1%} ({result['decoding']})"
        for key, name in names.items()
        if result[key] is not None
    ]


def _evaluate(options: Evaluate) -> tuple[dict[str, Any], str]:
    """Judge held-out prompts, one completion each."""
    from keel.apps.language.inspect import judge_run

    result = judge_run(
        options.run, options.checkpoint, options.episodes, greedy=not options.stochastic
    )
    return result, _text(result)


def _text(result: Mapping[str, Any]) -> str:
    from keel.functional import wilson_interval

    _, low, high = wilson_interval(result["success"] * result["episodes"], result["episodes"])
    samples = zip(result["completions"][:3], result["scores"], strict=False)
    return "\n".join(
        [
            f"{result['env']}, checkpoint of step {result['checkpoint']:,}: "
            f"{result['episodes']:.0f} held-out prompts, {result['decoding']}",
            f"solved  {result['success']:.1%} (95 %: {low:.1%} to {high:.1%})   "
            f"reward {result['return_mean']:.3f}   length {result['length_mean']:.1f}",
            *(f"  {score:.0f}  {text!r}" for text, score in samples),
        ]
    )


def _check(config: Language) -> None:
    check(config)
    task_named(config.task, **config.task_options)  # a typo is reported before anything else


GRAMMAR = Grammar(
    presets=names,
    translate=translate_language,
    settle=list,
    resolve=resolve,
    check=_check,
    help=_help,
    title=lambda config: f"keel train language --task {config.task}",
    opening=lambda config, choices, terminal: [
        f"keel train language: {config.task} by {config.algo}"
    ],
    progress_line=_progress_line,
    draw=_draw,
    summary=_summary,
    outcome=_outcome,
    acceleration=lambda config: {"optimizer_step": "torch (kernels take no language models)"},
    evaluate=_evaluate,
    unit="nats per token",
)
