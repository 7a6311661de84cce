"""Optional copies of the metrics: TensorBoard, Weights & Biases, Trackio."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from keel.errors import RunWarning, check_choice, import_extra


class Sink(Protocol):
    """Receiver of the numbers of every iteration."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one iteration.

        Args:
            step: of the run.
            metrics: numbers by name.
        """

    def close(self) -> None:
        """Flush and end."""


class TensorBoard:
    """Event files in `run/tensorboard`; needs neither torch nor tensorflow."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        writer = import_extra("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = import_extra("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = import_extra("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(run / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all numbers."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `keel`, named as here."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        wandb = import_extra("wandb", "wandb")
        self._run = wandb.init(project="keel", name=_title(run), dir=str(run), config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A run of the project `keel`, named as here."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._trackio = import_extra("trackio", "trackio")
        self._trackio.init(project="keel", name=_title(run), config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one step."""
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class Sinks:
    """Several sinks as one. They are copies: one that fails is dropped with a warning."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Give the numbers to each; texts stay in `metrics.jsonl`."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if value is not None and not isinstance(value, str)
        }
        for sink in list(self._sinks):
            self._guard(sink, partial(sink.write, step, numbers))

    def close(self) -> None:
        """Close each."""
        for sink in list(self._sinks):
            self._guard(sink, sink.close)
        self._sinks.clear()

    def _guard(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._sinks.remove(sink)
            name = type(sink).__name__
            text = f"{name} failed and gets no more metrics: {error!r}; metrics.jsonl has them all"
            warnings.warn(text, RunWarning, stacklevel=4)


SINKS: Mapping[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def open_sinks(names: Iterable[str], run: Path, config: Mapping[str, Any] | None = None) -> Sinks:
    """Open sinks for one run; a missing extra is one line that says how to get it.

    Args:
        names: of the sinks: `tensorboard`, `wandb`, `trackio`.
        run: the directory of the run.
        config: of the run, which some sinks show.
    """
    return Sinks([SINKS[check_choice("sink", name, SINKS)](run, config or {}) for name in names])


def require_sinks(names: Iterable[str]) -> None:
    """Raise now, before anything is created, what `open_sinks` would raise for want of an extra."""
    modules = {"tensorboard": "tensorboard.summary.writer.event_file_writer"}
    for name in names:
        check_choice("sink", name, SINKS)
        import_extra(modules.get(name, name), name)


def _title(run: Path) -> str:
    return f"{run.parent.name}/{run.name}"
