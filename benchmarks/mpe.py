"""MPE's particles, environments that are not ours: learned beside random and greedy play.

    python -m benchmarks.mpe train --runs RUNS [--only simple_spread] [--seeds 100 … 104]
    python -m benchmarks.mpe judge --runs RUNS [--episodes 500]   into docs/data/mpe.json
    python -m benchmarks.mpe page                                 table and picture from that

Training may be interrupted: finished seeds are never trained twice, begun ones go on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.seeds import train_seed
from keel.envs import Envs, make_envs
from keel.look import BLUE, GREEN, GREY, INK, ORANGE, new_figure, tidy
from keel.tracking.drawing import write_png
from keel.tracking.reader import read_metrics
from keel.training.policy import evaluate_policy, open_policy

ROOT = Path(__file__).resolve().parents[1]
DATA, TABLE = ROOT / "docs" / "data" / "mpe.json", ROOT / "docs" / "data" / "mpe.md"
IMAGE = ROOT / "docs" / "images" / "mpe.png"
GAMES = ("simple_spread", "simple_speaker_listener")

PURPLE = "#7048a8"
COAST = 0.4
"""How far a particle of speed 1 still drifts: it loses a quarter of its speed every 0.1."""
NUDGE = 0.1
"""Half of what one push carries a particle that stands: below that, pushing misses by more."""

Player = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""From observations `[N, A, D]` to actions `[N, A]`."""


