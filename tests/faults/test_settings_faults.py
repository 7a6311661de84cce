"""Settings that cannot be trained with: refused in one line before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.cli import main

SMALL = ("--task", "sort", "--warmup.examples", "0", "--evaluation.prompts", "4")


def refused(args: tuple[str, ...], runs: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which `keel train` refuses; nothing is printed or made."""
    assert main(["train", *args, "--runs", str(runs)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not runs.exists()
    return captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("CartPole-v1", "--device", "meta"), "device: 'meta' cannot be trained on, expected auto"),
        (("CartPole-v1", "--device", "cuda:99"), "device: 'cuda:99' cannot be used"),
        (("CartPole-v1", "--device", "gpu"), "device: 'gpu' cannot be used"),
        (("CartPole-v1", "--threads", "1e8"), "threads: expected at most 1,024"),
        (("CartPole-v1", "--network.hidden", "1e9", "1e9"), "network: layers of 1,000,000,000 ×"),
        (("CartPole-v1", "--critic.kind", "quantile", "--critic.quantiles", "1e12"), "GiB are"),
        (
            ("CartPole-v1", "--network.recurrent", "both", "--network.recurrent-size", "1e7"),
            "GiB are",
        ),
        (("CartPole-v1", "--network.kind", "decoupled", "--network.features", "1e12"), "GiB are"),
        (("CartPole-v1", "--total-steps", "1e300"), "total_steps: expected at most"),
        (("CartPole-v1", "--seed", "-1"), "seed: expected no negative number"),
        (("CartPole-v1", "--envs.options", "a=[1"), "envs.options: ']' is missing"),
        (("CartPole-v1", "--config", "/dev/zero"), "/dev/zero: larger than 1 MiB"),
        (("language", *SMALL, "--device", "meta"), "device: 'meta' cannot be trained on"),
        (("language", *SMALL, "--threads", "1e8"), "threads: expected at most 1,024"),
        (("language", *SMALL, "--model.hidden", "1e8"), "model: 4 layers of width 100,000,000"),
        (("language", *SMALL, "--model.layers", "1e9"), "model: 1,000,000,000 layers of width"),
        (("language", *SMALL, "--sample.prompts", "1e12"), "sample: 8,000,000,000,000 completions"),
        (("language", *SMALL, "--sample.max-new-tokens", "1e12"), "of 1,000,000,000,000 tokens"),
        (("language", *SMALL, "--sample.top-p", "2"), "top_p: expected a number from 0 to 1"),
        (("language", *SMALL, "--kl.ema", "2"), "kl.ema: expected a number from 0 to 1"),
        (("language", *SMALL, "--kl.loss", "foo"), "invalid choice 'foo' for argument '--kl.loss'"),
        (("language", *SMALL, "--kl.reward", "full"), "invalid choice 'full' for argument"),
        (("language", *SMALL, "--kl.low", "2", "--kl.high", "1"), "kl.low: expected at most"),
        (("language", *SMALL, "--task-options", "longest=[1"), "--task-options: ']' is missing"),
        (("language", *SMALL, "--task-options", "longest=x"), "sort.longest: expected a whole"),
        (("language", *SMALL, "--log", "nope"), "log: 'nope' is not one of"),
    ],
)  # fmt: skip
def test_impossible_settings_are_one_line_and_create_nothing(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert message in refused(args, tmp_path / "runs", capsys)


GROUPED = ("CartPole-v1", "--advantage.normalize", "group")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (*GROUPED, "--advantage.group", "nowhere_at_all:f"),
            "advantage.group: nowhere_at_all:f: cannot be imported (No module named",
        ),
        (
            (*GROUPED, "--advantage.group", "keel.ablate.groups:by_enviroment"),
            "has no attribute 'by_enviroment'",
        ),
        (
            (*GROUPED, "--advantage.group", "keel.ablate.groups:__name__"),
            "advantage.group: keel.ablate.groups:__name__: is no function",
        ),
        (
            (*GROUPED, "--advantage.group", "shutil:copy"),
            "shutil:copy: must take the observations",
        ),
        (
            ("CartPole-v1", "--advantage.normalize", "robust", "--advantage.group", "nope:f"),
            "advantage.group: nope:f: cannot be imported",
        ),
        (GROUPED, "the environment names no group; give info['group']"),
        (("nowhere_at_all:Env",), "nowhere_at_all"),
        (("nowhere_at_all:Env-v0",), "cannot import 'nowhere_at_all'"),
        (("CartPole-v1", "--demos.path", "minari:no/such/data-v0"), "no/such/data"),
        (("CartPole-v1", "--demos.path", "nowhere"), "nowhere"),
        (
            ("language", *SMALL, "--reward.functions", "nowhere_at_all:f"),
            "nowhere_at_all:f: cannot be imported",
        ),
        (("language", *SMALL, "--model.path", "no/such/model"), "no/such/model"),
        (("language", *SMALL[2:], "--task", "nope"), "nope"),
    ],
)
def test_code_that_a_setting_names_is_looked_for_before_a_run_is_made(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert message in refused(args, tmp_path / "runs", capsys)


@pytest.mark.parametrize(
    "command",
    [
        ("ablate", "CartPole-v1", "--vary", "region.max_kl=0.02,0.05"),
        ("tune", "CartPole-v1", "--trials", "2"),
    ],
    ids=["ablate", "tune"],
)
def test_the_same_before_a_group_of_runs(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    words = ["--advantage.normalize", "group", "--advantage.group", "nowhere_at_all:f"]
    assert main([*command, *words, "--runs", str(runs)]) == 2
    err = capsys.readouterr().err
    assert "advantage.group: nowhere_at_all:f: cannot be imported" in err
    assert err.count("\n") == 1
    assert not runs.exists()
