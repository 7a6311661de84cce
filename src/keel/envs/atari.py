"""Atari games through the vector environment of the ALE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keel.envs.faults import EnvError, MissingExtraError
from keel.envs.names import atari_game, unknown
from keel.envs.protocol import Autoreset, Episodes, Obs, Request, Saved, Step, env_seeds
from keel.envs.spaces import action_layout, observation_layout
from keel.errors import InputError

ATARI_KWARGS = "env_kwargs: the ALE takes its options as atari=AtariOptions(…)"
HEIGHT, WIDTH = 210, 160
"""Of the console's picture."""


@dataclass(frozen=True)
class AtariOptions:
    """Preprocessing of a game; time counts in steps of the agent (`frame_skip` frames)."""

    frame_stack: int = 4
    frame_skip: int = 4
    size: int = 84
    """Height and width of the grayscale picture."""
    noop_max: int = 30
    fire_reset: bool = True
    """Press FIRE after a reset where the game waits for it."""
    sticky: float = 0.0
    """The probability that the last action is repeated."""
    episodic_life: bool = False
    """A lost life is `terminated`; the game goes on, and `episode_return` is still the game's."""
    clip_reward: bool = False
    """Give the sign of the reward; `episode_return` stays raw."""
    full_action_space: bool = False
    max_frames: int = 108_000
    """The game is truncated after so many frames: half an hour."""
    colour: bool = False
    """Show whole pictures in colour, one at a time, as people see them (the ALE only)."""

    def for_envpool(self) -> dict[str, Any]:
        """Return the options under the names that EnvPool has for them."""
        return {
            "stack_num": self.frame_stack,
            "frame_skip": self.frame_skip,
            "img_height": self.size,
            "img_width": self.size,
            "noop_max": self.noop_max,
            "use_fire_reset": self.fire_reset,
            "repeat_action_probability": self.sticky,
            "episodic_life": self.episodic_life,
            "reward_clip": False,  # clipped by us, so that the raw return is known
            "full_action_space": self.full_action_space,
            "max_episode_steps": self.max_frames // self.frame_skip,
        }


class AtariEnvs:
    """`num_envs` games of the ALE on `threads` threads.

    With `episodic_life` the row after a lost life presses FIRE whatever the policy says (where the
    game has that button) and is `ignored`, like the row of an autoreset. The ALE's own
    `episodic_life` would start a new game after every life.
    """

    autoreset: Autoreset = "next_step"
    backend = "ale"

    agents: tuple[str, ...] = ()

    def __init__(
        self, game: str, num_envs: int, *, threads: int, options: AtariOptions | None = None
    ) -> None:
        self._options = options = options or AtariOptions()
        self.num_envs = num_envs
        self._venv: Any = _make(game, num_envs, threads, options)
        layout = observation_layout(self._venv.single_observation_space)
        self._actions = action_layout(self._venv.single_action_space)
        self.observation_space, self.action_space = layout.space, self._actions.space
        buttons = [getattr(action, "name", "") for action in self._venv.ale.get_action_set()]
        self._fire = buttons.index("FIRE") if options.fire_reset and "FIRE" in buttons else None
        self._none = np.zeros(num_envs, dtype=bool)
        self._episodes = Episodes(num_envs)
        self._begin(self._none)

    def _begin(self, lives: np.ndarray) -> None:
        self._lives, self._pending, self._serve = lives, self._none, self._none
        self._episodes.clear()

    def reset(self, seed: int) -> Obs:
        seeds = np.array(env_seeds(seed, self.num_envs), dtype=np.int32)
        frames, info = self._venv.reset(seed=seeds)
        self._begin(info["lives"])
        return {"obs": frames}

    def step(self, action: np.ndarray) -> Step:
        encoded = self._actions.encode(action)
        if np.count_nonzero(self._serve):
            encoded = np.where(self._serve, self._fire or 0, encoded)
        frames, points, terminated, truncated, info = self._venv.step(encoded)
        lives, ignored = info["lives"], self._pending
        life_lost = terminated & (lives < self._lives) & (lives > 0)
        episode_over = terminated & ~life_lost | truncated
        reward = points.astype(np.float32)
        finished = self._episodes.update(reward, episode_over, ignored)
        self._lives = lives
        self._serve = life_lost if self._fire is not None else self._none
        self._pending = episode_over | self._serve
        if np.count_nonzero(ignored):
            reward[ignored] = 0.0
            terminated, truncated = terminated & ~ignored, truncated & ~ignored
        if self._options.clip_reward:
            np.sign(reward, out=reward)
        return Step({"obs": frames}, reward, terminated, truncated, ignored, None, *finished)

    def close(self) -> None:
        self._venv.close()

    def save(self) -> Saved | None:
        return None  # the state lives in C++ and has no way out

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        raise EnvError("the ALE's vector cannot restore its state; `save` returned None")


def make_ale(request: Request) -> AtariEnvs:
    """Make games on the vector environment of the ALE."""
    game = atari_game(request.env_id)
    if game is None:
        raise InputError(f"backend: ale plays Atari games, not {request.env_id}")
    if request.kwargs:
        raise InputError(ATARI_KWARGS)
    return AtariEnvs(game, request.num_envs, threads=request.thread_count, options=request.atari)


def _make(game: str, num_envs: int, threads: int, options: AtariOptions) -> Any:
    try:
        from ale_py import roms
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise MissingExtraError(f"{game} on the ALE", "atari") from error
    rom_ids = {rom.title().replace("_", ""): rom for rom in roms.get_all_rom_ids()}
    if game not in rom_ids:
        raise unknown(f"ALE/{game}-v5", (f"ALE/{name}-v5" for name in rom_ids))
    return AtariVectorEnv(
        rom_ids[game],
        num_envs,
        num_threads=threads,
        stack_num=1 if options.colour else options.frame_stack,
        frameskip=options.frame_skip,
        img_height=HEIGHT if options.colour else options.size,
        img_width=WIDTH if options.colour else options.size,
        grayscale=not options.colour,
        noop_max=options.noop_max,
        use_fire_reset=options.fire_reset,
        repeat_action_probability=options.sticky,
        life_loss_info=options.episodic_life,
        reward_clipping=False,  # clipped by us, so that the raw return is known
        full_action_space=options.full_action_space,
        max_num_frames_per_episode=options.max_frames,
    )
