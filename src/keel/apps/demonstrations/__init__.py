"""Demonstrations: recorded from a trained policy or a function, or loaded from Minari."""

from keel.apps.demonstrations.record import record_function, record_policy
from keel.experience.demo_files import Demos, check_fits, load_demos, save_demos
from keel.experience.demos import open_demos
from keel.experience.minari_data import from_minari

__all__ = [
    "Demos",
    "check_fits",
    "from_minari",
    "load_demos",
    "open_demos",
    "record_function",
    "record_policy",
    "save_demos",
]
