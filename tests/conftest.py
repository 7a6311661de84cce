"""Settings shared by all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # small tensors, and pytest-xdist already uses both cores

settings.register_profile(
    "keel",
    deadline=None,  # a shared machine has pauses that no test caused
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "keel"))
