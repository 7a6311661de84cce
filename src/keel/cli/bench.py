"""`keel bench NAME …`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro
from tyro.conf import arg

from keel.cli.arguments import describe_actions, run_action
from keel.cli.strict_json import print_json

if TYPE_CHECKING:
    from keel.bench import Result
    from keel.bench.settings import Algo

Backend = Literal["auto", "sync", "envpool"]
USAGE = """\
usage: keel bench NAME …

Keel beside its peers, measured on this machine.

measurements:
{}

options of one:
  keel bench ppo --help"""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Options of every measurement."""

    repeats: int = 3
    """Measurements of each side; their medians count."""
    iterations: Annotated[int | None, arg(metavar="N")] = None
    """Rollouts with their updates per measurement; the default suits the environment."""
    whole: Annotated[int | None, arg(metavar="STEPS")] = None
    """Measure whole runs of STEPS from process start, with cold and with warm compile caches."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


@dataclass(frozen=True, kw_only=True)
class Stepped(Bench):
    """Options of measurements on environments."""

    backend: Annotated[Backend, arg(metavar="auto|sync|envpool")] = "auto"
    """Environments: those that each side makes by itself, or the same on both: `sync`, Gymnasium's,
    one after the other in the same process; `envpool`, EnvPool's."""


@dataclass(frozen=True, kw_only=True)
class PPO(Stepped):
    """PPO beside a peer: the same work on both sides, in turn, each in a process of its own.

    Example: keel bench ppo --env CartPole-v1 --peer sb3
    """

    env: Annotated[str, arg(metavar="CartPole-v1|HalfCheetah-v5|Breakout")] = "CartPole-v1"
    """The environment, with the settings that belong to it."""
    peer: Annotated[str, arg(metavar="sb3|sbx|cleanrl")] = "sb3"
    """Whom to measure against; `make peers` installs them."""


@dataclass(frozen=True, kw_only=True)
class TRPO(Stepped):
    """TRPO beside a peer: the same CG iterations, Fisher sample and critic updates.

    Example: keel bench trpo --env HalfCheetah-v5 --peer sb3-contrib
    """

    env: Annotated[str, arg(metavar="HalfCheetah-v5|Breakout")] = "HalfCheetah-v5"
    """The environment, with the settings that belong to it."""
    peer: Annotated[str, arg(metavar="sb3-contrib")] = "sb3-contrib"
    """Whom to measure against; `make peers` installs it."""


@dataclass(frozen=True, kw_only=True)
class Tokens(Bench):
    """GRPO on a small language model beside a peer: the same model, prompts and answers' lengths.

    Example: keel bench tokens --peer trl
    """

    env: Annotated[str, arg(name="model", metavar="qwen3-0.8m")] = "qwen3-0.8m"
    """The model, with the settings that belong to it."""
    peer: Annotated[str, arg(metavar="trl")] = "trl"
    """Whom to measure against; `make peers` installs it."""


BENCHES = {"ppo": PPO, "trpo": TRPO, "tokens": Tokens}


def run(args: Sequence[str]) -> int:
    """Take one measurement."""
    actions = {algo: (kind, partial(_measure, algo)) for algo, kind in BENCHES.items()}
    return run_action("bench", args, actions, USAGE.format(describe_actions(BENCHES)))


def _measure(algo: str, options: PPO | TRPO | Tokens) -> int:
    from rich.console import Console

    from keel.bench import bench

    console = Console(stderr=True, highlight=False)
    result = bench(
        cast("Algo", algo),
        options.env,
        options.peer,
        repeats=options.repeats,
        iterations=options.iterations,
        whole=options.whole,
        backend=getattr(options, "backend", "auto"),
        log=lambda line: console.print(line, style="dim", markup=False),
    )
    if options.json:
        print_json(dataclasses.asdict(result))
    else:
        _print(result)
    return 0


def _print(result: Result) -> None:
    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    settings = result.settings
    console = PipedConsole(highlight=False)
    console.print(_title(result.env, settings), style="bold")
    unit = "tokens" if settings["algo"] == "tokens" else "steps"
    rows = []
    for name, rate, peak, threads in (
        ("keel", result.ours, result.ours_peak_mb, result.choices.get("threads", "")),
        (result.peer_name, result.peer, result.peer_peak_mb, result.peer_threads),
    ):
        share = f"{rate / result.floor:.0%}" if result.floor else "–"
        rows.append((name, f"{rate:,.0f}", share, f"{peak:,.0f}", str(threads)))
    if result.floor:
        rows.append(("floor", f"{result.floor:,.0f}", "", "", ""))
    console.print(simple_table(("", f"{unit}/s", "of the floor", "peak MB", "threads"), rows))
    if result.whole is not None:
        console.print(_whole_run_line(result.whole, settings["iterations"], result))
    if result.overhead:
        shares = ", ".join(
            f"{result.overhead[key]:.1%} {description}"
            for key, description in (("certify", "exact KL and its company"), ("guard", "guard"))
            if key in result.overhead
        )
        console.print(f"of keel's iterations: {shares}")
    if result.updates:
        ours, peer, ratio = (result.updates[key] for key in ("ours", "peer", "ratio"))
        console.print(
            f"an update alone: keel {ours:.3g} s, {result.peer_name} {peer:.3g} s ({ratio:.2f}×)"
        )
    pairs = zip(result.all_ours, result.all_peer, strict=True)
    spread = " ".join(f"{ours / peer:.2f}" for ours, peer in pairs)
    console.print(
        f"{result.ratio:.2f}× {result.peer_name} ({result.repeats} interleaved repeats, medians; "
        f"each: {spread})",
        style="bold",
    )


def _title(env: str, settings: dict[str, Any]) -> str:
    language = settings["language"]
    if language is not None:
        return (
            f"GRPO on {env}: {language['prompts']} prompts × {language['group']} answers of "
            f"{settings['rollout_steps']} tokens, β {language['beta']:g}"
        )
    return (
        f"{settings['algo'].upper()} on {env}: "
        f"{settings['num_envs']} × {settings['rollout_steps']} steps, "
        f"minibatch {settings['minibatch']}, {settings['epochs']} epochs"
    )


def _whole_run_line(seconds: dict[str, float], iterations: int, result: Result) -> str:
    steps = iterations * result.settings["num_envs"] * result.settings["rollout_steps"]
    parts = [
        f"{state}: keel {seconds[f'ours_{state}_seconds']:.1f} s, "
        f"{result.peer_name} {seconds[f'peer_{state}_seconds']:.1f} s "
        f"({seconds[f'ratio_{state}']:.2f}×)"
        for state in ("cold", "warm")
    ]
    unit = "tokens" if result.settings["algo"] == "tokens" else "steps"
    return f"a whole run of {steps:,} {unit}, " + "; ".join(parts)
