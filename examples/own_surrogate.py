"""A surrogate of your own in place of PPO's clip. `python own_surrogate.py [STEPS]`"""

import sys

import torch

import keel


@keel.register_loss("soft")
def soft_clip(ratio: torch.Tensor, advantage: torch.Tensor, hparams) -> torch.Tensor:
    """Return the loss of every row: the ratio is bent smoothly where the clip would cut it."""
    bent = 1.0 + hparams.clip_high * torch.tanh((ratio - 1.0) / hparams.clip_high)
    return -torch.minimum(ratio * advantage, bent * advantage)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    for loss in ("clip", "soft"):
        run = keel.train("CartPole-v1", loss=loss, total_steps=steps, seed=1, tag=loss)
        print(f"{loss:5}", run)
