"""The animated picture of a run's live display, recorded from a terminal.

    python -m benchmarks.live_picture [--out docs/images/live.gif] [WORD…]

Runs `keel train WORD…` in tmux, captures the screen while it trains, and draws the captures. Needs
tmux. Stretches in which nothing changes are left out.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "HalfCheetah-v5 --envs.backend sync --total-steps 250_000 --region.max-kl 0.02"
COLUMNS, ROWS = 110, 18
FONT_SIZE, CELL, LINE, MARGIN = 15, 9, 20, 14
"""Pixels. The font's cells are 9 wide at this size, so that bars have no seams."""
INTERVAL = 0.25
"""Seconds between two captures."""
SHOWN_MS, LAST_MS = 120, 5_000
BACKGROUND, FOREGROUND = (13, 17, 23), (225, 228, 232)
COLORS = 48


def record(words: list[str], folder: Path) -> list[str]:
    """Return the screens of `keel train WORD…` with their colors, without repetitions."""
    socket, done = folder / "tmux", folder / "done"
    train = shlex.join(["keel", "train", *words])
    run = f"from keel.cli import main; main({['train', *words]!r})"
    python = shlex.join([sys.executable, "-c", run])
    shell = f"cd {folder}; echo {shlex.quote(f'$ {train}')}; {python}; touch {done}; sleep 60"
    tmux = ["tmux", "-S", str(socket)]
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    subprocess.run([*tmux, "new-session", "-d", *size, shell], check=True)
    screens: list[str] = []
    try:
        while True:
            ended = done.exists()
            capture = [*tmux, "capture-pane", "-p", "-e"]
            screen = subprocess.run(capture, check=True, capture_output=True, text=True).stdout
            if screen.strip() and screen not in screens[-1:]:
                screens.append(screen)
            if ended:
                return screens
            time.sleep(INTERVAL)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def draw(screen: str, rows: int) -> Image.Image:
    """Draw the first rows of one screen."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), FONT_SIZE)
    size = (2 * MARGIN + COLUMNS * CELL, 2 * MARGIN + rows * LINE)
    image = Image.new("RGB", size, BACKGROUND)
    canvas = ImageDraw.Draw(image)
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    for row, line in enumerate(screen.splitlines()[:rows]):
        column = 0
        for text, style, _ in Text.from_ansi(line, end="").render(console):
            for letter in text:
                place = (MARGIN + column * CELL, MARGIN + row * LINE)
                canvas.text(place, letter, fill=_color(style), font=font)
                column += 1
    return image


def _color(style: Style | None) -> tuple[int, ...]:
    color: tuple[int, ...] = FOREGROUND
    if style and style.color and style.color != Color.default():
        color = tuple(style.color.get_truecolor(MONOKAI))
    if style and style.dim:
        color = tuple((a + b) // 2 for a, b in zip(color, BACKGROUND, strict=True))
    return color


def animate(images: list[Image.Image], out: Path) -> None:
    """Write images as a GIF with one palette for all, the last one shown longest."""
    every = Image.new("RGB", (images[0].width, images[0].height * len(images)))
    for k, image in enumerate(images):
        every.paste(image, (0, k * image.height))
    palette = every.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)
    frames = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    times = [SHOWN_MS] * (len(frames) - 1) + [LAST_MS]
    options = {"save_all": True, "append_images": frames[1:], "duration": times, "loop": 0}
    frames[0].save(out, **options, optimize=True)


def main() -> None:
    """Record and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "live.gif")
    parser.add_argument("--frames", type=int, default=80, help="at most, evenly spread")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="of `keel train`", metavar="WORD")
    args = parser.parse_args()
    if not shutil.which("tmux"):
        sys.exit("live picture: needs tmux")
    with tempfile.TemporaryDirectory() as folder:
        screens = record(args.words or TRAIN.split(), Path(folder))
    chosen = np.linspace(0, len(screens) - 1, min(args.frames, len(screens))).round()
    rows = max(len(screen.rstrip().splitlines()) for screen in screens)
    animate([draw(screens[int(k)], rows) for k in chosen], args.out)
    print(f"{args.out}: {len(chosen)} frames, {args.out.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
