"""Train a network of your own, inside the same exact bound. `python own_network.py [STEPS]`"""

import sys

import torch
from torch import nn

import keel


class Residual(nn.Module):
    """A residual trunk with a head for the policy and one for the value."""

    def __init__(self, observation_space, action_space) -> None:
        super().__init__()
        self.first = nn.Linear(observation_space.shape[0], 64)
        self.second = nn.Linear(64, 64)
        self.policy = nn.Linear(64, int(action_space.n))
        self.value = nn.Linear(64, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(obs))
        x = x + torch.tanh(self.second(x))
        return self.policy(x), self.value(x)  # logits [B, n], value [B, 1]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    run = keel.train("CartPole-v1", network=Residual, total_steps=steps)
    print(run, "largest exact KL:", run.metrics["train/kl_exact"].max())
