"""Keys of observations that mean something to Keel; all others are the environment's own."""

MASK = "action_mask"
"""bool `[…, K]`: what is legal."""
GROUP = "group"
"""What an environment may say in its info about every row: the group it belongs to, from 0."""
AGENT = "agent"
"""int64 `[N, A]`: the number of each of several agents."""
STATE = "state"
"""float32 `[N, A, S]`: what a centralised critic sees, and actors do not."""
SMALLEST_IMAGE = 7
"""Height and width from which an observation of rank 3 is an image; a smaller one is a board."""


def is_image_shape(shape: tuple[int, ...]) -> bool:
    """Whether an observation `[C, H, W]` is an image that a CNN can take."""
    return len(shape) == 3 and min(shape[1:]) >= SMALLEST_IMAGE
