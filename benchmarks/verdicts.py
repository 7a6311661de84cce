"""How often `keel compare` tells a variant from itself: 1,000 comparisons in every cell.

Beside it a percentile bootstrap of the same difference (of means below five seeds, of interquartile
means from there on), on the same scores, judged alike: does its 95 % interval exclude 0?

python -m benchmarks.verdicts
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch

from keel.compare.verdict import TRIMMED_FROM, Problems, decide, effect_of

Draw = Callable[[np.random.Generator, int], np.ndarray]
FAMILIES: dict[str, Draw] = {
    "normal, 10 % spread": lambda rng, n: rng.normal(1000.0, 100.0, n),
    "skewed (log-normal, σ = ½)": lambda rng, n: 1000.0 * rng.lognormal(0.0, 0.5, n),
    "heavy tails (t, 3 degrees)": lambda rng, n: 1000.0 + 200.0 * rng.standard_t(3, n),
    "three seeds in ten fail": lambda rng, n: (
        np.where(rng.random(n) < 0.3, 200.0, 1000.0) + rng.normal(0.0, 30.0, n)
    ),
}
SEEDS, COMPARISONS, RESAMPLES = (3, 5, 10), 1_000, 2_000


def share(draw: Draw, runs: int, how: Callable[[np.ndarray, np.ndarray], bool]) -> float:
    """Of comparisons that claim a difference where there is none."""
    rng = np.random.default_rng(runs)
    return sum(how(draw(rng, runs), draw(rng, runs)) for _ in range(COMPARISONS)) / COMPARISONS


def by_keel(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether Keel would claim any change, however small."""
    calm = Problems(0.0, 1e-4)
    effect = effect_of([torch.from_numpy(x)], [torch.from_numpy(y)])
    return decide(effect, calm, calm).decision != "not distinguishable"


def by_bootstrap(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether a percentile bootstrap of the difference that Keel judges would exclude 0."""
    rng = np.random.default_rng(0)
    old, new = (middle(z[rng.integers(len(z), size=(RESAMPLES, len(z)))]) for z in (x, y))
    low, high = np.quantile(new - old, [0.025, 0.975])
    return bool(low > 0 or high < 0)


def middle(scores: np.ndarray) -> np.ndarray:
    """Return interquartile means of `[resamples, runs]`, plain ones of few runs, as Keel does."""
    runs = scores.shape[1]
    cut = runs // 4 if runs >= TRIMMED_FROM else 0
    return np.sort(scores, axis=1)[:, cut : runs - cut].mean(1)


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    print("| scores | " + " | ".join(f"{n} seeds" for n in SEEDS) + " |")
    print("|---|" + "---:|" * len(SEEDS))
    for name, draw in FAMILIES.items():
        cells = [
            f"{share(draw, n, by_keel):.1%} ({share(draw, n, by_bootstrap):.1%})" for n in SEEDS
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
