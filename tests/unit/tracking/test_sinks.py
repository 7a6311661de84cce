"""Sinks: copies of the metrics that may fail without harm."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

from keel.errors import InputError
from keel.tracking import RunWarning, open_sinks
from keel.tracking.sinks import Sinks


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "demo" / "seed-0"
    path.mkdir(parents=True)
    return path


def test_tensorboard_events_hold_every_number(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(["tensorboard"], run)
    sinks.write(10, {"train/kl_exact": 0.5, "train/verdict": "accepted", "train/early": None})
    sinks.write(20, {"train/kl_exact": 0.25})
    sinks.close()
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/kl_exact"]
    assert [(e.step, e.value) for e in events.Scalars("train/kl_exact")] == [(10, 0.5), (20, 0.25)]


def test_wandb_and_trackio_get_name_config_and_numbers(run, monkeypatch):
    calls = []

    def record(what):
        return lambda *args, **options: calls.append((what, args, options)) or module

    module = SimpleNamespace(init=record("init"), log=record("log"), finish=record("finish"))
    for name in ("wandb", "trackio"):
        calls.clear()
        monkeypatch.setitem(sys.modules, name, module)
        sinks = open_sinks([name], run, {"lr": 1})
        sinks.write(3, {"a": 1})
        sinks.close()
        assert [what for what, _, _ in calls] == ["init", "log", "finish"]
        assert calls[0][2]["name"] == "demo/seed-0"
        assert calls[0][2]["config"] == {"lr": 1}
        assert calls[1][1:] == (({"a": 1.0},), {"step": 3})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_extra_is_one_line_with_the_command(run, monkeypatch, name):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError) as caught:
        open_sinks([name], run)
    assert str(caught.value) == f'{name} is not installed: pip install "keel-rl[{name}]"'


def test_an_unknown_sink_is_an_error_with_a_suggestion(run):
    with pytest.raises(InputError, match="did you mean 'tensorboard'"):
        open_sinks(["tensorbord"], run)


def test_a_sink_that_fails_is_dropped_with_one_warning():
    class Broken:
        def write(self, step, metrics):
            raise ConnectionError("no network")

        def close(self):
            raise AssertionError("dropped sinks are left alone")

    class Good:
        seen = ()

        def write(self, step, metrics):
            self.seen = (*self.seen, step)

        def close(self):
            self.seen = (*self.seen, "closed")

    good = Good()
    sinks = Sinks([Broken(), good])
    with pytest.warns(RunWarning, match="Broken failed and gets no more metrics"):
        sinks.write(1, {"a": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinks.write(2, {"a": 1.0})
        sinks.close()
    assert good.seen == (1, 2, "closed")
