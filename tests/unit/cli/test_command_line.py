"""The command line as a user meets it: answers, help, typos and bad values."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import keel
from keel.cli import main
from keel.cli.explain import TOPICS


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_kl_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = answer(capsys, "explain", "kl", "0.8,0.2", "0.7,0.3", "--json")
    numbers = json.loads(out)
    assert status == 0
    assert round(numbers["kl_nats"], 6) == 0.025732
    assert round(numbers["reverse_kl_nats"], 6) == 0.028168


def test_estimators_as_json_are_the_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "explain", "estimators", "--json")
    rows = {
        (row["estimator"], row["placement"], row["sampling"]): row
        for row in json.loads(out)["certificate"]
    }
    assert rows["k1", "reward", "on-policy"]["right"] is True
    assert rows["k1", "loss", "on-policy"]["right"] is False
    assert rows["k3", "loss", "on-policy"]["descends"] == "KL(ref‖π)"


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_answers_without_options_in_text_json_and_picture(
    topic: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    status, text, _ = answer(capsys, "explain", topic, "--plot", str(picture))
    assert status == 0
    assert f"Picture: {picture}" in text.replace("\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, out, _ = answer(capsys, "explain", topic, "--json")
    assert status == 0
    assert isinstance(json.loads(out), dict)


def test_infinity_is_null_in_json_and_words_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(capsys, "explain", "kl", "0.5,0.5", "1,0", "--json")
    assert json.loads(out)["kl_nats"] is None
    _, out, _ = answer(capsys, "explain", "kl", "0.5,0.5", "1,0")
    assert "Infinite: Q says 'b' can never happen" in out


def test_logits_names_and_gaussians(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = answer(
        capsys, "explain", "kl", "-1,1", "0,0", "--logits", "--names", "no,yes", "--json"
    )
    outcome = json.loads(out)["outcomes"][1]
    assert outcome["name"] == "yes"
    assert outcome["p"] == pytest.approx(1 / (1 + math.exp(-2)))
    _, out, _ = answer(capsys, "explain", "kl", "--gaussian", "-1,2", "0,2", "--json")
    assert json.loads(out)["kl_nats"] == pytest.approx(1 / 8)


def test_the_estimate_of_the_note_from_four_sampled_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = answer(
        capsys, "explain", "kl", "0.6,0.3,0.1", "0.7,0.2,0.1", "--digits", "2",
        "--sample", "search,think,answer,search", "--json",
    )  # fmt: skip
    assert status == 0
    rounded = json.loads(out)["sample"]["rounded_log_q_minus_log_p"]["mean"]
    assert round(rounded, 6) == -0.0275


def test_the_kl_of_a_sequence_that_begins_with_a_minus(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = answer(capsys, "explain", "sequence", "-0.1,0.5", "--mask", "1,0", "--json")
    assert status == 0
    assert json.loads(out)["sum_nats"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("explain", "kl", "-0.1,1.1", "0.5,0.5"), "P: -0.1 is not a probability"),
        (("explain", "kl", "0.5,0.4", "0.5,0.5"), "P: the probabilities sum to 0.9, not 1"),
        (("explain", "kl", "0.5,0.5", "1"), "differ in length: 2 and 1"),
        (("explain", "kl", "", "1"), "P: empty"),
        (("explain", "kl", "a,b", "1,0"), "P: 'a' is not a number"),
        (("explain", "kl", "nan,1", "1,0"), "P: 'nan' is not finite"),
        (("explain", "kl", "--gaussian", "0,1", "0,-1"), "Q sigma: expected a number above 0"),
        (("explain", "kl", "--gaussian", "0,1", "0,1", "--logits"), "goes without --logits"),
        (("explain", "kl", "--plot", "nowhere/x.png"), "the folder 'nowhere' does not exist"),
        (("explain", "kl", "--plot", "x.gif"), "must end in .png"),
        (("explain", "kl", "--sample", "a,x"), "sample: 'x' is not one of a, b; name the outcomes"),
        (("explain", "kl", "--sample", ""), "sample: empty"),
        (("explain", "kl", "--sample", "a,nan"), "sample: 'nan' is not one of a, b"),
        (("explain", "kl", "--sampel", "a"), "did you mean --sample"),
        (("explain", "kl", "--digits", "2"), "give one with --sample"),
        (("explain", "kl", "--gaussian", "0,1", "0,1", "--sample", "a"), "goes without --logits"),
        (("explain", "sequence", ""), "terms: empty"),
        (("explain", "sequence", "0.1,O.2"), "terms: 'O.2' is not a number"),
        (("explain", "sequence", "0.1,nan"), "terms: 'nan' is not finite"),
        (("explain", "sequence", "0.1,0.2", "--mask", "1"), "mask: got 1 numbers for 2 tokens"),
        (("explain", "sequence", "--mask", ""), "mask: empty"),
        (("explain", "sequence", "--maks", "1"), "did you mean --mask?"),
        (("explain", "code-length", "0.5,0.5", "1"), "differ in length: 2 and 1"),
        (("explain", "code-length", "", "1"), "P: empty"),
        (("explain", "projection", "0.5,0.2", "0.3"), "expected rows of the same length"),
        (("explain", "projection", "0.5,nan", "0.3,0.2"), "row 1: 'nan' is not finite"),
        (("explain", "states", "--old", "0.5,0.5"), "old and new: got 1 and 2 states"),
        (("explain", "states", "--old", "0.5,0.5", "x"), "old, state 2: 'x' is not a number"),
        (("explain", "states", "--visit", "1"), "did you mean --visits?"),
        (("explain", "landscape", "--policy", "0.5,0.5"), "differ in length: 2 and 3"),
        (("explain", "landscape", "--rewards", "1,,0"), "rewards: '' is not a number"),
        (("explain", "sequnce"), "did you mean 'sequence'?"),
        (("explain", "klip"), "did you mean 'clip'?"),
        (("explian",), "unknown command 'explian', did you mean 'explain'?"),
        (("swim",), "unknown command 'swim'; there are: train"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = answer(capsys, *args)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), ("help",)])
def test_help_lists_the_commands(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = answer(capsys, *args)
    assert status == 0
    assert "explain   what KL, clipping" in out


def test_help_of_explain_lists_the_topics(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = answer(capsys, "explain", "--help")
    assert status == 0
    assert all(topic in out for topic in TOPICS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--version") == (0, f"keel {keel.__version__}\n", "")


def test_interrupting_is_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("keel.cli.explain.run", interrupt)
    assert answer(capsys, "explain", "kl") == (130, "", "keel: interrupted\n")


def test_the_broken_pipe_of_another_process_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("keel.cli.explain.run", fail)
    status, _, err = answer(capsys, "explain", "kl")
    assert status == 1
    assert "unexpected BrokenPipeError" in err


def test_a_closed_pipe_is_no_error() -> None:
    """`keel explain estimators | head -1`, with the reader gone before the first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from keel.cli import main; sys.exit(main())",
         "explain", "clip"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert process.returncode == 0
    assert err == ""
