"""`LandDev-v0`: developers who compete for land, and whose return is their net present value.

    from keel.apps.land.env import parallel_env      # PettingZoo
    from keel.apps.land import Games, observe        # the same in batches

Names are loaded lazily, on first use: importing numba takes a second and 100 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.registry import lazy_names

if TYPE_CHECKING:
    from keel.apps.land.arrays import Month
    from keel.apps.land.baselines import BASELINES, Beam
    from keel.apps.land.env import LandDev, parallel_env
    from keel.apps.land.games import Games
    from keel.apps.land.maps import HELD_OUT, draw_map, held_out, map_seeds
    from keel.apps.land.observations import Observation, marginal_npv, observe
    from keel.apps.land.optimum import Optimum, find_optimum, replay
    from keel.apps.land.recording import GameRecord, record_game
    from keel.apps.land.rendering import draw_city, write_city, write_gif
    from keel.apps.land.report import Report, held_out_gap, percent_of_optimum, play
    from keel.apps.land.rules import FULL, SMALL, Rules, Trade, legacy_rules, make_rules

__all__ = [
    "BASELINES",
    "FULL",
    "HELD_OUT",
    "SMALL",
    "Beam",
    "GameRecord",
    "Games",
    "LandDev",
    "Month",
    "Observation",
    "Optimum",
    "Report",
    "Rules",
    "Trade",
    "draw_city",
    "draw_map",
    "find_optimum",
    "held_out",
    "held_out_gap",
    "legacy_rules",
    "make_rules",
    "map_seeds",
    "marginal_npv",
    "observe",
    "parallel_env",
    "percent_of_optimum",
    "play",
    "record_game",
    "replay",
    "write_city",
    "write_gif",
]


_NAMES = {
    "arrays": "Month",
    "baselines": "BASELINES Beam",
    "recording": "GameRecord record_game",
    "env": "LandDev parallel_env",
    "games": "Games",
    "maps": "HELD_OUT draw_map held_out map_seeds",
    "optimum": "Optimum find_optimum replay",
    "rendering": "draw_city write_city write_gif",
    "report": "Report held_out_gap percent_of_optimum play",
    "rules": "FULL SMALL Rules Trade make_rules legacy_rules",
    "observations": "Observation observe marginal_npv",
}
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
