"""Plans of ablations: a grid of settings, or variants by name, each over the same seeds.

    env: HalfCheetah-v5
    seeds: [42, 43, 44]
    settings: {total_steps: 300_000}
    vary: {region.max_log_ratio: [20, 10, 5]}

The first cell is what the others are compared with.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.config import Config, anchored, from_dict, read
from keel.errors import InputError, check_choice
from keel.presets import preset, preset_for
from keel.tracking.directory import check_name
from keel.tracking.metrics import metric
from keel.tracking.resume import nested

FOLDER = Path(__file__).parent / "plans"
RENAMED = {
    "land-causes-note-scale": "land-causes-large-returns",
    "note-001-clamp": "log-ratio-clamp",
    "note-001-clamp-unbounded": "log-ratio-clamp-uncertified",
    "note-001-kl": "early-stop-kl",
    "note-001-normalisation": "advantage-normalization",
}
"""Names of plans in version 0.1, which still work."""
KEYS = ("about", "env", "preset", "seeds", "settings", "vary", "variants", "watch", "stops")
LAST = -1


@dataclass(frozen=True)
class Cell:
    """A variant: a name and its settings."""

    name: str
    settings: Mapping[str, Any]
    """dotted, on top of what all cells share"""

    def config(self, base: Config, seed: int) -> Config:
        """Return the configuration of one run.

        Args:
            base: settings that all cells share.
            seed: of the run.
        """
        changed = anchored(from_dict(nested(self.settings), base))
        return dataclasses.replace(changed, seed=seed, tag=self.name)


@dataclass(frozen=True)
class Watch:
    """Metrics that a plan shows beside the returns."""

    metrics: Mapping[str, str]
    """Metrics to show, by the titles of their columns."""
    updates: tuple[int, ...]
    """after which; -1 is the last"""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """values that were predicted, by title"""
    expected_at: int = LAST


@dataclass(frozen=True)
class Plan:
    """Cells, seeds and shared settings of an ablation."""

    name: str
    base: Config
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    about: str = ""
    watch: Watch | None = None
    stops: tuple[Cell, ...] = ()
    """cells that are to be stopped at their first update; trained for what they say"""


def plan_named(name: str) -> Plan | None:
    """Return a plan, or None if there is none of this name.

    Args:
        name: a YAML file, or the name of a plan that comes with Keel.
    """
    if name.endswith((".yaml", ".yml")):
        return read_plan(Path(name))
    name = RENAMED.get(name, name)
    return read_plan(FOLDER / f"{name}.yaml") if name in names() else None


def names() -> list[str]:
    """Return the names of the plans that come with Keel."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_plan(path: Path) -> Plan:
    """Read a plan, and check every cell of it.

    Args:
        path: a YAML file.
    """
    data = read(path)
    for key in data:
        check_choice(f"{path}", str(key), KEYS)
    if "env" not in data:
        raise InputError(f"{path}: on which env?")
    env = str(data["env"])
    settings = _mapping(path, data, "settings")
    base = preset(str(data["preset"])) if "preset" in data else preset_for(
        env, str(settings.get("algo", "ppo"))
    )[1]  # fmt: skip
    base = from_dict({**nested(settings), "env": env}, base)
    vary, variants = _mapping(path, data, "vary"), _mapping(path, data, "variants")
    if bool(vary) == bool(variants):
        raise InputError(f"{path}: expected either vary or variants")
    cells = grid(vary) if vary else _named_cells(path, variants)
    seeds = data.get("seeds", [0, 1, 2])
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise InputError(f"{path}: seeds: expected a list of whole numbers, got {seeds!r}")
    about = str(data.get("about", ""))
    stops = _named_cells(path, _mapping(path, data, "stops"))
    watch = _watch(path, data)
    name = check_name(path.stem)
    return checked(Plan(name, base, cells, tuple(seeds), about, watch, stops))


def _watch(path: Path, data: Mapping[str, Any]) -> Watch | None:
    section = _mapping(path, data, "watch")
    if not section:
        return None
    for key in section:
        check_choice(f"{path}: watch", str(key), ("metrics", "updates", "expected", "expected_at"))
    metrics = _mapping(path, section, "metrics")
    updates = section.get("updates", [LAST])
    if not metrics:
        raise InputError(f"{path}: watch.metrics: expected titles and names of metrics")
    for name in metrics.values():
        metric(str(name))
    if not isinstance(updates, list) or not all(type(x) is int and x for x in updates):
        raise InputError(f"{path}: watch.updates: expected numbers of updates, got {updates!r}")
    expected = _mapping(path, section, "expected")
    for title in expected:
        check_choice(f"{path}: watch.expected", str(title), tuple(metrics))
    return Watch(
        {str(k): str(v) for k, v in metrics.items()},
        tuple(updates),
        expected,
        int(section.get("expected_at", LAST)),
    )


def grid(vary: Mapping[str, Sequence[Any]]) -> tuple[Cell, ...]:
    """Return a cell for every combination of the values, named after them."""
    for name, values in vary.items():
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"vary {name}: expected a list of values, got {values!r}")
    cells = []
    for combination in itertools.product(*vary.values()):
        settings = dict(zip(vary, combination, strict=True))
        label = "_".join(f"{name.rpartition('.')[2]}-{_slug(x)}" for name, x in settings.items())
        cells.append(Cell(check_name(label), settings))
    return tuple(cells)


def checked(plan: Plan) -> Plan:
    """Return the plan, if every cell of it can be trained and is there once."""
    labels = [cell.name for cell in (*plan.cells, *plan.stops)]
    duplicates = {name for name in labels if labels.count(name) > 1}
    if duplicates:
        raise InputError(f"{plan.name}: {', '.join(sorted(duplicates))} stands twice")
    if not plan.seeds or len(set(plan.seeds)) < len(plan.seeds):
        raise InputError(f"{plan.name}: seeds: expected different ones, got {list(plan.seeds)}")
    for cell in (*plan.cells, *plan.stops):
        try:
            cell.config(plan.base, plan.seeds[0])
        except InputError as error:
            raise InputError(f"{plan.name}, {cell.name}: {error}") from None
    return plan


def _named_cells(path: Path, variants: Mapping[str, Any]) -> tuple[Cell, ...]:
    for name, settings in variants.items():
        if not isinstance(settings, Mapping):
            raise InputError(f"{path}: variants.{name}: expected settings, got {settings!r}")
    return tuple(Cell(check_name(str(name)), settings) for name, settings in variants.items())


def _mapping(path: Path, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    mapping = data.get(key) or {}
    if not isinstance(mapping, Mapping):
        raise InputError(f"{path}: {key}: expected names and values, got {mapping!r}")
    return mapping


def _slug(value: Any) -> str:
    text = "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
