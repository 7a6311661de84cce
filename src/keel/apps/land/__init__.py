"""`LandDev-v0`: developers who compete for land, and whose return is their net present value.

    from keel.apps.land.env import parallel_env      # PettingZoo
    from keel.apps.land import Games, look           # the same in batches

Names are loaded when they are first used: numba is a second and 100 MB, which others need not pay.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.apps.land.arrays import Month
    from keel.apps.land.baselines import BASELINES, Beam
    from keel.apps.land.env import LandDev, parallel_env
    from keel.apps.land.games import Games
    from keel.apps.land.maps import HELD_OUT, draw_map, held_out, map_seeds
    from keel.apps.land.observations import Sight, look, worth
    from keel.apps.land.optimum import Optimum, find_optimum, replay
    from keel.apps.land.recording import Chronicle, record_game
    from keel.apps.land.rendering import draw_city, write_city, write_film
    from keel.apps.land.report import Report, held_out_gap, percent_of_optimum, play
    from keel.apps.land.rules import FULL, SMALL, Rules, Trade, make_rules, note_000

_NAMES = {
    "arrays": ("Month",),
    "baselines": ("BASELINES", "Beam"),
    "recording": ("Chronicle", "record_game"),
    "env": ("LandDev", "parallel_env"),
    "games": ("Games",),
    "maps": ("HELD_OUT", "draw_map", "held_out", "map_seeds"),
    "optimum": ("Optimum", "find_optimum", "replay"),
    "rendering": ("draw_city", "write_city", "write_film"),
    "report": ("Report", "held_out_gap", "percent_of_optimum", "play"),
    "rules": ("FULL", "SMALL", "Rules", "Trade", "make_rules", "note_000"),
    "observations": ("Sight", "look", "worth"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "BASELINES",
    "FULL",
    "HELD_OUT",
    "SMALL",
    "Beam",
    "Chronicle",
    "Games",
    "LandDev",
    "Month",
    "Optimum",
    "Report",
    "Rules",
    "Sight",
    "Trade",
    "draw_city",
    "draw_map",
    "find_optimum",
    "held_out",
    "held_out_gap",
    "look",
    "make_rules",
    "map_seeds",
    "note_000",
    "parallel_env",
    "percent_of_optimum",
    "play",
    "record_game",
    "replay",
    "worth",
    "write_city",
    "write_film",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'keel.apps.land' has no attribute {name!r}")
    return getattr(importlib.import_module(f"keel.apps.land.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
