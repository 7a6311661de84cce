"""`keel probe`: is it the algorithm, or the environment?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options
from keel.cli.strict_json import print_json
from keel.config.values import NAMED
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.probes.environment import EnvReport
    from keel.probes.run import Outcome

FAILED = 1
"""Exit status where a probe fails, or an environment is sick."""


@dataclass(frozen=True)
class ProbeOptions:
    """Test the algorithm on environments so small that a failure can only have one cause, or
    measure an environment without a policy.

    Without ENV: eleven probes through Keel's algorithm, or through a training function of your own.
    With ENV: its contract, scales, dead dimensions, whether the action matters, ends and horizon,
    baselines, and the settings that follow. The status is 1 where something fails.

    Examples: keel probe
              keel probe --probes action delay --algo trpo
              keel probe --trainer mine:train
              keel probe Pendulum-v1 --write pendulum.yaml
    """

    env: Annotated[Positional[str], arg(metavar="ENV")] = ""
    """An environment as for `keel train`; without it the probes are run."""
    probes: Annotated[tuple[str, ...], arg(metavar="NAME …")] = ()
    """Probes to run; by default all."""
    trainer: Annotated[str, arg(metavar="MODULE:FUNCTION")] = ""
    """`function(make_env, total_steps, seed) -> act(obs)`, which is probed in place of Keel."""
    algo: Annotated[str, arg(metavar="ppo|trpo|happo")] = "ppo"
    """Algorithm of Keel's to probe."""
    config: Annotated[Path | None, arg(metavar="FILE.yaml")] = None
    """Settings of Keel's to probe; sizes, discounts and lengths are the probes' own."""
    env_options: Annotated[dict[str, Any], NAMED] = field(default_factory=dict)
    """Options of the constructor of ENV."""
    seed: int = 0
    """Random seed of environments, actions and training."""
    seconds: float = 12.0
    """Budget of each long part of measuring ENV."""
    write: Annotated[Path | None, arg(metavar="FILE.yaml")] = None
    """Write the settings that follow from ENV, for `keel train --config`."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """Run probes, or measure an environment."""
    options = read_options(ProbeOptions, args, "keel probe")
    if options.env:
        return _measure(options)
    if options.write is not None:
        raise InputError("probe: --write needs ENV, from which settings follow")
    return _run_probes(options)


def _run_probes(options: ProbeOptions) -> int:
    """Run the probes, each told as soon as it is done."""
    from keel.probes.run import run_elsewhere, run_probes, select

    probes = select(options.probes)
    if options.trainer:
        outcomes = run_elsewhere(_trainer(options.trainer), probes, options.seed)
    else:
        outcomes = run_probes(probes, _settings(options), options.seed)
    if options.json:
        done = list(outcomes)
        print_json({"probes": [outcome.as_dict() for outcome in done]})
    else:
        done = list(_told(outcomes))
    if not done:
        names = ", ".join(probe.name for probe in probes)
        raise InputError(
            f"probe: none of {names} can be run on a function that returns actions only"
        )
    return 0 if all(outcome.passed for outcome in done) else FAILED


def _trainer(name: str) -> Any:
    """Import the training function that was typed."""
    from keel.registry import import_attribute

    function = import_attribute(name)
    if not callable(function):
        raise InputError(f"--trainer {name}: not a function")
    return function


def _settings(options: ProbeOptions) -> dict[str, Any]:
    """Return the settings of Keel's that were asked for, nested."""
    settings: dict[str, Any] = {}
    if options.config is not None:
        from keel.config import read

        settings = dict(read(options.config))
        for own in ("env", "total_steps", "seed"):
            settings.pop(own, None)
    return settings | {"algo": settings.get("algo", options.algo)}


def _told(outcomes: Iterable[Outcome]) -> Iterable[Outcome]:
    """Print each outcome when it is there, and the verdict at the end."""
    from rich.text import Text

    from keel.printing import printable
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    failed = []
    for outcome in outcomes:
        word, color = ("ok", "green") if outcome.passed else ("FAILS", "bold red")
        line = Text(f"{outcome.probe.name:<20}").append(f"{word:<6}", style=color)
        line.append(printable(f"{outcome.measured}   {outcome.seconds:.1f} s"))
        console.print(line, soft_wrap=True)
        if not outcome.passed:
            failed.append(outcome.probe.name)
            console.print(Text(f"  isolates: {outcome.probe.isolates}", style="dim"))
            console.print(Text(f"  means: {outcome.probe.failure}"))
            if outcome.error:
                console.print(Text(f"  raised: {printable(outcome.error)}", style="red"))
        yield outcome
    if failed:
        first = f"{failed[0]} first: what fails before explains what fails after"
        console.print(Text(f"{len(failed)} failed: {', '.join(failed)}; look at {first}"))
    else:
        console.print(Text("all passed", style="green"))


def _measure(options: ProbeOptions) -> int:
    """Measure an environment."""
    from keel.probes.environment import PARTS, probe_environment
    from keel.tracking.progress import WorkProgress

    if options.trainer or options.probes:
        raise InputError("probe: --trainer and --probes go without ENV")
    with WorkProgress("keel probe", len(PARTS), PARTS[0]) as progress:
        report = probe_environment(
            options.env,
            options=options.env_options or None,
            seed=options.seed,
            seconds=options.seconds,
            progress=lambda part: progress.advance(1.0 if part != PARTS[0] else 0.0, part),
        )
    if options.json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    if options.write is not None:
        _write(report, options.write, quiet=options.json)
    return FAILED if report.verdict == "sick" else 0


def _print_report(report: EnvReport) -> None:
    from rich.text import Text

    from keel.printing import printable
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    styles = {"sick": "bold red", "watch": "yellow", "good": "green", "fact": "dim"}
    verdict = {"good": "healthy"}.get(report.verdict, report.verdict)
    console.print(Text(f"{verdict}: {printable(report.env)}", style=styles[report.verdict]))
    for remark in report.remarks:
        line = Text(f"{remark.level:<6}", style=styles[remark.level])
        line.append(f"{remark.topic}: {printable(remark.text)}", style="default")
        console.print(line, soft_wrap=True)
    for name, value in report.settings.items():
        console.print(Text(f"setting: --{name.replace('_', '-')} {value}"), soft_wrap=True)


def _write(report: EnvReport, path: Path, *, quiet: bool) -> None:
    """Write the settings that follow as a file for `keel train --config`."""
    import yaml

    from keel.config import nested
    from keel.tracking.files import write_file

    settings = {"env": report.env, **nested(report.settings)}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_file(path, text.encode(), make_folder=False)
    if not quiet:
        print(f"written: keel train --config {path}")  # noqa: T201
