"""Opening, evaluating and filming the policy of a run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image

from keel.config import Checkpoints, Config, Envs, Evaluation, Network, Region
from keel.errors import InputError, KeelError
from keel.tracking import RunError, read_metrics
from keel.training import video
from keel.training.checkpoint import CheckpointError, load
from keel.training.loop import derive_seeds
from keel.training.policy import evaluate_policy, find_run, open_policy
from keel.training.runner import start
from keel.training.video import record_video

LENGTH = 5


class Lamp(gymnasium.Env):
    """Five steps, then over; every frame has a colour of its own."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None, broken=False, dim=False):
        self.render_mode, self.broken, self.dim, self.time = render_mode, broken, dim, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.full(2, self.time / LENGTH, np.float32), 1.0, self.time == LENGTH, False, {}

    def render(self):
        if self.broken:
            raise gymnasium.error.DependencyNotInstalled("a lamp\nis missing")
        return np.full((30, 40, 3), (10 if self.dim else 40) * self.time, np.uint8)


gymnasium.register("KeelLamp-v0", Lamp)
gymnasium.register("KeelBrokenLamp-v0", Lamp, kwargs={"broken": True})


def train(root: Path, env: str, steps: int = 512, options: str = "", **more) -> Path:
    config = Config(
        env=env,
        total_steps=steps,
        rollout_steps=32,
        envs=Envs(num=4, normalize_obs=True, options=options),
        network=Network(hidden=(8,)),
        region=Region(minibatch=64, epochs=2, learning_rate=0.01),
        evaluation=Evaluation(every=128, episodes=3),
        checkpoints=Checkpoints(every=128, keep=9),
        compile="off",
        **more,
    )
    (*_, last) = start(config, root, env)
    return last.path


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "Pendulum-v1", 1024)


@pytest.fixture(scope="module")
def lamp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "KeelLamp-v0", 256)


def test_every_checkpoint_evaluates_to_what_training_wrote(pendulum: Path) -> None:
    """Parameters and normalizer come back whole, or a return would differ."""
    metrics = read_metrics(pendulum)
    seed = derive_seeds(0).evaluation
    known = np.isfinite(metrics["eval/return_mean"])
    steps, returns = metrics.step[known][::3], metrics["eval/return_mean"][known][::3]
    assert len(steps) >= 2
    for step, expected in zip(steps, returns, strict=True):
        policy = open_policy(pendulum, int(step))
        score = evaluate_policy(policy, episodes=3, seed=seed)
        assert score.metrics()["eval/return_mean"] == pytest.approx(expected, abs=1e-9)
    assert len(set(returns)) == len(returns)


def test_the_best_checkpoint_is_the_default_and_the_last_without_one(
    pendulum: Path, tmp_path: Path
) -> None:
    best = json.loads((pendulum / "checkpoints" / "best.json").read_text())["step"]
    assert open_policy(pendulum).step == best
    last = open_policy(pendulum, "last")
    assert last.step == 1024
    assert torch.equal(last.params, load(pendulum).tensors["opt_state/params"])
    copy = shutil.copytree(pendulum, tmp_path / "copy")
    (copy / "checkpoints" / "best.json").unlink()
    assert open_policy(copy).step == 1024


def test_sampling_depends_on_the_seed_and_on_nothing_else(pendulum: Path) -> None:
    policy = open_policy(pendulum)

    def returns(**how):
        return evaluate_policy(policy, episodes=2, **how).returns

    assert returns(deterministic=False, seed=1) == returns(deterministic=False, seed=1)
    assert returns(deterministic=False, seed=1) != returns(deterministic=False, seed=2)
    assert returns(deterministic=False, seed=1) != returns(deterministic=True, seed=1)


def test_a_run_is_found_by_its_seed_or_by_its_name(pendulum: Path, tmp_path: Path) -> None:
    assert find_run(pendulum) == find_run(pendulum.parent) == pendulum
    shutil.copytree(pendulum, tmp_path / "two" / "seed-0")
    shutil.copytree(pendulum, tmp_path / "two" / "seed-1")
    with pytest.raises(InputError, match=r"several seeds; choose one: .*seed-0, .*seed-1"):
        find_run(tmp_path / "two")
    with pytest.raises(RunError, match="not a run"):
        find_run(tmp_path)
    with pytest.raises(RunError, match="no such run"):
        find_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("checkpoint", "message"), [("bets", "expected best, last or a step"), (77, "step 77")]
)
def test_an_unknown_checkpoint_is_an_error(
    checkpoint: str | int, message: str, pendulum: Path
) -> None:
    with pytest.raises(KeelError, match=message):
        open_policy(pendulum, checkpoint)


def test_weights_of_another_network_are_an_error_with_both_shapes(
    pendulum: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(pendulum, tmp_path / "seed-0")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("  - 8\n", "  - 9\n"))
    with pytest.raises(CheckpointError, match=r"\[8, 3\] float32, this run has \[9, 3\] float32"):
        open_policy(run)


def test_a_film_has_the_reset_and_every_step(lamp: Path, tmp_path: Path) -> None:
    score = record_video(open_policy(lamp), tmp_path / "lamp.gif")
    assert score.returns == [float(LENGTH)]
    with Image.open(tmp_path / "lamp.gif") as picture:
        assert picture.n_frames == LENGTH + 1
        assert picture.info["duration"] == 50
        shades = []
        for frame in range(picture.n_frames):
            picture.seek(frame)
            shades.append(picture.convert("L").getpixel((5, 5)))
    assert np.allclose(shades, 40 * np.arange(LENGTH + 1), atol=3)
    assert [p.name for p in tmp_path.iterdir()] == ["lamp.gif"]


def test_a_film_shows_the_environment_with_its_options(tmp_path: Path) -> None:
    run = train(tmp_path / "runs", "KeelLamp-v0", 128, options="dim=true, max_episode_steps=3")
    record_video(open_policy(run), tmp_path / "dim.gif")
    with Image.open(tmp_path / "dim.gif") as picture:
        assert picture.n_frames == 4
        picture.seek(3)
        assert picture.convert("L").getpixel((5, 5)) == pytest.approx(30, abs=3)


def test_what_a_film_lacks_is_one_line(
    lamp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = open_policy(lamp)
    for path, message in (
        (tmp_path / "x.avi", "must end in .gif or .mp4"),
        (tmp_path / "nowhere" / "x.gif", r"folder .* does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            record_video(policy, path)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(InputError) as error:
        video.check_video_path(tmp_path / "x.mp4")
    assert str(error.value) == (
        '--video: .mp4 cannot be written: video is not installed: pip install "keel-rl[video]"; '
        ".gif needs nothing more"
    )

    def fail() -> str:
        raise RuntimeError("No ffmpeg exe could be found.\nInstall ffmpeg")

    broken = SimpleNamespace(get_ffmpeg_exe=fail)
    monkeypatch.setitem(sys.modules, "imageio", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", broken)
    with pytest.raises(InputError, match=r"No ffmpeg exe could be found\.; \.gif"):
        video.check_video_path(tmp_path / "x.mp4")


def test_an_mp4_has_every_frame(lamp: Path, tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    record_video(open_policy(lamp), tmp_path / "lamp.mp4")
    assert len(list(imageio.get_reader(tmp_path / "lamp.mp4"))) == LENGTH + 1


def test_a_renderer_that_fails_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    run = train(tmp_path / "runs", "KeelBrokenLamp-v0", 128)
    with pytest.raises(KeelError) as error:
        record_video(open_policy(run), tmp_path / "x.gif")
    assert str(error.value) == "KeelBrokenLamp-v0: cannot be rendered: a lamp"
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
