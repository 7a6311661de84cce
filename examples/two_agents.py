"""Two agents are paid for standing close, each in its own bound: `python two_agents.py [STEPS]`"""

import sys

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

import keel


class Meet(ParallelEnv):
    metadata, possible_agents = {"name": "meet"}, ["left", "right"]

    def observation_space(self, agent):
        return spaces.Box(-1.0, 1.0, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents, self.time, self.place = list(self.possible_agents), 0, {"left": 0, "right": 8}
        return self._seen(), {a: {} for a in self.agents}

    def step(self, actions):
        self.time += 1
        self.place = {a: int(np.clip(self.place[a] + actions[a] - 1, 0, 8)) for a in self.agents}
        reward, names = 1.0 - abs(self.place["left"] - self.place["right"]) / 8, self.agents
        self.agents = [] if self.time == 25 else names
        flags = [dict.fromkeys(names, x) for x in (reward, False, self.time == 25)]
        return self._seen(), *flags, {a: {} for a in names}

    def _seen(self):
        places = np.array(list(self.place.values()), np.float32) / 4 - 1
        return dict.fromkeys(self.possible_agents, places)


if __name__ == "__main__":
    print(keel.train(Meet, total_steps=int(sys.argv[1]) if sys.argv[1:] else 20_000))
