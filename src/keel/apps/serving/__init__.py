"""Simulation of language-model replicas, and of routers that send requests to them.

    from keel.apps.serving import Synthetic, closed_form, equal_cluster, simulate, summarize

Names are loaded lazily, on first use: importing numba takes a second and 100 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.registry import lazy_names

if TYPE_CHECKING:  # type checkers may see more than there is in `__all__`
    from keel.apps.serving.arrays import *  # noqa: F403
    from keel.apps.serving.cluster import *  # noqa: F403
    from keel.apps.serving.evaluation import *  # noqa: F403
    from keel.apps.serving.fidelity import *  # noqa: F403
    from keel.apps.serving.results import *  # noqa: F403
    from keel.apps.serving.scorer import *  # noqa: F403
    from keel.apps.serving.settings import *  # noqa: F403
    from keel.apps.serving.simulation import *  # noqa: F403
    from keel.apps.serving.synthetic import *  # noqa: F403
    from keel.apps.serving.tables import *  # noqa: F403
    from keel.apps.serving.workload import *  # noqa: F403

_NAMES = {
    "arrays": "Weights",
    "cluster": "Cluster Replica equal_cluster",
    "fidelity": "Fidelity compare",
    "evaluation": "Gain Headroom gain headroom evaluate_routers",
    "simulation": "HEURISTICS ROUTERS Conditions SimulationResult clairvoyant simulate replay",
    "results": "Objective Report latencies summarize",
    "scorer": "Scorer load_scorer",
    "settings": "SETTINGS Scenario Setting draw_scenario held_out make_setting",
    "synthetic": "Synthetic synthesize",
    "tables": "FORMS Tables closed_form load_tables",
    "workload": "Workload load_workload make_workload",
}
__all__ = sorted(" ".join(_NAMES.values()).split())
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
