"""The usual preprocessing of Atari games, for those that Gymnasium steps one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium

from keel.envs.atari import AtariOptions
from keel.errors import InputError

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True)
class PreprocessAtari:
    """Show a game as `AtariOptions` say: frame skip, grayscale, size, no-ops, FIRE, frame stack.

    Args:
        options: How the game is shown.
    """

    options: AtariOptions

    def __post_init__(self) -> None:
        if self.options.episodic_life or self.options.clip_reward:
            raise InputError(
                "atari: episodic_life and clip_reward of the game need backend ale or envpool, "
                "which still know the return of the whole game"
            )

    def kwargs(self) -> dict[str, Any]:
        """Return what the game is made with."""
        return {
            "frameskip": 1,  # skipped by the wrapper, which takes the maximum of two frames
            "repeat_action_probability": self.options.sticky,
            "full_action_space": self.options.full_action_space,
            "max_num_frames_per_episode": self.options.max_frames,
        }

    def __call__(self, env: Env) -> Env:
        """Return the game with its wrappers."""
        from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

        options = self.options
        if options.colour:
            return env
        env = AtariPreprocessing(
            env,
            noop_max=options.noop_max,
            frame_skip=options.frame_skip,
            screen_size=options.size,
        )
        if options.fire_reset:
            env = PressFire(env)
        return FrameStackObservation(env, options.frame_stack)


class PressFire(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Press FIRE after a reset, in games that wait for it."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        if self._fire is None:
            return obs, info
        obs, _, terminated, truncated, info = self.env.step(self._fire)
        return self.env.reset(options=options) if terminated or truncated else (obs, info)
