"""From runs on disk to a comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from keel.cli import main
from keel.compare import as_json, compare, load_runs
from keel.compare.align import final_score, grid_to, on_grid
from keel.compare.comparison import _over_time
from keel.compare.sources import Run
from keel.compare.stability import stability_of
from keel.errors import InputError
from keel.functional import holm
from keel.tracking import MetricsTable

from .conftest import WriteRun

RISE = [10.0 * i for i in range(1, 11)]


def run_of(steps: list[int], values: list[float]) -> Run:
    table = MetricsTable(np.array(steps), {"rollout/return_mean": np.array(values)})
    return Run(Path("x"), "x", "x", table)


def test_a_curve_is_the_mean_of_each_part_of_the_way():
    """Parts end at 1, 2, 3 …: two values in part 1, none in 2, one in 3."""
    run = run_of([1, 1, 3, 200], [4.0, 6.0, 9.0, 1.0])
    curve = on_grid(run, "rollout/return_mean", grid_to(200))
    assert curve[:4].tolist() == [5.0, 5.0, 9.0, 9.0]
    assert curve[-1] == 1.0


def test_before_the_first_value_nothing_is_known():
    curve = on_grid(run_of([100, 200], [1.0, 2.0]), "rollout/return_mean", grid_to(200))
    assert np.isnan(curve[:98]).all()
    assert curve[99] == 1.0


def test_the_score_is_the_mean_of_the_last_steps():
    run = run_of([85, 90, 95, 100, 105], [1.0, 2.0, 3.0, 5.0, 99.0])
    assert final_score(run, "rollout/return_mean", 100, 0.1) == 4.0
    assert final_score(run, "rollout/return_mean", 84 + 1, 0.001) == 1.0


def write_pair(write_run: WriteRun, gain: float, runs: int = 5, **more: float) -> Path:
    rng = np.random.default_rng(0)
    for seed in range(runs):
        for name, factor in (("old", 1.0), ("new", gain)):
            noise = 1.0 + 0.01 * rng.standard_normal()
            curve = [factor * noise * x for x in RISE]
            config = {"region": {"max_kl": 0.02 if name == "old" else 0.05}}
            path = write_run(name, seed, curve, tag=f"{name}-tag", config=config, **more)
    return path.parents[1]


@pytest.mark.parametrize(
    ("gain", "decision"), [(1.2, "keep"), (0.7, "roll back"), (1.0, "not distinguishable")]
)
def test_verdicts_of_whole_runs(write_run: WriteRun, gain: float, decision: str):
    folder = write_pair(write_run, gain)
    found = compare(load_runs([str(folder / "old"), str(folder / "new")]))
    (pair,) = found.pairs
    assert pair.verdict.decision == decision
    assert pair.effect.estimate == pytest.approx(gain - 1.0, abs=0.02)
    assert pair.changes == {"region.max_kl": ("0.02", "0.05")}


def test_several_variants_are_corrected_and_the_output_says_so(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
):
    rng = np.random.default_rng(0)
    for seed in range(4):
        for name, gain in (("old", 1.0), ("bad", 0.7), ("small", 0.95), ("same", 1.0)):
            noise = 1.0 + 0.005 * rng.standard_normal()
            path = write_run(name, seed, [gain * noise * x for x in RISE])
    words = ["compare", str(path.parents[1]), "--baseline", "old"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    pairs = {pair["variant"]: pair for pair in found["pairs"]}
    assert {name: pair["verdict"] for name, pair in pairs.items()} == {
        "bad": "roll back",
        "small": "slightly worse",
        "same": "not distinguishable",
    }
    raw = [pairs[name]["p"] for name in ("bad", "small", "same")]
    assert [pairs[name]["p_holm"] for name in ("bad", "small", "same")] == pytest.approx(holm(raw))
    assert pairs["bad"]["p_holm"] == pytest.approx(3 * pairs["bad"]["p"])
    assert {pair["variants_tested"] for pair in pairs.values()} == {3}
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 variants against one baseline: verdicts follow p-values after Holm's" in text
    assert "small against old: slightly worse" in text


def test_what_the_groups_earned_and_cost(write_run: WriteRun):
    """Curves to 100 and to 200, threshold 10 + 0.9·90 = 91. Of 200 parts the first 19 are not
    known, then 10, 20 … 90 for 20 parts each and 100 for one: (20·450 + 100) / 181."""
    for seed in range(3):
        write_run("a", seed, RISE)
        write_run("b", seed, [2 * x for x in RISE], time__seconds=5.0, train__rollbacks=2.0)
    found = compare(load_runs([str(Path(write_run("c", 0, RISE)).parents[1])]), baseline="a")
    assert [group.name for group in found.groups] == ["a", "b", "c"]
    a, b, _ = found.groups
    assert a.auc["Hopper-v5"] == pytest.approx(9100 / 181)
    assert b.auc["Hopper-v5"] == pytest.approx(2 * a.auc["Hopper-v5"])
    assert found.thresholds["Hopper-v5"] == pytest.approx(91.0)
    assert a.reached["Hopper-v5"] == (3, 1000.0)
    assert b.reached["Hopper-v5"] == (3, 500.0)
    assert a.seconds_per_step == pytest.approx(1e-3)
    assert b.stability.rollbacks == 2.0
    assert a.stability.worst_share == pytest.approx(0.5)


def test_numbers_that_are_none_are_counted(write_run: WriteRun):
    folder = write_pair(write_run, 1.2, runs=3)
    metrics = folder / "new" / "seed-1" / "metrics.jsonl"
    lines = [json.loads(x) for x in metrics.read_text().splitlines()]
    lines[4] |= {"train/loss": None, "flags": {"train/loss": "nan"}}
    metrics.write_text("".join(json.dumps(x) + "\n" for x in lines))
    (pair,) = compare(load_runs([str(folder)]), baseline="old").pairs
    assert pair.verdict.decision == "roll back"
    assert "new numeric problems" in pair.verdict.reasons[0]


def test_a_curve_is_averaged_where_it_is_known():
    curves = np.array([[1.0, 2.0, 6.0], [np.nan, 2.0, 4.0], [np.nan] * 3, [np.inf, 1.0, 1.0]])
    np.testing.assert_equal(_over_time(curves), [3.0, 3.0, np.nan, np.inf])


@pytest.mark.parametrize(
    ("kl", "bound", "worst"),
    [
        ([0.01, 0.03, None], [0.02, 0.02, 0.02], (0.03, 1.5)),
        ([0.01, None], [None, 0.02], (0.01, math.nan)),  # never both in one line
        ([0.01, 0.02], [0.0, 0.04], (0.02, 0.5)),
        ([0.01, 0.02], [None, None], (0.02, math.nan)),
        ([None, None], [0.02, 0.02], (math.nan, math.nan)),
    ],
)
def test_the_worst_update_is_taken_where_kl_and_bound_are_known(
    kl: list[float | None],
    bound: list[float | None],
    worst: tuple[float, float],
):
    columns = {"train/kl_exact": np.array(kl, float), "train/max_kl": np.array(bound, float)}
    table = MetricsTable(np.arange(len(kl)), columns)
    stability = stability_of([Run(Path("x"), "x", "x", table)])
    np.testing.assert_equal((stability.worst_kl, stability.worst_share), worst)


@pytest.mark.parametrize(("runs", "few", "score"), [(4, True, 25.0), (5, False, 0.0)])
def test_from_five_runs_on_scores_are_trimmed(
    write_run: WriteRun, runs: int, few: bool, score: float
):
    """One run of 100 among others of 0: the plain mean of four is 25; of five the extremes are cut.
    Which of them decides is said."""
    for seed in range(runs):
        path = write_run("a", seed, [100.0 if seed == 0 else 0.0] * 10)
    found = compare(load_runs([str(path.parents[1])]))
    assert float(found.groups[0].iqm.estimate) == score
    said = "fewer than 5 runs a side: means and Student's t decide"
    assert (said in found.notes) == few


def test_without_an_exact_kl_the_worst_is_that_of_the_usual_estimate():
    columns = {"train/approx_kl": np.array([0.01, 0.04]), "train/kl_approx": np.array([0.5, -0.5])}
    table = MetricsTable(np.arange(2), columns)
    stability = stability_of([Run(Path("x"), "x", "x", table)])
    assert (stability.worst_kl, stability.kl_is_exact) == (0.04, False)


def test_groups_by_tag_and_by_setting(write_run: WriteRun):
    folder = str(write_pair(write_run, 1.2, runs=3))
    tags = {run.group for run in load_runs([folder], by="tag")}
    assert tags == {"old-tag", "new-tag"}
    fields = {run.group for run in load_runs([folder], by="region.max_kl")}
    assert fields == {"max_kl=0.02", "max_kl=0.05"}
    with pytest.raises(InputError, match=r"did you mean 'region.max_kl'"):
        load_runs([folder], by="natural.max_kl")


def test_runs_are_compared_as_far_as_the_shortest_went(write_run: WriteRun):
    write_run("a", 0, RISE)
    path = write_run("b", 0, RISE[:5])
    found = compare(load_runs([str(path.parents[1])]))
    assert found.horizon == {"Hopper-v5": 500}
    assert "compared up to step 500" in found.notes[1]
    assert float(found.groups[0].scores["Hopper-v5"]) == 50.0


def test_evaluations_count_where_every_run_has_one(write_run: WriteRun):
    for seed in range(3):
        path = write_run("a", seed, RISE, eval__return_mean=7.0)
    assert compare(load_runs([str(path.parents[1])])).metric == "eval/return_mean"
    write_run("b", 0, RISE)
    assert compare(load_runs([str(path.parents[1])])).metric == "rollout/return_mean"


def test_what_the_runs_are_judged_by_is_said(write_run: WriteRun):
    for seed in range(2):
        path = write_run("a", seed, RISE, eval__return_mean=7.0)
    both = compare(load_runs([str(path.parents[1])]))
    assert both.notes[0] == (
        "scores of all 2 runs are evaluation returns (eval/return_mean); curves, area and steps "
        "are training returns, with exploration (rollout/return_mean)"
    )
    assert as_json(both)["curve_metric"] == "rollout/return_mean"
    assert not any(note.startswith("warning") for note in both.notes)
    write_run("b", 0, RISE)
    mixed = compare(load_runs([str(path.parents[1])]))
    assert mixed.notes[0] == (
        "scores of all 3 runs are training returns, with exploration (rollout/return_mean)"
    )
    assert mixed.notes[1].startswith(
        "warning: runs of a end with evaluations, runs of b do not, so none is used"
    )
    chosen = compare(load_runs([str(path.parents[1])]), metric="train/loss")
    assert chosen.notes[0] == "scores of all 3 runs are train/loss"


def test_several_environments_are_put_in_relation(write_run: WriteRun):
    for seed in range(3):
        for env, size in (("Hopper-v5", 1.0), ("Ant-v5", 100.0)):
            name = env[:3]
            write_run(f"old{name}", seed, [size * x for x in RISE], env=env, tag="old")
            path = write_run(f"new{name}", seed, [1.1 * size * x for x in RISE], env=env, tag="new")
    found = compare(load_runs([str(path.parents[1])], by="tag"), baseline="old")
    assert float(found.groups[0].iqm.estimate) == pytest.approx(1.0)
    assert found.pairs[0].effect.estimate == pytest.approx(0.1)
    assert found.pairs[0].verdict.decision == "keep"


def test_groups_without_a_common_environment_are_refused(write_run: WriteRun):
    write_run("a", 0, RISE)
    path = write_run("b", 0, RISE, env="Ant-v5")
    with pytest.raises(InputError, match=r"no environment in common \(a: Hopper-v5; b: Ant-v5\)"):
        compare(load_runs([str(path.parents[1])]))


def test_the_same_run_named_twice_counts_once(write_run: WriteRun):
    path = str(write_run("a", 0, RISE))
    assert len(load_runs([path, path])) == 1


def test_json_is_strict_and_has_the_pair_on_top(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
):
    folder = write_pair(write_run, 1.2)
    assert main(["compare", str(folder / "old"), str(folder / "new"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "keep"
    assert found["iqm"]["new"] > found["iqm"]["old"]
    assert found["interval"][0] < found["difference"] < found["interval"][1]
    assert found["probability_of_improvement"] == 1.0
    assert found["pairs"][0]["verdict"] == "keep"
    assert found["groups"]["old"]["reached"]["Hopper-v5"]["runs"] == 5


def test_one_run_of_a_side_has_no_interval(write_run: WriteRun):
    write_run("a", 0, RISE)
    path = write_run("b", 0, RISE)
    found = as_json(compare(load_runs([str(path.parents[1])])))
    assert found["interval"] == [None, None]
    assert found["verdict"] == "not distinguishable"
    json.dumps(found, allow_nan=False)


def test_text_picture_and_page(write_run: WriteRun, capsys: pytest.CaptureFixture[str]):
    folder = write_pair(write_run, 0.7)
    png, html = folder / "out" / "c.png", folder / "out" / "c.html"
    words = ["compare", str(folder / "old"), f"<b>new</b>={folder / 'new'}"]
    assert main([*words, "--png", str(png), "--html", str(html)]) == 0
    text = capsys.readouterr().out
    assert "<b>new</b> against old: roll back" in text
    assert "region.max_kl" in text
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert "<b>new</b>" not in page.replace("plotly", "")
    assert "&lt;b&gt;new&lt;/b&gt;" in page
    assert "src=" not in page.split("</style>")[1].split("<script")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare"], "compare what?"),
        (["compare", "nowhere"], "nowhere: no such run or file"),
        (["compare", "a=nowhere"], "nowhere: no such run or file"),
        (["compare", ".", "--tail", "0"], "tail: expected a share"),
        (["compare", ".", "--map", "step"], "--map step: expected METRIC=COLUMN"),
    ],
)
def test_bad_input_is_named(
    words: list[str],
    message: str,
    write_run: WriteRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(write_run("a", 0, RISE).parents[1])
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_an_empty_folder_is_named(tmp_path: Path):
    with pytest.raises(InputError, match="no run here"):
        load_runs([str(tmp_path)])


def test_a_run_without_the_metric_is_named(write_run: WriteRun):
    path = write_run("a", 0, [math.nan] * 3)
    with pytest.raises(InputError, match="no value of rollout/return_mean"):
        compare(load_runs([str(path)]))
