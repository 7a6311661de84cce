"""Pieces of a pass abreast: in order, as the caller's thread would, and without a trace."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest
import torch

from keel.resources import parallel_map, set_threads, threads


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_pieces(workers: int) -> None:
    assert parallel_map(lambda x: x * x, list(range(7)), workers) == [x * x for x in range(7)]


def test_pieces_are_taken_at_the_same_time() -> None:
    meet = threading.Barrier(2, timeout=20.0)  # a single thread would wait for ever
    parallel_map(lambda _: meet.wait(), [0, 1], 2)


@pytest.mark.parametrize("learning", [True, False])
def test_whether_gradients_are_kept_is_the_callers_choice(learning: bool) -> None:
    with torch.set_grad_enabled(learning):
        seen = parallel_map(lambda _: torch.is_grad_enabled(), [0, 1], 2)
    assert seen == [learning, learning]


def test_each_computes_alone_and_the_caller_as_before() -> None:
    torch.set_num_threads(3)
    assert parallel_map(lambda _: torch.get_num_threads(), [0, 1, 2, 3], 4) == [1, 1, 1, 1]
    assert torch.get_num_threads() == 3


def test_an_error_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda x: 1 // x, [1, 0], 2)


def test_there_are_as_many_threads_as_torch_has_and_no_threads_of_threads() -> None:
    set_threads(3)
    assert (threads(), torch.get_num_threads()) == (3, 3)
    assert parallel_map(lambda _: threads(), [0, 1], 2) == [1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_that_was_forked_does_not_wait_for_threads_of_its_parent() -> None:
    set_threads(2)
    parallel_map(lambda x: x, [0, 1], 2)

    def work() -> None:
        assert threads() == 1
        parallel_map(lambda x: x, [0, 1], 2)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(20.0)
    code = child.exitcode
    child.kill()
    assert code == 0
