"""`keel serving replay | headroom | judge`: the simulator of a cluster, and routers on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.apps import serving
from keel.cli.arguments import Actions, run_action
from keel.cli.strict_json import print_json
from keel.errors import InputError
from keel.tracking.progress import WorkProgress

if TYPE_CHECKING:
    from keel.apps.serving import Report, Scenario, Scorer, Setting

USUAL = "llama-2-7b-a100"
USAGE = """\
usage: keel serving ACTION …

A cluster of replicas that serve a language model, simulated.

actions:
  replay    another simulator's results again: how far apart is every request?
  headroom  before training: what could a router win here?
  judge     a trained router beside the heuristics, on held-out traces

`keel serving ACTION --help` tells more; `keel train serving` trains a router."""


@dataclass(frozen=True)
class Replay:
    """Play another simulator's results again, and say how far apart every request is.

    Example: keel serving replay results.csv --tables tables.npz
    """

    results: Annotated[Positional[Path], arg(metavar="RESULTS.csv")]
    """Columns arrival_s, prompt_tokens, output_tokens, replica, ttft_s, e2e_s, restarts."""
    tables: Annotated[Path, arg(metavar="TABLES.npz")]
    """The execution times it was made with."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


@dataclass(frozen=True)
class Headroom:
    """Before training: the heuristics against clairvoyant routers, on held-out traces.

    Examples: keel serving headroom --setting mixed
              keel serving headroom --trace azure.csv --replicas 4 --png pictures
    """

    setting: str = "mixed"
    """equal, fixed, speeds, mixed or router: which clusters and traces are drawn."""
    trace: Annotated[Path | None, arg(metavar="FILE")] = None
    """A trace of Azure, Vidur (CSV) or Mooncake (JSONL), as it was recorded, on equal replicas."""
    model: str | None = None
    """The model and device of the replicas; the setting's own if it is not given, and Llama-2-7B
    on an A100 for a trace."""
    replicas: int = 4
    """Number of replicas."""
    scale: float = 1.0
    """Factor on the times between arrivals of a trace."""
    requests: int = 1_000
    """Requests of each trace that is drawn, or the first of a file."""
    seeds: int = 20
    """Number of traces to draw."""
    png: Annotated[Path | None, arg(metavar="DIR")] = None
    """Draw timelines and latencies of the first trace into this folder."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of tables."""


@dataclass(frozen=True)
class Judge:
    """A trained router beside the heuristics, on traces that no training has seen.

    Examples: keel serving judge runs/NAME --setting mixed
              keel serving judge runs/NAME --setting mixed --trace azure.csv
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of a run on `serving`."""
    setting: str = "mixed"
    """equal, fixed, speeds, mixed or router: which clusters and traces are drawn."""
    trace: Annotated[Path | None, arg(metavar="FILE")] = None
    """Requests of a recorded trace in place of drawn ones: windows of its last 30 %, which training
    on it does not see, at the setting's loads."""
    model: str | None = None
    """The model and device of the replicas; the setting's own if it is not given."""
    replicas: int = 4
    """Number of replicas: a router works for any."""
    requests: int = 1_000
    """Requests of each trace."""
    seeds: int = 20
    """Number of traces."""
    clairvoyant: bool = True
    """Also evaluate clairvoyant routers, which takes longer than all others together."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of tables."""


def run(args: Sequence[str]) -> int:
    """Run one of the three actions."""
    actions: Actions = {
        "replay": (Replay, _replay),
        "headroom": (Headroom, _headroom),
        "judge": (Judge, _judge),
    }
    return run_action("serving", args, actions, USAGE)


def _replay(options: Replay) -> int:
    fidelity = serving.compare(options.results, serving.load_tables(options.tables))
    if options.json:
        print_json(fidelity.to_dict())
        return 0
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    console.print(
        f"{fidelity.requests} requests on {fidelity.replicas} replicas\n"
        f"largest relative error of any request: {fidelity.ttft_error:.2g} to the first token, "
        f"{fidelity.end_to_end_error:.2g} to the end\n"
        f"restarts: {fidelity.restarts}, {fidelity.restarts_differ} requests differ\n"
        f"{fidelity.requests_per_second:,.0f} simulated requests a second, on one core"
    )
    return 0


def _headroom(options: Headroom) -> int:
    _at_least_one(seeds=options.seeds, requests=options.requests, replicas=options.replicas)
    if options.png is not None:
        _make_folder(options.png)
    reports = _evaluate(options, None, True)
    headrooms = [serving.headroom(reports, measure) for measure in ("end_to_end", "ttft_p99")]
    if options.png is not None:
        _draw(options, options.png, headrooms[0].best)
    if options.json:
        output: dict[str, Any] = {
            "routers": _mean_metrics(reports), "headroom": [x.to_dict() for x in headrooms],
        }  # fmt: skip
        print_json(output)
        return 0
    console = _table(reports)
    for x, name in zip(headrooms, ("mean end to end", "p99 to the first token"), strict=True):
        console.print(
            f"{name}: {x.best} {x.best_value:.3f} s, clairvoyant {x.clairvoyant:.3f} s: "
            f"{x.room:.1%} ({x.low:.1%} to {x.high:.1%}) to win — {x.verdict}"
            if x.low == x.low
            else f"{name}: {x.best} {x.best_value:.3f} s, clairvoyant "
            f"{x.clairvoyant:.3f} s: {x.room:.1%} to win, on one trace"
        )
    return 0


