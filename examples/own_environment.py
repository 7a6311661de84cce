"""Train in an environment of your own: pass its class. `python own_environment.py [STEPS]`"""

import sys

import gymnasium
import numpy as np

import keel


class Corridor(gymnasium.Env):
    """Walk to the right end of a corridor of ten fields; every step costs 0.1."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.place = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._seen(), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        terminated = self.place == 9
        return self._seen(), (1.0 if terminated else -0.1), terminated, False, {}

    def _seen(self):
        return np.array([self.place / 9], np.float32)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    wrappers = [lambda env: gymnasium.wrappers.TimeLimit(env, 50)]
    run = keel.train(Corridor, wrappers=wrappers, total_steps=steps, max_kl=0.02)
    print(run, "largest exact KL:", run.metrics["train/kl_exact"].max())
