"""Every page that Keel writes, in a browser: nothing is cut off, and nothing is left unrendered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keel.apps.language.heatmap import TokenTable, write_heatmap
from keel.cli import main
from keel.doctor.examine import examine
from keel.doctor.page import write_page as write_doctor_page
from keel.doctor.run_log import from_table
from keel.tracking.reader import MetricsTable

from .chromium import browser, find_chromium

ROOT = Path(__file__).parents[2]
WIDTHS = (1400, 400)
READABLE = 600
"""Pixels that a plot is wide at least, however narrow the window is."""
RAW = (".. math::", ":math:", "\\(", "\\[", "\\|", "\\qquad", "{{ ", "<!--")
"""What a reader never sees: markup that no program has turned into something to read."""
SOME = ("results.md", "guide/language.md", "guide/land.md", "reference/functional.md")
"""Pages with the widest tables, plots, formulas and signatures; the slow test takes all."""
QUESTIONS = """(async () => {
  const lazy = [...document.images];
  lazy.forEach(image => image.loading = "eager");
  await Promise.all(lazy.map(image => image.decode().catch(() => null)));
  const scrollers = element => {
    const around = [];
    for (let e = element; e && e !== document.body; e = e.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) around.push(e);
    return around;
  };
  const tables = [...document.querySelectorAll("table")];
  const plots = [...document.querySelectorAll("article img, .plotly-graph-div")];
  return {
    window: innerWidth,
    page: document.documentElement.scrollWidth,
    text: document.body.innerText,
    broken: lazy.filter(image => !image.naturalWidth).map(image => image.src),
    cut: tables.filter(t => t.getBoundingClientRect().right > innerWidth && !scrollers(t).length)
      .length,
    scrolled: tables.filter(t => scrollers(t).some(e => e.scrollWidth > e.clientWidth + 1))
      .map(t => t.innerText.split("\\n")[0]),
    small: plots.filter(p => p.getBoundingClientRect().width < Math.min(%d, p.naturalWidth || 1e9))
      .map(p => p.src || p.id),
    quoted: [...document.querySelectorAll("blockquote blockquote blockquote")]
      .map(q => q.innerText),
    unlinked: [...document.querySelectorAll("article img")].filter(i => !i.closest("a"))
      .map(i => i.src),
  };
})()"""


@pytest.fixture
def chromium() -> str:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: `apt-get install chromium` on Debian")
    return program


def problems(chromium: str, profile: Path, pages: Sequence[Path]) -> list[str]:
    """Load pages at both widths, and return what is wrong with them."""

    async def look() -> list[str]:
        lines = []
        async with browser(chromium, profile) as tab:
            for page in pages:
                for width in WIDTHS:
                    await tab.open(page.as_uri(), width)
                    report = await tab.ask(QUESTIONS % READABLE)
                    name = f"{page.parent.name}/{page.name} at {width} px"
                    lines += [f"{name}: {line}" for line in _wrong(report)]
        return lines

    return asyncio.run(look())


def _wrong(report: dict) -> list[str]:
    lines = [f"shows {raw!r}" for raw in RAW if raw in report["text"]]
    if report["page"] > report["window"]:
        lines.append(f"is {report['page']} px wide")
    if report["window"] >= max(WIDTHS) and report["scrolled"]:
        lines.append(f"tables that do not fit a wide window: {report['scrolled']}")
    lines += [
        f"{what}: {report[what]}"
        for what in ("broken", "cut", "small", "quoted", "unlinked")
        if report[what]
    ]
    return lines


def build_site(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """Build the documentation, or some of its pages, and return the pages."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    changes: dict = {}
    if only:  # links and navigation lead nowhere then
        included = "".join(f"!/{page}\n" for page in only)
        changes = {"exclude_docs": f"*.md\nhooks.py\n{included}", "nav": None, "strict": False}
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **changes))
    return sorted(page for page in folder.rglob("*.html") if page.name != "404.html")


def test_pages_of_the_documentation_fit_and_are_rendered(chromium: str, tmp_path: Path) -> None:
    pages = build_site(tmp_path / "site", SOME)
    assert len(pages) == len(SOME)
    assert problems(chromium, tmp_path / "profile", pages) == []


@pytest.mark.slow
def test_all_pages_of_the_documentation_fit_and_are_rendered(chromium: str, tmp_path: Path) -> None:
    pages = build_site(tmp_path / "site")
    assert len(pages) > 30
    assert problems(chromium, tmp_path / "profile", pages) == []


def test_pages_of_runs_fit_and_are_rendered(chromium: str, tmp_path: Path) -> None:
    pages = [
        _comparison(tmp_path),
        _tokens(tmp_path / "tokens.html"),
        _diagnosis(tmp_path / "doctor.html"),
    ]
    assert problems(chromium, tmp_path / "profile", pages) == []


def _comparison(folder: Path) -> Path:
    """Write the page of `keel compare`, for groups with long names."""
    groups = []
    for gain in (1, 2):
        log = folder / f"PPO_{gain}" / "progress.csv"
        log.parent.mkdir()
        rows = "".join(f"{gain * step / 100},{step}\n" for step in range(100, 2_000, 100))
        log.write_text("rollout/ep_rew_mean,time/total_timesteps\n" + rows)
        groups.append(f"a_group_with_a_name_that_is_longer_than_a_telephone_is_wide_{gain}={log}")
    page = folder / "compare.html"
    assert main(["compare", *groups, "--html", str(page)]) == 0
    return page


def _diagnosis(page: Path) -> Path:
    """Write the page of `keel doctor`, of two runs with long names, one of them sick."""
    rows = 30
    table = MetricsTable(
        step=np.arange(1, rows + 1),
        columns={"train/kl_exact": np.geomspace(0.01, 50.0, rows)},
    )
    name = "a_run_with_a_name_that_is_longer_than_a_telephone_is_wide"
    log = from_table(
        table, "keel", "metrics.jsonl", settings={"region.target_kl": 0.01}, path=Path("runs", name)
    )
    write_doctor_page([examine(log), examine(replace(log, series={}))], page)
    return page


def _tokens(page: Path) -> Path:
    """Write the heat map of a language model's run, with long words."""
    rows, length = 3, 40
    kl = np.linspace(0.0, 0.2, rows * length).reshape(rows, length)
    table = TokenTable(
        run="runs/a_run_with_a_name_that_is_longer_than_a_telephone_is_wide/seed-0",
        step=640,
        prompts=["What is 17 + 25, written without any space? " * 3] * rows,
        tokens=[["word"] * length] * rows,
        weight=np.ones((rows, length)),
        reward=np.ones(rows),
        kl_old_new=kl,
        log_ratio=kl - 0.1,
        advantage=kl - 0.1,
    )
    write_heatmap(table, page)
    return page
