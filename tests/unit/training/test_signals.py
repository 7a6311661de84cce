"""Stopping on request, inside one process."""

from __future__ import annotations

import signal

import pytest

from keel.training.signals import StopRequest, graceful_stop

pytestmark = pytest.mark.usefixtures("sigint")


def test_nothing_is_requested_while_nothing_arrives():
    with graceful_stop() as stop:
        assert stop.requested is None
        assert stop.exit_code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_becomes_a_request(number, code):
    with graceful_stop() as stop:
        signal.raise_signal(number)
        assert stop.requested is number
        assert stop.exit_code == code


def test_the_first_request_counts():
    with graceful_stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stop.requested is signal.SIGTERM


def test_the_second_interrupt_is_immediate():
    with graceful_stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with graceful_stop() as stop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert stop.requested is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_blocks_nest():
    with graceful_stop() as outer:
        with graceful_stop() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (None, signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert outer.requested is signal.SIGTERM


def test_a_request_can_be_made_without_a_signal():
    stop = StopRequest()
    stop.receive(signal.SIGTERM)
    assert stop.exit_code == 143
