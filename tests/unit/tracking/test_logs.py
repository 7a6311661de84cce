"""CSV and event files of SB3, CleanRL, RLlib and others, read in Keel's names and compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from keel.cli import main
from keel.errors import InputError
from keel.tracking import RunError
from keel.tracking.logs import read_log

SB3 = """rollout/ep_rew_mean,time/total_timesteps,train/entropy_loss,time/time_elapsed
,2048,,3
21.5,4096,-0.68,6
60.0,6144,-0.61,9
1"""
RLLIB = """env_runners/episode_return_mean,num_env_steps_sampled_lifetime,time_total_s
20.0,4000,1.5
31.0,8000,3.0
"""
MONITOR = """#{"t_start": 1.0, "env_id": "CartPole-v1"}
r,l,t
9.0,9,0.1
30.0,30,0.3
"""


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_sb3_progress(tmp_path: Path):
    """The entropy has the other sign there; the half-written last line does not count."""
    log = read_log(write(tmp_path, "progress.csv", SB3))
    assert log.framework == "sb3"
    assert log.table.step.tolist() == [2048, 4096, 6144]
    assert np.isnan(log.table["rollout/return_mean"][0])
    assert log.table["rollout/return_mean"][1:].tolist() == [21.5, 60.0]
    assert log.table["train/entropy"][1:].tolist() == [0.68, 0.61]
    assert log.table["time/seconds"].tolist() == [3.0, 6.0, 9.0]


def test_sb3_monitor(tmp_path: Path):
    """One line an episode: steps are the sum of lengths."""
    log = read_log(write(tmp_path, "0.monitor.csv", MONITOR))
    assert log.table.step.tolist() == [9, 39]
    assert log.table["rollout/return_mean"].tolist() == [9.0, 30.0]


def test_rllib_progress(tmp_path: Path):
    log = read_log(write(tmp_path, "progress.csv", RLLIB))
    assert log.framework == "rllib"
    assert log.table.step.tolist() == [4000, 8000]
    assert log.table["rollout/return_mean"].tolist() == [20.0, 31.0]


def test_any_csv_with_a_mapping(tmp_path: Path):
    path = write(tmp_path, "mine.csv", "frame,score\n10,1.0\n20,2.0\n")
    mapping = {"step": "frame", "rollout/return_mean": "score"}
    table = read_log(path, mapping).table
    assert table.step.tolist() == [10, 20]
    assert table["rollout/return_mean"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (None, r"whose log is this\? Its columns are frame, score"),
        ({"rollout/return_mean": "score"}, "which column .* counts steps"),
        ({"step": "frames"}, "no such column, only frame, score"),
        ({"step": "frame", "rollout/retrun": "score"}, "Keel has no metric 'rollout/retrun'"),
    ],
)
def test_what_a_mapping_lacks_is_named(
    tmp_path: Path, mapping: dict[str, str] | None, message: str
):
    path = write(tmp_path, "mine.csv", "frame,score\n10,1.0\n20,2.0\n")
    with pytest.raises(InputError, match=message):
        read_log(path, mapping)


def test_an_empty_csv_is_named(tmp_path: Path):
    with pytest.raises(RunError, match="no line of numbers"):
        read_log(write(tmp_path, "progress.csv", ""))


def write_events(folder: Path, tag: str, values: list[tuple[int, float]]) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer").EventFileWriter
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    events = writer(str(folder))
    for step, value in values:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        events.add_event(Event(wall_time=100.0 + step / 1000, step=step, summary=summary))
    events.close()


def test_cleanrl_events(tmp_path: Path):
    """Two episodes that end at one step are one value, their mean."""
    folder = tmp_path / "CartPole-v1__ppo__1__1700000000"
    write_events(folder, "charts/episodic_return", [(5, 10.0), (5, 20.0), (9, 30.0)])
    (path,) = folder.iterdir()
    log = read_log(path)
    assert log.framework == "cleanrl"
    assert log.table.step.tolist() == [5, 9]
    assert log.table["rollout/return_mean"].tolist() == [15.0, 30.0]
    assert log.table["time/seconds"].tolist() == pytest.approx([0.0, 0.004], abs=1e-6)


def write_text(folder: Path, tag: str, text: str) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer").EventFileWriter
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    events = writer(str(folder))
    tensor = TensorProto(dtype=7, string_val=[text.encode()])
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    named = Summary.Value(tag=f"{tag}/text_summary", metadata=kind, tensor=tensor)
    events.add_event(Event(wall_time=100.0, step=0, summary=Summary(value=[named])))
    value = Summary.Value(tag="losses/approx_kl", simple_value=0.01)
    events.add_event(Event(wall_time=101.0, step=8, summary=Summary(value=[value])))
    events.close()


def test_cleanrls_hyperparameters_are_settings(tmp_path: Path):
    table = (
        "|param|value|\n|-|-|\n|gamma|0.99|\n|num_envs|4|\n|target_kl|None|\n|env_id|CartPole-v1|"
    )
    write_text(tmp_path, "hyperparameters", table)
    (path,) = tmp_path.iterdir()
    log = read_log(path)
    assert log.settings == {"advantage.gamma": 0.99, "envs.num": 4, "env": "CartPole-v1"}
    assert log.points["train/approx_kl"].values.tolist() == pytest.approx([0.01])


@pytest.mark.parametrize(
    ("tag", "framework", "metric", "value"),
    [
        ("Loss/value_function", "rsl_rl", "train/value_loss", 1.0),
        ("train/ppo_clip_ratio", "openrlhf", "train/clip_fraction", 2.0),
        ("actor/pg_clipfrac", "verl", "train/clip_fraction", 2.0),
        ("train/completions/clipped_ratio", "trl", "rollout/ended", -1.0),
    ],
)
def test_scalars_of_other_frameworks(
    tmp_path: Path, tag: str, framework: str, metric: str, value: float
):
    write_events(tmp_path, tag, [(1, 2.0), (2, float("nan"))])
    (path,) = tmp_path.iterdir()
    log = read_log(path, framework=framework)
    assert log.points[metric].values.tolist() == [value]
    assert log.nans[metric].tolist() == [2]
    assert read_log(path, names=[metric]).points.keys() == {metric}


@pytest.mark.parametrize("step", ["9223372036854775808", "1e30", "inf", "-5", "", "x"])
def test_a_row_whose_step_cannot_be_counted_is_dropped_and_told(tmp_path: Path, step: str):
    text = f"step,rollout/return_mean\n10,1.0\n{step},2.0\n30,3.0\n"
    table = read_log(write(tmp_path, "mine.csv", text)).table
    assert table.step.tolist() == [10, 30]
    assert table["rollout/return_mean"].tolist() == [1.0, 3.0]
    assert table.damage == ("1 line without a step below 2^63 was dropped (line 3)",)


def test_an_episode_without_a_length_does_not_spoil_those_after_it(tmp_path: Path):
    log = read_log(write(tmp_path, "0.monitor.csv", MONITOR + "1.0,nan,0.4\n5.0,5,0.5\n"))
    assert log.table.step.tolist() == [9, 39, 44]
    assert log.table["rollout/return_mean"].tolist() == [9.0, 30.0, 5.0]
    assert log.table.damage == ("1 line without a length of its episode was dropped (line 5)",)


def test_only_the_metrics_that_are_asked_for_are_kept(tmp_path: Path):
    log = read_log(write(tmp_path, "progress.csv", SB3), names=["train/entropy"])
    assert list(log.table.columns) == ["train/entropy"]


def test_one_column_may_be_two_metrics(tmp_path: Path):
    path = write(tmp_path, "mine.csv", "frame,score\n10,1.0\n20,2.0\n")
    mapping = {"step": "frame", "rollout/return_mean": "score", "eval/return_mean": "score"}
    table = read_log(path, mapping).table
    assert table["rollout/return_mean"].tolist() == table["eval/return_mean"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("damage", "steps", "sentence"),
    [
        (lambda data: data[:-7], [5], "the file is cut off in record 3"),
        (lambda data: data[:-20] + b"\xff" + data[-19:], [5], "record 3 is damaged"),
    ],
)
def test_where_an_event_file_is_torn_is_told(tmp_path: Path, damage, steps, sentence: str):
    write_events(tmp_path, "charts/episodic_return", [(5, 10.0), (9, 30.0)])
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    table = read_log(path).table
    assert table.step.tolist() == steps
    assert len(table.damage) == 1
    assert sentence in table.damage[0]


def test_an_event_file_that_is_none(tmp_path: Path):
    path = write(tmp_path, "events.out.tfevents.1", "")
    with pytest.raises(RunError, match="no scalar in it"):
        read_log(path)


def test_peers_are_compared_with_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """SB3's CSV against CleanRL's events: the environment that one names is taken for both."""
    for seed in (1, 2, 3):
        write(tmp_path, f"sb3/PPO_{seed}/progress.csv", SB3)
        folder = tmp_path / "cleanrl" / f"CartPole-v1__ppo__{seed}__1700000000"
        write_events(folder, "charts/episodic_return", [(3000, 50.0 + seed), (6144, 90.0 + seed)])
    words = ["compare", f"sb3={tmp_path / 'sb3'}", str(tmp_path / "cleanrl")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("CartPole-v1: rollout/return_mean")
    assert "ppo against sb3: keep" in text


def test_logs_of_language_models_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A trainer's state against what verl printed: whose metrics have other names and layouts."""
    for seed in (1, 2, 3):
        history = [{"step": i, "loss": 0.1, "reward": 0.1 * i + seed / 100} for i in range(1, 9)]
        write(tmp_path, f"trl/{seed}/trainer_state.json", json.dumps({"log_history": history}))
        lines = [f"step:{i} - critic/score/mean:{0.2 * i + seed / 100}" for i in range(1, 9)]
        write(tmp_path, f"verl/{seed}/train.log", "\n".join(lines))
    assert main(["compare", f"a={tmp_path / 'trl'}", f"b={tmp_path / 'verl'}"]) == 0
    text = capsys.readouterr().out
    assert "rollout/return_mean" in text
    assert "b against a: keep" in text
