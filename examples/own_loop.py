"""A training loop of your own: evaluate, change the learning rate, stop early.

python own_loop.py [STEPS]
"""

import sys

import keel

if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    best, waited = -float("inf"), 0
    for iteration in keel.iterate(
        "CartPole-v1", total_steps=steps, region={"schedule": "constant"}
    ):
        mean = iteration.metrics["rollout/return_mean"]
        best, waited = (mean, 0) if mean > best else (best, waited + 1)
        kl = iteration.metrics["train/kl_exact"]
        print(f"{iteration.steps:7,}  return {mean:6.1f}  KL {kl:.4f}")
        if mean > 300:
            iteration.set(learning_rate=1e-4)
        if waited == 10:
            break  # leaving the loop saves a checkpoint
    print("20 episodes:", keel.evaluate(iteration.path, episodes=20).metrics()["eval/return_mean"])