def _judge(options: Judge) -> int:
    from keel.apps.serving.evaluation import best_heuristic

    _at_least_one(seeds=options.seeds, requests=options.requests, replicas=options.replicas)
    reports = _evaluate(options, serving.load_scorer(options.run), options.clairvoyant)
    gains = [
        serving.gain(reports["policy"], reports[best_heuristic(reports, measure)], measure)
        for measure in ("end_to_end", "ttft_p99")
    ]
    if options.json:
        print_json({"routers": _mean_metrics(reports), "gains": [vars(x) for x in gains]})
        return 0
    console = _table(reports)
    for x, name in zip(gains, ("mean end to end", "p99 to the first token"), strict=True):
        console.print(
            f"{name}: {x.own:.3f} s, best heuristic ({x.against}) {x.other:.3f} s: "
            f"{x.gain:+.1%} saved ({x.low:+.1%} to {x.high:+.1%})"
        )
    return 0


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise InputError(f"--{name}: expected at least 1, got {value}")


def _make_folder(path: Path) -> None:
    """Create a folder for pictures before anything is computed for them."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--png {path}: cannot be made a folder: {error.strerror}") from None


def _setting(options: Headroom | Judge) -> Setting:
    changes: dict[str, Any] = {"replicas": options.replicas}
    if options.model is not None:
        changes["model"] = options.model
    if isinstance(options, Judge) and options.trace is not None:
        changes["trace"] = str(options.trace)
    return serving.make_setting(options.setting, requests=max(2, options.requests), **changes)


def _evaluate(
    options: Headroom | Judge, scorer: Scorer | None, clairvoyant: bool
) -> dict[str, list[Report]]:
    """Evaluate routers on held-out traces of the setting, or on the trace that was recorded."""
    from keel.apps.serving.evaluation import CLAIRVOYANTS

    setting, seeds, draw = serving.Setting(), [0], serving.draw_scenario
    if isinstance(options, Headroom) and options.trace is not None:
        recorded = _scenario(options)
        draw = lambda *_: recorded  # noqa: E731
    else:
        setting, seeds = _setting(options), serving.held_out(options.seeds)
    routers = serving.HEURISTICS
    players = len(routers) + (len(CLAIRVOYANTS) if clairvoyant else 0) + (scorer is not None)
    title = f"keel serving {type(options).__name__.lower()}"
    hint = "kernels are compiled first if they are not yet: a minute"
    with WorkProgress(title, players * len(seeds), hint) as progress:
        return serving.evaluate_routers(
            setting, seeds, routers, scorer, clairvoyant, progress.advance, draw
        )


def _scenario(options: Headroom) -> Scenario:
    """Return the trace that was recorded, on equal replicas, or the first of the setting."""
    if options.trace is None:
        return serving.draw_scenario(_setting(options), serving.held_out(1)[0])
    trace = serving.load_workload(options.trace).slower(options.scale)
    cluster = serving.equal_cluster(serving.closed_form(options.model or USUAL), options.replicas)
    workload = trace.part(0, min(len(trace), options.requests))
    return serving.Scenario(cluster, workload, serving.Conditions())


def _draw(options: Headroom, folder: Path, best: str) -> None:
    from keel.apps.serving.plots import write_latencies, write_timeline

    drawn = _scenario(options)
    results = [
        *(
            serving.simulate(drawn.cluster, drawn.workload, name, drawn.conditions)
            for name in ("round-robin", best)
        ),
        serving.clairvoyant(drawn.cluster, drawn.workload, drawn.conditions),
    ]
    write_latencies(results, folder / "latencies.png")
    for result in results:
        write_timeline(result, folder / f"timeline-{result.router}.png")


def _mean_metrics(reports: dict[str, list[Report]]) -> dict[str, Any]:
    """Return the mean metrics over traces, by router."""
    from keel.apps.serving.results import means

    return {name: means(of_router) for name, of_router in reports.items()}


def _caption(count: int) -> str:
    return (
        f"Seconds to the end (e2e) and to the first token (TTFT), mean of {count} "
        f"trace{'s' * (count > 1)};\nprompts that were cached, the largest share of a replica\n"
    )


def _table(reports: dict[str, list[Report]]) -> Any:
    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    heads = ["", "e2e", "p99", "TTFT", "p99", "SLO", "cached", "share", "lost"]
    rows = []
    for name, metrics in _mean_metrics(reports).items():
        a, b, c, d, slo, hits, share, dropped = metrics.values()
        seconds = [f"{x:.3f}" for x in (a, b, c, d)]
        rows.append([name, *seconds, f"{slo:.1%}", f"{hits:.0%}", f"{share:.0%}", f"{dropped:g}"])
    count = len(next(iter(reports.values())))
    console.print(_caption(count))
    console.print(simple_table(heads, rows))
    return console
