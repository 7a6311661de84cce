"""Videos of episodes that a policy plays."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from keel.config import options
from keel.envs import Envs, Obs, Step, make_envs
from keel.errors import InputError, KeelError, import_extra
from keel.training.evaluation import Score
from keel.training.policy import Policy, check_seed, check_spaces, check_trusted, run_episodes

VIDEOS = (".gif", ".mp4")
MAX_FRAMES, MAX_SIDE = 1500, 320
"""A film is cut after so many frames, and no frame is longer on a side, in pixels."""
GIF_RATE = 50.0
"""Frames a second above which players of GIFs slow down."""


def check_video_path(path: Path) -> None:
    """Raise, before anything is played, unless a video can be written to `path`."""
    if path.suffix.lower() not in VIDEOS:
        raise InputError(f"--video: {path.name!r} must end in {' or '.join(VIDEOS)}")
    if not path.parent.is_dir():
        raise InputError(f"--video: the folder {str(path.parent)!r} does not exist")
    if path.suffix.lower() == ".mp4":
        _check_encoder()


def _check_encoder() -> None:
    """Raise unless the packages of the extra `video`, and the program they call, are there."""
    try:
        import_extra("imageio", "video")
        import_extra("imageio_ffmpeg", "video").get_ffmpeg_exe()
    except (InputError, RuntimeError) as error:
        raise InputError(
            f"--video: .mp4 cannot be written: {_first_line(error)}; .gif needs nothing more"
        ) from error


def record_video(
    policy: Policy,
    path: Path,
    *,
    deterministic: bool = True,
    seed: int = 0,
    camera: Camera | None = None,
) -> Score:
    """Play one episode and write it as a video.

    Args:
        policy: as `open_policy` returns it.
        path: a .gif or .mp4.
        deterministic: take the mode in place of a sample.
        seed: of environments and actions.
        camera: environments with a picture of every step; by default as they render themselves.
    """
    check_video_path(path)
    check_seed(seed)
    camera = camera or _render_camera(policy, seed)
    try:
        score = run_episodes(policy, camera, 1, deterministic, seed)
    finally:
        camera.close()
    draft = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        _write_video(draft, camera.frames, camera.rate)
        draft.replace(path)
    except OSError as error:
        raise KeelError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return score


class Camera:
    """Environments that record a picture of every step."""

    def __init__(self, envs: Envs, shoot: Callable[[Obs], np.ndarray], rate: float) -> None:
        self.num_envs, self.backend, self.autoreset = envs.num_envs, envs.backend, envs.autoreset
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.agents, self.save, self.close = envs.agents, envs.save, envs.close
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


def _render_camera(policy: Policy, seed: int) -> Camera:
    config = policy.config
    name = config.env
    check_trusted(policy)
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("MUJOCO_GL", "egl")  # its default needs a screen
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # as does pygame's
    rendered: list[gymnasium.Env[Any, Any]] = []

    def remember(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
        rendered.append(env)
        return env

    def shoot(_: Obs) -> np.ndarray:
        try:
            frame: Any = rendered[0].render()
        except Exception as error:  # whatever a renderer raises: no screen, no library
            raise KeelError(f"{name}: cannot be rendered: {_first_line(error)}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise KeelError(f"{name}: cannot be rendered: it gives no rgb_array")
        return frame

    try:
        envs = make_envs(
            name,
            1,
            backend="sync",
            seed=seed,
            env_kwargs={**options(config), "render_mode": "rgb_array"},
            wrappers=(remember,),
            timeout=config.envs.timeout,
        )
    except (TypeError, gymnasium.error.Error) as error:
        raise KeelError(f"{name}: cannot be rendered: {_first_line(error)}") from error
    check_spaces(policy, envs, name)
    return Camera(envs, shoot, rate=float(rendered[0].metadata.get("render_fps") or 30.0))


def _fit(frame: np.ndarray) -> np.ndarray:
    """Resize a frame to even sides, as video codecs need them, that are not too long."""
    from PIL import Image

    height, width = frame.shape[:2]
    longest = max(height, width)
    scale = min(max(1, 256 // longest), MAX_SIDE / longest)  # a game of 84 × 84 is tiny
    size = (2 * max(1, round(scale * width / 2)), 2 * max(1, round(scale * height / 2)))
    if size == (width, height):
        return frame.copy()
    return np.asarray(Image.fromarray(frame).resize(size))


def _write_video(path: Path, frames: list[np.ndarray], rate: float) -> None:
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
