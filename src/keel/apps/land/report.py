"""Evaluation of policies over maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from keel.apps.land.arrays import Array, Month
from keel.apps.land.baselines import Player
from keel.apps.land.games import Games
from keel.apps.land.maps import check_seeds
from keel.apps.land.rules import CONSTRUCTION, LEAST_LEVEL, SIZES, Rules
from keel.errors import InputError

if TYPE_CHECKING:
    from keel.apps.land.optimum import Optimum


@dataclass(frozen=True)
class Report:
    """Results of a policy: means over maps, unless noted otherwise; money in thousands."""

    policy: str
    maps: tuple[int, ...]
    """their seeds"""
    npv: dict[str, float]
    """Net present value of each developer: exact, whatever the rewards were."""
    npv_by_map: dict[str, tuple[float, ...]]
    total: float
    """net present value of all developers together"""
    total_by_map: tuple[float, ...]
    welfare: float
    """mean net present value × (1 − Gini), as Sen (1976) has it: what is shared counts for more"""
    gini: float
    """Gini coefficient of the developers' net present values; a loss counts as 0."""
    sizes: dict[str, float]
    """shares of S, M and L among all buildings"""
    sizes_by_level: dict[str, dict[str, float]]
    """the same, on parcels of level 3, 4 and 5"""
    buildings: dict[str, float]
    """buildings that each developer began in a game"""
    never_operated: float
    """share of buildings begun too late to earn anything"""
    bankruptcies: dict[str, float]
    """share of the games in which a developer went bankrupt"""
    conflicts: float
    """actions of a game that lost a parcel to another developer"""
    refused: float
    """illegal actions of a game"""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self)


def play(
    policy: Player,
    rules: Rules,
    seeds: ArrayLike,
    *,
    name: str = "policy",
    seed: int = 0,
    on_month: Callable[[], None] | None = None,
) -> Report:
    """Play a whole game on each map and report the results.

    Args:
        policy: Plays all developers.
        rules: The variant of the game.
        seeds: Seeds of the maps, `[E]`.
        name: Name of the policy in the report.
        seed: Seed of the policy's randomness.
        on_month: Called after each month of all games, for a display of progress.

    Examples:
        >>> from keel.apps.land.baselines import wait
        >>> play(wait, Rules(), [1_000_000]).total
        0.0
    """
    maps = check_seeds(np.asarray(seeds))
    if not maps.size:
        raise InputError("seeds: expected at least one map")
    games, rng = Games(rules, maps.size), np.random.default_rng(seed)
    games.begin(np.arange(maps.size), maps)
    months = []
    for _ in range(rules.months):
        months.append(games.step(policy(games, rng)))
        if on_month is not None:
            on_month()
    return _report(name, games, months)


def _report(name: str, games: Games, months: list[Month]) -> Report:
    rules, maps = games.rules, games.count
    npv = net_present_value(months, rules)
    begun = np.stack([month.begun for month in months])  # [T, E, A]
    when, game, agent = np.nonzero(begun != rules.wait)
    action = begun[when, game, agent]
    size, level = action % 3, games.world.level[game, action // 3]
    late = when + np.array(CONSTRUCTION)[size] >= rules.months
    inequality = gini(npv)
    return Report(
        policy=name,
        maps=tuple(games.seeds.tolist()),
        npv=_by_name(rules, npv.mean(0)),
        npv_by_map={key: tuple(npv[:, k].tolist()) for k, key in enumerate(rules.names)},
        total=float(npv.sum(-1).mean()),
        total_by_map=tuple(npv.sum(-1).tolist()),
        welfare=float((npv.mean(-1) * (1.0 - inequality)).mean()),
        gini=float(inequality.mean()),
        sizes=shares(size),
        sizes_by_level={str(low): shares(size[level == low]) for low in LEAST_LEVEL},
        buildings=_by_name(rules, np.bincount(agent, minlength=rules.agents) / maps),
        never_operated=float(late.mean()) if late.size else 0.0,
        bankruptcies=_by_name(rules, games.state.bankrupt.mean(0)),
        conflicts=sum(int(month.conflict.sum()) for month in months) / maps,
        refused=sum(int(month.refused.sum()) for month in months) / maps,
    )


def _by_name(rules: Rules, values: Array) -> dict[str, float]:
    return {name: float(value) for name, value in zip(rules.names, values, strict=True)}


def net_present_value(months: Sequence[Month], rules: Rules) -> Array:
    """Return the net present value of whole games with their terminal value, `[E, A]`.

    Args:
        months: Months of the games, in their order.
        rules: Rules of the game.
    """
    total = np.zeros_like(months[0].flow)
    for k, month in enumerate(months):
        total += rules.gamma**k * (month.flow + rules.gamma * month.terminal_value)
    return total


def gini(npv: Array) -> Array:
    """Return the Gini coefficient of net present values `[E, A]`, `[E]`; losses count as 0.

    It is 0 if all developers have the same, (A − 1) / A if one has everything.

    Examples:
        >>> gini(np.array([[5.0, 5.0], [10.0, 0.0], [-1.0, -2.0]])).tolist()
        [0.0, 0.5, 0.0]
    """
    held = np.maximum(npv, 0.0)
    apart = np.abs(held[:, :, None] - held[:, None, :]).mean((1, 2))
    mean = held.mean(-1)
    inequality: Array = np.divide(apart, 2.0 * mean, out=np.zeros_like(mean), where=mean > 0.0)
    return inequality


def shares(size: Array) -> dict[str, float]:
    """Return the shares of S, M and L among buildings; 0 for all where there are none."""
    count = np.bincount(size, minlength=len(SIZES)) / max(1, size.size)
    return {name: float(share) for name, share in zip(SIZES, count, strict=True)}


def percent_of_optimum(report: Report, optima: Sequence[Optimum]) -> float:
    """Return a policy's total as a percentage of the optimum over the same maps.

    Args:
        report: Of the policy.
        optima: Of the maps of the report, in their order.
    """
    if [optimum.seed for optimum in optima] != list(report.maps):
        raise InputError("optimum: expected those of the maps that were played, in that order")
    return 100.0 * sum(report.total_by_map) / sum(optimum.npv for optimum in optima)


def held_out_gap(trained: Report, held_out: Report) -> float:
    """Return the relative loss of the total on held-out maps against maps of training.

    Args:
        trained: Report on maps of training.
        held_out: Report on held-out maps.
    """
    return (trained.total - held_out.total) / abs(trained.total) if trained.total else 0.0
