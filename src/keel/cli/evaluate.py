"""`keel evaluate RUN`: how good is what a run has learned?"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from keel.cli.arguments import read_options
from keel.cli.kinds import grammar_of
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.training.policy import Policy


@dataclass(frozen=True)
class Evaluate:
    """Play whole episodes with the policy of a run, in environments of their own.

    Example: keel evaluate runs/NAME --episodes 100 --stochastic
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """The folder of the run, such as runs/NAME/seed-0, or runs/NAME if it has one seed."""
    episodes: int = 20
    """Number of episodes."""
    deterministic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Take the likeliest action; this is the default."""
    stochastic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Sample actions, as in training."""
    max_episode_steps: int = 0
    """Steps after which an episode is cut; 0: as in the evaluations of the run."""
    seed: int = 0
    """Random seed of environments and actions."""
    checkpoint: Annotated[str | None, arg(metavar="best|last|STEP")] = None
    """Checkpoint to evaluate; by default the best, or the last where there is no best."""
    video: Annotated[Path | None, arg(metavar="FILE.gif|FILE.mp4")] = None
    """Video of one more episode; .mp4 needs the extra keel-rl[video]."""
    calibration: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Draw what a distributional critic predicted against what came true."""
    trust_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Import code that the run's file names, also from outside of Keel; it can do anything."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of text."""


def run(args: Sequence[str]) -> int:
    """Evaluate; SIGINT and SIGTERM end it between two steps."""
    options = read_options(Evaluate, args, "keel evaluate")
    if options.deterministic and options.stochastic:
        raise InputError("--deterministic: goes without --stochastic")
    from keel.training.signals import graceful_stop

    with graceful_stop() as stop:
        try:
            return _run(options)
        except KeyboardInterrupt:
            if stop.requested is None:
                raise
            print("keel: the evaluation was stopped; nothing was kept", file=sys.stderr)  # noqa: T201
            return stop.exit_code


def _run(options: Evaluate) -> int:
    result, text = grammar_of(_env_of(options.run)).evaluate(options)
    print(json.dumps(result, allow_nan=False) if options.json else text)  # noqa: T201
    return 0


def _env_of(path: Path) -> object:
    """Return the environment of a run; anything that is no run is an error later."""
    from keel.tracking.directory import find_run
    from keel.tracking.record import CONFIG, read_config

    folder = find_run(path)
    return read_config(folder).get("env") if (folder / CONFIG).is_file() else None


def play(options: Evaluate) -> tuple[dict[str, Any], str]:
    """Play episodes of a run on environments: the result, and the same as text."""
    from keel.training.policy import evaluate_policy, open_policy
    from keel.training.video import check_video_path

    if options.video is not None:
        check_video_path(options.video)
    deterministic, seed = not options.stochastic, options.seed
    policy = open_policy(options.run, options.checkpoint, trust_code=options.trust_code)
    video_return = None
    if options.video is not None:  # first: what can go wrong does so before the long part
        video_return = _film(policy, options.video, deterministic, seed)
    coverage = None
    if options.calibration is not None:
        coverage = _calibrate(policy, options.calibration, seed)
    score = evaluate_policy(
        policy,
        episodes=options.episodes,
        deterministic=deterministic,
        seed=seed,
        max_episode_steps=options.max_episode_steps,
    )
    result = {
        "run": str(policy.path),
        "env": policy.config.env,
        "checkpoint": policy.step,
        "deterministic": deterministic,
        "seed": seed,
        **{name.removeprefix("eval/"): value for name, value in score.metrics().items()},
        "episodes": len(score.returns),
        "returns": score.returns,
        "lengths": score.lengths,
        "video": None if options.video is None else str(options.video),
        "video_return": video_return,
        "calibration": None if options.calibration is None else str(options.calibration),
        "coverage_80": coverage,
    }
    return result, _text(result)


def _film(policy: Policy, path: Path, deterministic: bool, seed: int) -> float:
    """Film an episode and return its return; Atari games have a camera of their own."""
    from keel.envs.names import atari_game

    if atari_game(policy.config.env):
        from keel.apps.atari import record_game_video

        return record_game_video(policy, path, deterministic=deterministic, seed=seed).returns[0]
    from keel.training.video import record_video

    return record_video(policy, path, deterministic=deterministic, seed=seed).returns[0]


def _calibrate(policy: Policy, path: Path, seed: int) -> float:
    """Return the share of returns inside the predicted 80 %, with sampled actions."""
    from keel.training.calibration import draw_calibration, measure_calibration

    calibration = measure_calibration(policy, seed=seed)
    draw_calibration(calibration, f"{policy.config.env}, {policy.path.parent.name}", path)
    return calibration.coverage


def _text(result: Mapping[str, object]) -> str:
    returns, lengths = result["returns"], result["lengths"]
    assert isinstance(returns, list)
    assert isinstance(lengths, list)
    mode = "deterministic" if result["deterministic"] else "stochastic"
    cut = result["episodes_cut"]
    lines = [
        f"{result['env']}, checkpoint of step {result['checkpoint']:,}: "
        f"{len(returns)} episode{'s' * (len(returns) != 1)}, {mode}, seed {result['seed']}",
        f"return  {result['return_mean']:,.2f} ± {result['return_std']:,.2f}  "
        f"({min(returns):,.2f} … {max(returns):,.2f})",
        f"length  {result['length_mean']:,.1f}  ({min(lengths):,} … {max(lengths):,})"
        + (f", {cut:.0f} of them cut" if cut else ""),
    ]
    if result["video"] is not None:
        lines.append(
            f"video: {result['video']} (an episode of return {result['video_return']:,.2f})"
        )
    if result["calibration"] is not None:
        lines.append(
            f"calibration: {result['calibration']} "
            f"({result['coverage_80']:.0%} of returns inside the predicted 80 %)"
        )
    return "\n".join(lines)
