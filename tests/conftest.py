"""Settings shared by all tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
from children import children, interruptible
from hypothesis import HealthCheck, settings

from keel.resources import set_threads

settings.register_profile(
    "keel",
    deadline=None,  # a shared machine has pauses that no test caused
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "keel"))


@pytest.fixture(autouse=True, scope="session")
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what tests measure, and which code they trust, out of the user's own folders."""
    os.environ["KEEL_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["KEEL_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="module")
def _no_process_left() -> Iterator[None]:
    """Fail a module whose tests leave a worker process behind; close environments in a fixture."""
    yield
    gc.collect()  # environments that nothing refers to any more close themselves
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
    assert not left, f"these processes outlived the tests of their module: {left}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread, whatever a run before has set: tensors are small, and pytest-xdist already uses
    both cores. And torch's inductor builds C++: where there is no compiler, its tests have nothing
    to run on."""
    set_threads(1)
    needs = "inductor" in item.name or item.get_closest_marker("compiler") is not None
    if needs and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler")


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that handle signals as usual and end with the test, whatever happens."""
    with children() as start:
        yield start


@pytest.fixture
def sigint() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt here, also where the suite was started without it."""
    with interruptible():
        yield
