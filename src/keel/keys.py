"""Keys of observations that mean something to Keel; all others are the environment's own."""

MASK = "action_mask"
"""bool `[…, K]`: what is legal."""
GROUP = "group"
"""Key in an environment's info: the group of every row, from 0."""
AGENT = "agent"
"""int64 `[N, A]`: the number of each of several agents."""
STATE = "state"
"""float32 `[N, A, S]`: what a centralised critic sees, and actors do not."""
EPISODE_STARTS = "memory/starts"
"""bool `[N]`: which rows begin an episode, for recurrent networks."""
ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE = "memory/actor", "memory/critic"
"""float32 `[N, H]`: recurrent states of actor and critic; the text of the keys is that on disk."""
RESERVED = (EPISODE_STARTS, ACTOR_HIDDEN_STATE, CRITIC_HIDDEN_STATE)
"""Keys that stand beside those of an observation, which therefore must not have them."""
ENCODING, FIRST_ENCODING = 2, 1
"""How observations become the numbers that a network sees: in new runs, and in those of version
0.1. There, MultiDiscrete observations are numbers in place of one-hot vectors, images of bytes are
divided by 255, other images are taken as they are or normalized like vectors."""
SMALLEST_IMAGE = 7
"""Height and width from which an observation of rank 3 is an image; a smaller one is a board."""


def is_image_shape(shape: tuple[int, ...]) -> bool:
    """Return whether an observation `[C, H, W]` is an image that a CNN can take."""
    return len(shape) == 3 and min(shape[1:]) >= SMALLEST_IMAGE
