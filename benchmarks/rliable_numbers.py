"""What rliable says about a few tables of scores, for tests/golden/test_rliable_numbers.py.

.venv-peers/bin/python -m benchmarks.rliable_numbers
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rliable import library, metrics

PATH = Path(__file__).resolve().parents[1] / "tests" / "golden" / "rliable.json"
SIZES = ((3, 1), (5, 1), (10, 3), (9, 4))
RESAMPLES = 20_000


def main() -> None:
    """Write the file."""
    rng = np.random.default_rng(0)
    cases = []
    for runs, tasks in SIZES:
        x, y = (rng.normal(shift, 1.0, (runs, tasks)).round(3) for shift in (0.3, 0.0))
        levels = np.linspace(-2.0, 2.0, 9)
        bootstrap = library.StratifiedBootstrap(x, random_state=np.random.RandomState(0))
        interval = bootstrap.conf_int(
            lambda table: np.array([metrics.aggregate_iqm(table)]),
            reps=RESAMPLES,
            size=0.95,
            method="percentile",
        )
        cases.append(
            {
                "x": x.tolist(),
                "y": y.tolist(),
                "levels": levels.tolist(),
                "iqm": float(metrics.aggregate_iqm(x)),
                "probability_of_improvement": float(metrics.probability_of_improvement(x, y)),
                "profile": [float(library.run_score_deviation(x, level)) for level in levels],
                "interval": interval[:, 0].tolist(),
            }
        )
    PATH.write_text(json.dumps(cases, indent=1) + "\n")
    print(f"{PATH}: {len(cases)} cases")


if __name__ == "__main__":
    main()
