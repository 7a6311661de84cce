"""A controller of your own: it turns hyperparameters between updates.

python own_controller.py [STEPS]
"""

import sys
from dataclasses import dataclass, replace

import keel


@dataclass(frozen=True)
class Patience:
    """Halve the learning rate whenever so many updates in a row asked for more than the bound."""

    updates: int = 3

    def init(self):
        return {"over": 0.0}

    def __call__(self, state, outcome, hparams):
        over = state["over"] + 1.0 if outcome.kl > hparams.max_kl else 0.0
        if over < self.updates:
            return {"over": over}, hparams
        return {"over": 0.0}, replace(hparams, learning_rate=0.5 * hparams.learning_rate)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    region = {"learning_rate": 0.02, "schedule": "constant", "max_kl": 0.01}
    run = keel.train("CartPole-v1", controllers=[Patience], region=region, total_steps=steps)
    print(run, "learning rates:", sorted(set(run.metrics["train/learning_rate"].tolist())))
