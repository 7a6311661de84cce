"""Sweep a setting over seeds, and compare what came out.

python sweep_and_compare.py [STEPS] [SEEDS]
"""

import sys

import keel

if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seeds = range(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
    for max_kl in (0.005, 0.05):
        for seed in seeds:
            name = f"max-kl-{max_kl}"
            keel.train("CartPole-v1", name=name, seed=seed, total_steps=steps, max_kl=max_kl)
    print(keel.compare_runs("runs/max-kl-0.05", "runs/max-kl-0.005"))
