"""Image and vector as one observation: `python image_and_vector.py [STEPS]`"""

import sys

import gymnasium
import numpy as np
from gymnasium import spaces

import keel


class FollowTheLight(gymnasium.Env):
    """A light in an 8×8 image tells which of two actions is right; the vector tells the time."""

    def __init__(self) -> None:
        image = spaces.Box(0, 255, (8, 8, 1), np.uint8)
        clock = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.observation_space = spaces.Dict({"image": image, "clock": clock})
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action):
        reward, self.time = float(action == self.side), self.time + 1
        return self._seen(), reward, False, self.time == 16, {}

    def _seen(self):
        self.side = int(self.np_random.integers(2))
        image = np.zeros((8, 8, 1), np.uint8)
        image[self.np_random.integers(8), 4 * self.side + self.np_random.integers(4)] = 255
        return {"image": image, "clock": np.array([self.time / 16], np.float32)}


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8_000
    print(keel.train(FollowTheLight, total_steps=steps, rollout_steps=64))
