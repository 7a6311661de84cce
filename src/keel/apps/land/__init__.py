"""`LandDev-v0`: developers who compete for land, and whose return is their net present value.

    from keel.apps.land.env import parallel_env      # PettingZoo
    from keel.apps.land import Games, observe        # the same in batches

Names are loaded lazily, on first use: importing numba takes a second and 100 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.registry import lazy_names

if TYPE_CHECKING:  # type checkers may see more than there is in `__all__`
    from keel.apps.land.arrays import *  # noqa: F403
    from keel.apps.land.baselines import *  # noqa: F403
    from keel.apps.land.env import *  # noqa: F403
    from keel.apps.land.games import *  # noqa: F403
    from keel.apps.land.maps import *  # noqa: F403
    from keel.apps.land.observations import *  # noqa: F403
    from keel.apps.land.optimum import *  # noqa: F403
    from keel.apps.land.recording import *  # noqa: F403
    from keel.apps.land.rendering import *  # noqa: F403
    from keel.apps.land.report import *  # noqa: F403
    from keel.apps.land.rules import *  # noqa: F403

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
__all__ = sorted(" ".join(_NAMES.values()).split())
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
