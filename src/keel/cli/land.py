"""`keel land`: policies and baselines on maps that no training has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional, arg

from keel.apps import land
from keel.cli.arguments import read_options
from keel.cli.strict_json import print_json
from keel.errors import InputError, check_choice
from keel.tracking.progress import WorkProgress

if TYPE_CHECKING:
    from keel.apps.land import Report, Rules
    from keel.apps.land.baselines import Player


@dataclass(frozen=True)
class Land:
    """Play the land-development game with a trained policy and with baselines, on held-out maps.

    Without a run, the baselines alone.

    Examples: keel land runs/land-1 --maps 50
              keel land runs/land-1 --png city.png --gif city.gif
    """

    run: Annotated[Positional[Path | None], arg(metavar="RUN")] = None
    """The folder of a run on `land`."""
    maps: int = 20
    """Number of maps."""
    variant: str = "full"
    """Variant of the game where no run says it: full or small."""
    baselines: tuple[str, ...] = ("wait", "random", "greedy-npv", "greedy-roi")
    """Baselines to play; `beam` looks months ahead and takes seconds a map."""
    optimum: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also solve every map exactly; the small variant only."""
    deterministic: bool = True
    """Take the likeliest actions, in place of sampling."""
    png: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Draw the city at the end of the first map."""
    gif: Annotated[Path | None, arg(metavar="FILE.gif")] = None
    """Film the months of the first map."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of a table."""


def run(args: Sequence[str]) -> int:
    """Play all policies on held-out maps and print their reports."""
    chosen = read_options(Land, args, "keel land")
    if chosen.maps < 1:
        raise InputError(f"--maps: expected at least 1, got {chosen.maps}")
    for path, suffix in ((chosen.png, ".png"), (chosen.gif, ".gif")):
        if path is not None and (path.suffix.lower() != suffix or not path.parent.is_dir()):
            raise InputError(f"{path}: expected a file ending in {suffix}, in a folder that exists")
    players: dict[str, Player] = {}
    rules = land.make_rules(chosen.variant)
    if chosen.run is not None:
        from keel.apps.land.trained_policy import rules_of, trained_player
        from keel.training.policy import open_policy

        policy = open_policy(chosen.run)
        rules = rules_of(policy)
        players[policy.path.parent.name] = trained_player(
            policy, deterministic=chosen.deterministic
        )
    for name in chosen.baselines:
        players[name] = land.BASELINES[check_choice("baselines", name, land.BASELINES)]
    seeds = land.held_out(chosen.maps)
    months = rules.months * len(players)
    with WorkProgress("keel land", months, _step(next(iter(players), ""))) as progress:
        reports = [
            land.play(
                player, rules, seeds, name=name, on_month=partial(progress.advance, 1, _step(name))
            )
            for name, player in players.items()
        ]
    best = _optimum(rules, reports) if chosen.optimum else None
    _draw(chosen, rules, next(iter(players.values())), int(seeds[0]))
    if chosen.json:
        output = {"maps": chosen.maps, "reports": [report.to_dict() for report in reports]}
        if best is not None:
            output["optimum"] = best
        print_json(output)
        return 0
    _table(reports, best)
    return 0


def _optimum(rules: Rules, reports: list[Report]) -> float:
    """Return the mean optimum over the maps."""
    maps, total = reports[0].maps, 0.0
    with WorkProgress("keel land", len(maps), "solving maps exactly") as progress:
        for seed in maps:
            total += land.find_optimum(seed, rules).npv
            progress.advance(1, "solving maps exactly")
    return total / len(maps)


def _step(player: str) -> str:
    return f"{player} plays"


def _draw(chosen: Land, rules: Rules, player: Player, seed: int) -> None:
    if chosen.png is None and chosen.gif is None:
        return
    record = land.record_game(player, rules, seed)
    if chosen.png is not None:
        land.write_city(record, chosen.png)
    if chosen.gif is not None:
        land.write_gif(record, chosen.gif)


def _table(reports: list[Report], best: float | None) -> None:
    from keel.cli.render import simple_table
    from keel.tracking.progress import PipedConsole

    console = PipedConsole(highlight=False)
    names = list(reports[0].npv)
    money = [
        [
            report.policy,
            f"{report.total:,.0f}",
            *([] if best is None else [f"{report.total / best:.1%}"]),
            *(f"{report.npv[name]:,.0f}" for name in names),
        ]
        for report in reports
    ]
    built = [
        [
            report.policy,
            *(f"{share:.0%}" for share in report.sizes.values()),
            f"{sum(report.buildings.values()):.1f}",
            f"{report.gini:.2f}",
            f"{max(report.bankruptcies.values()):.0%}",
            f"{report.conflicts:.1f}",
        ]
        for report in reports
    ]
    share = [] if best is None else ["of optimum"]
    count = len(reports[0].maps)
    console.print(f"Net present value in thousands, mean of {count} held-out maps\n")
    console.print(simple_table(["", "total", *share, *names], money))
    sizes = list(reports[0].sizes)
    heads = ["", *sizes, "buildings", "Gini", "bankrupt", "conflicts"]
    console.print(simple_table(heads, built))
