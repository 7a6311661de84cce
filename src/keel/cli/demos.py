"""`keel demos record | show`: episodes to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import run_action
from keel.cli.strict_json import print_json
from keel.errors import InputError
from keel.printing import printable

if TYPE_CHECKING:
    from keel.experience.demo_files import Demos

USAGE = """\
usage: keel demos record ENV --policy RUN|MODULE:FUNCTION --out DIR [--episodes 10]
       keel demos show DIR|minari:ID

Episodes to learn from; `keel demos record --help` has all options."""


@dataclass(frozen=True)
class Record:
    """Play whole episodes with a trained policy, or with a function, and keep them.

    Examples: keel demos record Hopper-v5 --policy runs/NAME --episodes 10 --out demos/hopper
              keel demos record MountainCar-v0 --policy expert:act --out demos/car
    """

    env: Annotated[Positional[str], arg(metavar="ENV")]
    """A Gymnasium id, or an alias; one on which the run was not trained must have its spaces."""
    policy: Annotated[str, arg(metavar="RUN|MODULE:FUNCTION")]
    """The folder of a run, or a function from one observation to an action."""
    out: Annotated[Path, arg(metavar="DIR")]
    """The folder to write; must not exist yet."""
    episodes: int = 10
    """Number of episodes."""
    deterministic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Let a run take its likeliest action; by default it samples."""
    min_return: float | None = None
    """Keep only episodes that earned at least this much; more are played until there are enough."""
    seed: int = 0
    """Random seed of environments and actions."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that the run's file names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


@dataclass(frozen=True)
class Show:
    """Say what demonstrations hold, after checking them."""

    demos: Annotated[Positional[str], arg(metavar="DIR|minari:ID")]
    """A folder that `keel demos record` wrote, or a data set of Minari on this machine."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """Record or show."""
    return run_action("demos", args, {"record": (Record, _record), "show": (Show, _show)}, USAGE)


def _record(options: Record) -> int:
    from keel.apps.demonstrations import record_function, record_policy, save_demos
    from keel.registry import import_function

    if options.out.exists():
        raise InputError(f"{options.out}: exists already; choose another --out")
    if options.episodes < 1:
        raise InputError(f"--episodes: expected at least 1, got {options.episodes}")
    if Path(options.policy).exists():
        from keel.training.policy import open_policy

        policy = open_policy(Path(options.policy), trust_code=options.trust_code)

        def play(episodes: int, seed: int) -> Demos:
            greedy = options.deterministic
            return record_policy(policy, episodes, env=options.env, deterministic=greedy, seed=seed)
    elif ":" in options.policy:
        function = import_function(options.policy)

        def play(episodes: int, seed: int) -> Demos:
            return record_function(
                options.env, function, episodes, seed=seed, source=options.policy
            )
    else:
        raise InputError(f"--policy {options.policy}: no such run; for a function: module:function")
    demos = _play_enough(play, options)
    save_demos(demos, options.out)
    return _print_demos(demos, str(options.out), options.json)


MOST_TRIES = 20
"""Multiple of the requested episodes that is played at most to find good ones."""


def _play_enough(play: Any, options: Record) -> Demos:
    """Play episodes with other seeds until enough of them are good."""
    from keel.experience.demo_files import joined, only

    if options.min_return is None:
        demos: Demos = play(options.episodes, options.seed)
        return demos
    good_demos: list[Demos] = []
    for attempt in range(MOST_TRIES):
        played = play(options.episodes, options.seed + attempt)
        good = only(played, [x >= options.min_return for x in played.returns])
        if good is not None:
            good_demos.append(good)
        if sum(len(x.lengths) for x in good_demos) >= options.episodes:
            all_demos = joined(good_demos)
            chosen = only(all_demos, [i < options.episodes for i in range(len(all_demos.lengths))])
            assert chosen is not None
            return chosen
    count = sum(len(x.lengths) for x in good_demos)
    raise InputError(
        f"--min-return {options.min_return:g}: only {count} of {MOST_TRIES * options.episodes} "
        "episodes earned that much"
    )


def _show(options: Show) -> int:
    from keel.apps.demonstrations import open_demos

    return _print_demos(open_demos(options.demos), options.demos, options.json)


def _print_demos(demos: Demos, name: str, as_json: bool) -> int:
    returns = demos.returns
    mean = sum(returns) / len(returns)
    if as_json:
        summary = {
            "demos": name,
            "env": demos.env,
            "source": demos.source,
            "episodes": len(returns),
            "steps": demos.steps,
            "return_mean": mean,
            "returns": returns,
            "lengths": list(demos.lengths),
        }
        print_json(summary)
        return 0
    text = (
        f"{name}: {demos.env}, {len(returns)} episodes, {demos.steps:,} steps, "
        f"return {mean:,.1f} ({min(returns):,.1f} … {max(returns):,.1f})"
    ) + (f", by {demos.source}" if demos.source else "")
    print(printable(text))  # noqa: T201
    return 0