def walk(offset: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """The push (0 none, 1 left, 2 right, 3 down, 4 up) that brings particles nearest to where they
    want to go, `offset` `[…, 2]` away, once they have drifted out."""
    left = offset - COAST * velocity
    axis = np.abs(left).argmax(-1)
    along = np.take_along_axis(left, axis[..., None], -1)[..., 0]
    return np.where(np.abs(along) > NUDGE, 1 + 2 * axis + (along > 0), 0)


def spread_nearest(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Everybody to the landmark that is nearest to it."""
    marks = obs[..., 4:10].reshape(*obs.shape[:2], 3, 2)
    nearest = np.square(marks).sum(-1).argmin(-1)
    offset = np.take_along_axis(marks, nearest[..., None, None], 2)[:, :, 0]
    return walk(offset, obs[..., :2])


def spread_assigned(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Everybody to a landmark of its own, by the assignment with the shortest way in all."""
    marks = obs[..., 4:10].reshape(*obs.shape[:2], 3, 2)
    far = np.sqrt(np.square(marks).sum(-1))
    own = np.stack([linear_sum_assignment(row)[1] for row in far])
    offset = np.take_along_axis(marks, own[..., None, None], 2)[:, :, 0]
    return walk(offset, obs[..., :2])


def speak_and_listen(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The speaker says which landmark; the listener goes where the last word said."""
    goal, listener = obs[:, 0, :3], obs[:, 1]
    said = listener[:, 8:11]
    marks = listener[:, 2:8].reshape(-1, 3, 2)
    offset = np.take_along_axis(marks, said.argmax(-1)[:, None, None], 1)[:, 0]
    step = np.where(said.any(-1), walk(offset, listener[:, :2]), 0)
    return np.stack([goal.argmax(-1), step], -1)


def at_random(choices: tuple[int, ...]) -> Player:
    """Any legal action."""

    def choose(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.stack([rng.integers(n, size=len(obs)) for n in choices], -1)

    return choose


PLAYERS: dict[str, dict[str, Player]] = {
    "simple_spread": {
        "random": at_random((5, 5, 5)),
        "greedy, nearest landmark": spread_nearest,
        "greedy, shortest assignment": spread_assigned,
    },
    "simple_speaker_listener": {
        "random": at_random((3, 5)),
        "greedy, by the speaker's word": speak_and_listen,
    },
}


def play(envs: Envs, choose: Player, episodes: int, seed: int) -> list[float]:
    """The returns, summed over agents, of whole episodes."""
    rng, obs, returns = np.random.default_rng(seed), envs.reset(seed), []
    while len(returns) < episodes:
        step = envs.step(choose(obs["obs"], rng))
        obs = step.obs
        returns += step.episode_return.tolist()
    return returns[:episodes]


def judge(runs: Path, episodes: int) -> None:
    """Everybody over the same number of episodes; the curve of every seed."""
    told: dict[str, Any] = {}
    for game, players in PLAYERS.items():
        envs = make_envs(game, 50, seed=0)
        found: dict[str, Any] = {}
        for name, player in players.items():
            found[name] = {"returns": play(envs, player, episodes, 0)}
        envs.close()
        for folder in sorted((runs / game).glob("seed-*")):
            policy = open_policy(folder, "last")
            score = evaluate_policy(policy, episodes=episodes, deterministic=False)
            table = read_metrics(folder)
            steps, curve = table.step, table.columns["rollout/return_mean"]
            some = np.linspace(0, len(steps) - 1, 120).astype(int)
            found[folder.name] = {
                "returns": score.returns,
                "kl_exact_max": float(np.nanmax(table.columns["train/kl_exact"])),
                "curve": [[int(steps[i]), float(curve[i])] for i in some],
            }
            print(f"{game} {folder.name}: {statistics.fmean(score.returns):.1f}")
        told[game] = {"episodes": episodes, "players": found}
    DATA.write_text(json.dumps(told) + "\n")


def share_of_way(mean: float, low: float, high: float) -> float:
    """Where `mean` stands between random play and the best heuristic."""
    return (mean - low) / (high - low)


def page() -> None:
    """A table and a picture of what was judged."""
    told = json.loads(DATA.read_text())
    lines = []
    for game, found in told.items():
        means = {k: statistics.fmean(x["returns"]) for k, x in found["players"].items()}
        best = max(mean for name, mean in means.items() if name.startswith("greedy"))
        lines += [
            f"`{game}`, {found['episodes']} episodes each, sum over agents:",
            "",
            "| who | return | ± standard error | of the way from random to greedy | largest KL |",
            "|---|---:|---:|---:|---:|",
        ]
        for name, player in found["players"].items():
            returns = player["returns"]
            error = statistics.stdev(returns) / len(returns) ** 0.5
            kl = player.get("kl_exact_max")
            way = share_of_way(means[name], means["random"], best)
            lines.append(
                f"| {name} | {means[name]:.1f} | {error:.1f} | {way:.0%} "
                f"| {'' if kl is None else f'{kl:.4f}'} |"
            )
        lines.append("")
    TABLE.write_text("\n".join(lines))
    print(TABLE.read_text())
    _draw(told)


def _draw(told: dict[str, Any]) -> None:
    figure = new_figure(10.0, 3.8)
    for ax, (game, found) in zip(figure.subplots(1, len(told)), told.items(), strict=True):
        tidy(ax, game, "million steps of the environment", "return, sum over agents")
        colours = itertools.cycle((BLUE, ORANGE, GREEN, GREY, PURPLE))
        styles = iter((":", "--", "-."))
        for name, player in found["players"].items():
            if "curve" in player:
                steps, curve = zip(*player["curve"], strict=True)
                ax.plot(np.array(steps) / 1e6, curve, lw=1.2, label=name, color=next(colours))
            else:
                level = statistics.fmean(player["returns"])
                ax.axhline(level, ls=next(styles), color=INK, lw=1.0, label=name, zorder=4)
        legend = ax.legend(
            loc="lower right",
            fontsize=8,
            framealpha=1.0,
            bbox_to_anchor=(1.0, 0.12),
            edgecolor="white",
        )
        legend.set_zorder(6)
    write_png(figure, IMAGE)


def main() -> None:
    """What the first word says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("train", "judge", "page"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only", choices=GAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--episodes", type=int, default=500)
    args = parser.parse_args()
    if args.action == "train":
        for seed in args.seeds:
            for game in (args.only,) if args.only else GAMES:
                train_seed(args.runs / game, game, seed)
        return
    if args.action == "judge":
        judge(args.runs, args.episodes)
    page()


if __name__ == "__main__":
    main()
