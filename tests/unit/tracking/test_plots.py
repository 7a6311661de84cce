"""The pictures of a run: there for every run, and honest about updates that were not kept."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keel.tracking import MetricsWriter, RunError, read_metrics
from keel.tracking.plots import _draw_learning, _draw_trust_region, draw_run

NAN, INF = math.nan, math.inf


def update(kept=0.01, requested=None, alpha=1.0, bound=0.02, **more):
    rejected = alpha == 0.0
    return {
        "rollout/return_mean": 10.0,
        "rollout/return_std": 2.0,
        "train/kl_exact": 0.0 if rejected else kept,
        "train/kl_requested": kept if requested is None else requested,
        "train/kl_step": NAN if rejected else kept,
        "train/approx_kl": kept,
        "train/max_kl": bound,
        "train/alpha": alpha,
        "train/clip_fraction": 0.1,
        **more,
    }


def write(run: Path, *lines: dict[str, float]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(run / "metrics.jsonl") as writer:
        for number, line in enumerate(lines, 1):
            writer.write(number * 100, line)
    return run


RUNS = {
    "usual": [update(), update(**{"eval/return_mean": 12.0, "eval/return_std": 1.0}), update()],
    "one point": [update()],
    "nothing written": [],
    "only NaN": [dict.fromkeys(update(), NAN)] * 3,
    "infinite": [update(), update(0.015, INF, 0.1), update(NAN, INF, 0.0), update(INF)],
    "far outside": [update(5.7), update(0.004), update(0.0)],
    "far inside": [update(1e-6, bound=0.05), update(0.0, bound=0.05)],
    "no columns": [{"time/steps": 1.0}, {"time/steps": 2.0}],
    "no bound": [{"train/kl_exact": 0.1}, {"train/kl_exact": 0.2}],
}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_two_pictures(name: str, tmp_path: Path) -> None:
    run = write(tmp_path / "seed-0", *RUNS[name])
    (run / "learning.png").write_bytes(b"of yesterday")
    drawn = draw_run(run)
    assert drawn == [run / "learning.png", run / "trust-region.png"]
    for picture in drawn:
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
    assert {p.name for p in run.iterdir()} == {"metrics.jsonl", "learning.png", "trust-region.png"}


def series(figure, label: str):
    (line,) = [x for axes in figure.axes for x in axes.lines if x.get_label() == label]
    return line.get_xdata(), line.get_ydata()


def test_a_rejected_update_is_marked_and_not_drawn_as_zero(tmp_path: Path) -> None:
    lines = [update(0.01), update(0.03, 0.03, alpha=0.0), update(0.019, 0.05, alpha=0.4)]
    figure = _draw_trust_region(read_metrics(write(tmp_path / "r", *lines)), "r")
    np.testing.assert_array_equal(series(figure, "exact KL, kept")[1], [0.01, NAN, 0.019])
    assert [list(x) for x in series(figure, "requested, rejected")] == [[200.0], [0.03]]
    assert [list(x) for x in series(figure, "requested, walked back")] == [[300.0], [0.05]]
    (said,) = figure.axes[0].texts
    assert "bound 0.02" in said.get_text()
    assert "walked back: 1, rejected: 1" in said.get_text()


def test_the_bound_follows_the_bound_in_force(tmp_path: Path) -> None:
    run = write(tmp_path / "r", update(bound=0.02), update(bound=0.02), update(bound=0.01))
    figure = _draw_trust_region(read_metrics(run), "r")
    steps, bound = series(figure, "bound (max_kl)")
    assert list(zip(steps, bound, strict=True))[1:] == [(100, 0.02), (200, 0.02), (300, 0.01)]
    assert "bound 0.01 … 0.02" in figure.axes[0].texts[0].get_text()


@pytest.mark.parametrize(
    ("kl", "scale"), [(0.015, "linear"), (5.7, "symlog"), (1e-4, "log"), (0.0, "linear")]
)
def test_the_axis_shows_both_the_bound_and_the_kl(kl: float, scale: str, tmp_path: Path) -> None:
    run = write(tmp_path / "r", update(kl), update(kl))
    axes = _draw_trust_region(read_metrics(run), "r").axes[0]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == scale
    assert low <= kl < high
    assert low < 0.02 < high


def test_evaluations_are_points_and_there_may_be_none(tmp_path: Path) -> None:
    plain = read_metrics(write(tmp_path / "a", update(), update()))
    assert not _draw_learning(plain, "a").axes[0].containers
    evaluated = read_metrics(write(tmp_path / "b", update(), update(**{"eval/return_mean": 12.0})))
    (bars,) = _draw_learning(evaluated, "b").axes[0].containers
    assert bars.lines[0].get_xydata().tolist() == [[200.0, 12.0]]


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no metrics here"):
        draw_run(tmp_path)


def test_drawing_imports_neither_pyplot_nor_torch(tmp_path: Path) -> None:
    run = write(tmp_path / "r", update())
    script = (
        "import sys; from pathlib import Path; from keel.tracking.plots import draw_run;"
        f"draw_run(Path({str(run)!r}));"
        "heavy = {'matplotlib.pyplot', 'torch'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
