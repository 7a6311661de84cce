"""The live display in a real terminal (tmux) that changes its size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import keel

SCRIPT = """
import sys
import time
from pathlib import Path
from rich.console import Console
from keel.tracking.live import Display
from keel.config import Config
console, seen = Console(), Path(sys.argv[1])
metrics = {"rollout/return_mean": 12.0, "train/kl_step": 0.01, "train/max_kl": 0.05}
with Display(Config(), "keel train CartPole-v1", console, quiet=False) as display:
    for step in range(1000):
        display.update(512 * (step % 100), metrics, False)
        seen.write_text(str(console.width))
        time.sleep(0.1)
"""


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., str]]:
    if shutil.which("tmux") is None:
        pytest.skip("no tmux")

    def run(*args: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        return done.stdout

    yield run
    run("kill-server")


ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if key not in ("CI", "FORCE_COLOR")},
    "PYTHONPATH": str(Path(keel.__file__).parents[1]),
}


def wait_for(screen: Callable[[], str], right: Callable[[str], bool], seconds: float = 60.0) -> str:
    """The screen once it is right, or as it is after so many seconds."""
    end = time.monotonic() + seconds
    while not right(text := screen()) and time.monotonic() < end:
        time.sleep(0.2)
    return text


@pytest.mark.slow
def test_resizing_leaves_no_remnants(tmux: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SCRIPT)
    seen = tmp_path / "width"
    program = (sys.executable, str(script), str(seen))
    tmux("new-session", "-d", "-s", "x", "-x", "110", "-y", "30", *program)

    def screen() -> str:
        return tmux("capture-pane", "-p", "-t", "x")

    def once(text: str) -> bool:
        words = ("keel train CartPole-v1", "steps ", "return ", "exact KL", "walked back")
        return all(text.count(word) == 1 for word in words)

    assert once(wait_for(screen, once)), screen()

    def resize(width: int) -> None:
        """Resize until the program has it: a busy tmux may leave a program at an older width."""
        for _ in range(10):
            tmux("resize-window", "-t", "x", "-x", str(width), "-y", "30")
            if wait_for(seen.read_text, str(width).__eq__, 2.0) == str(width):
                return
            tmux("resize-window", "-t", "x", "-x", str(width + 1), "-y", "30")
        pytest.fail(f"tmux does not pass on a width of {width}")

    for width in (60, 44, 90, 50, 70):
        resize(width)
        time.sleep(1.0)
        text = wait_for(screen, once, 20.0)
        assert once(text), f"width {width}:\n{text}"
