"""Looking at what a run has learned: open its policy, evaluate it, film an episode."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from keel.config import Config, from_dict
from keel.envs import Envs, Obs, ObsNormaliser, Step, make_envs
from keel.envs.names import atari_game
from keel.errors import InputError, KeelError
from keel.models.agent import Agent
from keel.models.build import build_agent
from keel.runs.directory import CHECKPOINTS, RECORD, read_config, read_record
from keel.training.checkpoint import Checkpoint, check_shapes, load
from keel.training.evaluate import Score, evaluate
from keel.training.runner import EVALUATION_ENVS
from keel.training.state import arrays

VIDEOS = (".gif", ".mp4")
MAX_FRAMES, MAX_SIDE = 1000, 320
"""A film is cut after so many frames, and no frame is longer on a side, in pixels."""
GIF_RATE = 50.0
"""Frames a second above which players of GIFs slow down."""


@dataclass(frozen=True)
class Policy:
    """What acts: a network, its parameters at one checkpoint, and how observations reach it."""

    agent: Agent
    params: Tensor
    """`[G, P]`, on the CPU"""
    normaliser: ObsNormaliser | None
    config: Config
    step: int
    """of the checkpoint"""
    path: Path
    """the run: the folder of its seed"""
    observation_space: gymnasium.Space[Any]
    """of one environment, as `keel.envs` lays it out"""
    action_space: gymnasium.Space[Any]
    masked: bool
    """whether the environment says which actions are legal"""


def find_run(path: Path) -> Path:
    """The folder of a seed: `path` itself, or the only `seed-*` in it."""
    if (path / RECORD).is_file() or not path.is_dir():
        read_record(path)
        return path
    seeds = sorted(place.parent for place in path.glob(f"seed-*/{RECORD}"))
    if len(seeds) > 1:
        raise InputError(f"{path}: has several seeds; choose one: {', '.join(map(str, seeds))}")
    if not seeds:
        read_record(path)  # raises: not a run
    return seeds[0]


def open_policy(path: Path, checkpoint: str | int | None = None) -> Policy:
    """The policy of a run at a checkpoint: "best", "last" or a step.

    By default the best one, or the last where no evaluation has marked a best. The environment is
    made for a moment: it says what is observed and what can be done.
    """
    path = find_run(path)
    config = from_dict(read_config(path))
    found = _load(path, checkpoint)
    envs = _make(config, 1)
    try:
        observation, action = envs.observation_space, envs.action_space
        masked = "action_mask" in envs.reset(0)
    finally:
        envs.close()
    agent = build_agent(observation, action, config.network, seed=0)
    expected = agent.layout.unflatten(agent.initial[0])
    check_shapes(f"{found.path}: its weights and {config.env}", found.weights, expected)
    normaliser = None
    if config.envs.normalise_obs:
        fresh = ObsNormaliser.for_space(observation)
        normaliser = fresh.restore(arrays(found.tensors, "obs_normaliser/"))
    params = found.tensors["optimum/params"]
    return Policy(agent, params, normaliser, config, found.step, path, observation, action, masked)


def evaluate_policy(
    policy: Policy, *, episodes: int = 20, deterministic: bool = True, seed: int = 0
) -> Score:
    """`episodes` whole episodes in fresh environments; depends on policy and seed alone."""
    if episodes < 1:
        raise InputError(f"episodes: expected at least 1, got {episodes}")
    _check_seed(seed)
    envs = _make(policy.config, min(episodes, EVALUATION_ENVS), seed)
    try:
        return run_episodes(policy, envs, episodes, deterministic, seed)
    finally:
        envs.close()


def run_episodes(
    policy: Policy, envs: Envs, episodes: int, deterministic: bool, seed: int
) -> Score:
    """The same in environments that are there already."""
    score = evaluate(
        policy.agent,
        policy.params,
        envs,
        policy.normaliser,
        episodes=episodes,
        deterministic=deterministic,
        seed=seed,
    )
    if not score.returns or not all(map(math.isfinite, score.returns)):
        raise KeelError(f"{policy.config.env}: no episode ended with a finite return")
    return score


def _load(path: Path, checkpoint: str | int | None) -> Checkpoint:
    if checkpoint is None:
        best = (path / CHECKPOINTS / "best.json").is_file()
        return load(path, "best") if best else load(path)
    if checkpoint == "best":
        return load(path, "best")
    if checkpoint == "last":
        return load(path, "last")
    if not re.fullmatch(r"\d+", str(checkpoint)):
        raise InputError(f"checkpoint: expected best, last or a step, got {checkpoint!r}")
    return load(path, int(checkpoint))


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InputError(f"seed: expected 0 or more, got {seed}")


def _make(config: Config, num: int, seed: int = 0) -> Envs:
    return make_envs(
        config.env,
        num,
        backend=config.envs.backend,
        seed=seed,
        guard=config.envs.guard,
        timeout=config.envs.timeout,
    )


def check_video_path(path: Path) -> None:
    """Raise, before anything is played, unless a film can be written to `path`."""
    if path.suffix.lower() not in VIDEOS:
        raise InputError(f"--video: {path.name!r} must end in {' or '.join(VIDEOS)}")
    if not path.parent.is_dir():
        raise InputError(f"--video: the folder {str(path.parent)!r} does not exist")
    needed = ("imageio", "imageio_ffmpeg") if path.suffix.lower() == ".mp4" else ()
    if any(importlib.util.find_spec(name) is None for name in needed):
        raise InputError(
            '--video: .mp4 needs imageio: pip install "imageio[ffmpeg]"; .gif needs nothing more'
        )


def film(policy: Policy, path: Path, *, deterministic: bool = True, seed: int = 0) -> Score:
    """Play one episode and write it to `path`, a .gif or .mp4.

    Atari games are shown as the policy sees them, everything else as the environment renders it.
    """
    check_video_path(path)
    _check_seed(seed)
    name = policy.config.env
    camera = _game_camera(policy, seed) if atari_game(name) else _render_camera(policy, seed)
    try:
        score = run_episodes(policy, camera, 1, deterministic, seed)
    finally:
        camera.close()
    draft = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        _write_film(draft, camera.frames, camera.rate)
        draft.replace(path)
    except OSError as error:
        raise KeelError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return score


class Camera:
    """Environments of which every step is photographed."""

    def __init__(self, envs: Envs, shoot: Callable[[Obs], np.ndarray], rate: float) -> None:
        self.num_envs, self.backend, self.autoreset = envs.num_envs, envs.backend, envs.autoreset
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.save, self.close = envs.save, envs.close
        self.rate = rate
        self.frames: list[np.ndarray] = []
        self._envs, self._shoot = envs, shoot

    def reset(self, seed: int) -> Obs:
        self.frames.clear()
        return self._look(self._envs.reset(seed))

    def step(self, action: np.ndarray) -> Step:
        step = self._envs.step(action)
        self._look(step.obs)
        return step

    def load(self, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> None:
        self._envs.load(arrays, data)

    def _look(self, obs: Obs) -> Obs:
        if len(self.frames) < MAX_FRAMES:
            self.frames.append(_fit(self._shoot(obs)))
        return obs


def _game_camera(policy: Policy, seed: int) -> Camera:
    def shoot(obs: Obs) -> np.ndarray:
        return np.repeat(obs["obs"][0, -1, :, :, None], 3, -1)  # the newest of the stack

    return Camera(_make(policy.config, 1, seed), shoot, rate=15.0)  # 60 frames, each 4th seen


def _render_camera(policy: Policy, seed: int) -> Camera:
    name = policy.config.env
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("MUJOCO_GL", "egl")  # its default needs a screen
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # as does pygame's
    stage: list[gymnasium.Env[Any, Any]] = []

    def keep(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        stage.append(env)
        return env

    def shoot(_: Obs) -> np.ndarray:
        try:
            frame: Any = stage[0].render()
        except Exception as error:  # whatever a renderer raises: no screen, no library
            raise KeelError(f"{name}: cannot be rendered: {_first_line(error)}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise KeelError(f"{name}: cannot be rendered: it gives no rgb_array")
        return frame

    try:
        envs = make_envs(
            name, 1, backend="sync", seed=seed, env_kwargs={"render_mode": "rgb_array"},
            wrappers=(keep,),
        )  # fmt: skip
    except (TypeError, gymnasium.error.Error) as error:
        raise KeelError(f"{name}: cannot be rendered: {_first_line(error)}") from error
    return Camera(envs, shoot, rate=float(stage[0].metadata.get("render_fps") or 30.0))


def _fit(frame: np.ndarray) -> np.ndarray:
    """With sides that are even, as video codecs need them, and not too long."""
    from PIL import Image

    height, width = frame.shape[:2]
    longest = max(height, width)
    scale = min(max(1, 256 // longest), MAX_SIDE / longest)  # a game of 84 × 84 is tiny
    size = (2 * max(1, round(scale * width / 2)), 2 * max(1, round(scale * height / 2)))
    if size == (width, height):
        return frame.copy()
    return np.asarray(Image.fromarray(frame).resize(size))


def _write_film(path: Path, frames: list[np.ndarray], rate: float) -> None:
    if path.suffix.lower() == ".mp4":
        imageio = importlib.import_module("imageio")
        imageio.mimwrite(path, frames, fps=rate)
        return
    from PIL import Image

    every = max(1, math.ceil(rate / GIF_RATE))
    images = [Image.fromarray(frame).quantize(64) for frame in frames[::every]]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=1000.0 * every / rate, loop=0
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
