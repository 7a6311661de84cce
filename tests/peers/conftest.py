"""Tests beside real trainers, in the environment of the peers: `make test-peers`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.doctor_corpus.making import Worker
from benchmarks.doctor_corpus.table import Job, Setup

PEERS = os.environ.get("KEEL_PEERS", "")
"""Python of the environment in which Stable-Baselines3 and TRL are installed."""
Train = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not PEERS:
        skip = pytest.mark.skip(reason="needs the environment of the peers: make test-peers")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def peers() -> str:
    return PEERS


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Train with a peer as the corpus does; returns the folder of the run."""
    workers: dict[str, Worker] = {}

    def run(trainer: str, env: str, steps: int, settings: Any = None, **inject: Any) -> Path:
        if trainer not in workers:
            workers[trainer] = Worker(trainer, PEERS)
        setup = Setup("test", trainer, env, steps, settings or {}, tuple(inject.items()))
        folder = tmp_path_factory.mktemp(trainer)
        outcome = workers[trainer].make(Job("test", setup, 0), folder)
        assert outcome["status"] == 0, (folder / "output.txt").read_text()[-2000:]
        return folder

    yield run
    for worker in workers.values():
        worker.close()
