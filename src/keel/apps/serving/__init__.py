"""Simulation of language-model replicas, and of routers that send requests to them.

    from keel.apps.serving import Synthetic, closed_form, equal_cluster, simulate, summarize

Names are loaded lazily, on first use: importing numba takes a second and 100 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.registry import lazy_names

if TYPE_CHECKING:
    from keel.apps.serving.arrays import Weights
    from keel.apps.serving.cluster import Cluster, Replica, equal_cluster
    from keel.apps.serving.evaluation import Gain, Headroom, evaluate_routers, gain, headroom
    from keel.apps.serving.fidelity import Fidelity, compare
    from keel.apps.serving.results import Objective, Report, latencies, summarize
    from keel.apps.serving.scorer import Scorer, load_scorer
    from keel.apps.serving.settings import (
        SETTINGS,
        Scenario,
        Setting,
        draw_scenario,
        held_out,
        make_setting,
    )
    from keel.apps.serving.simulation import (
        HEURISTICS,
        ROUTERS,
        Conditions,
        SimulationResult,
        clairvoyant,
        replay,
        simulate,
    )
    from keel.apps.serving.synthetic import Synthetic, synthesize
    from keel.apps.serving.tables import FORMS, Tables, closed_form, load_tables
    from keel.apps.serving.workload import Workload, load_workload, make_workload

__all__ = [
    "FORMS",
    "HEURISTICS",
    "ROUTERS",
    "SETTINGS",
    "Cluster",
    "Conditions",
    "Fidelity",
    "Gain",
    "Headroom",
    "Objective",
    "Replica",
    "Report",
    "Scenario",
    "Scorer",
    "Setting",
    "SimulationResult",
    "Synthetic",
    "Tables",
    "Weights",
    "Workload",
    "clairvoyant",
    "closed_form",
    "compare",
    "draw_scenario",
    "equal_cluster",
    "evaluate_routers",
    "gain",
    "headroom",
    "held_out",
    "latencies",
    "load_scorer",
    "load_tables",
    "load_workload",
    "make_setting",
    "make_workload",
    "replay",
    "simulate",
    "summarize",
    "synthesize",
]


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
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
