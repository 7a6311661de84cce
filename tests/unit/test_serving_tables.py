"""What the tables of the routing pages stand on: new traces, and variants of the collapse."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fresh_traces, router_collapse
from benchmarks.fresh_traces import day_and_night, families, with_tails
from keel.apps.serving import Synthetic, held_out, synthesize
from keel.config import check


def test_a_day_moves_arrivals_to_its_busy_hours() -> None:
    """Half of all requests come before 1/2 at an even rate; with a swing of 0.5 the day's first
    half gets 1/2 + 0.5/π = 0.659 of them."""
    even = np.linspace(0.0, 100.0, 100_001)
    warped = day_and_night(even, 0.5, 1)
    assert (np.diff(warped) > 0.0).all()
    assert (warped[0], warped[-1]) == (0.0, pytest.approx(100.0))
    assert (warped < 50.0).mean() == pytest.approx(0.5 + 0.5 / np.pi, abs=1e-3)
    np.testing.assert_allclose(day_and_night(even, 0.0, 2), even, atol=1e-9)


def test_tails_are_on_their_share_and_arrivals_make_room_for_them() -> None:
    workload = synthesize(Synthetic(count=4_000, rate=2.0, shared=4), 1)
    longer = with_tails(workload, 0.25, 1.5, np.random.default_rng(0))
    added = longer.prompt - workload.prompt
    assert (added > 0).mean() == pytest.approx(0.25, abs=0.03)
    assert added[added > 0].min() >= 1_000
    assert added.max() <= fresh_traces.LONGEST
    tokens = [(x.prompt + x.output).sum() / x.arrival[-1] for x in (workload, longer)]
    assert tokens[0] == pytest.approx(tokens[1])
    np.testing.assert_array_equal(longer.hashes, workload.hashes)


def test_families_are_drawn_by_the_hash_and_share_no_seed() -> None:
    drawn, again = families(50), families(50)
    seeds = [seed for family in drawn.values() for seed in family.seeds(20)]
    assert len(set(seeds)) == 60
    assert not set(seeds) & set(held_out(1_000))
    assert min(seeds) > held_out(1)[0]  # never trained on
    for name, family in drawn.items():
        assert family.setting == again[name].setting
        scenes = [x.draw(x.setting, x.seeds(1)[0]) for x in (family, again[name])]
        np.testing.assert_array_equal(scenes[0].workload.arrival, scenes[1].workload.arrival)
        assert len(scenes[0].workload) == 50
        assert (np.diff(scenes[0].workload.arrival) >= 0.0).all()
    failing = drawn["failures"]
    strikes = failing.draw(failing.setting, failing.seeds(1)[0]).conditions.failures
    assert [back for _, _, back in strikes] == [False, True]


def test_the_preset_is_the_frozen_one_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_traces, "FROZEN_SETTINGS", "0" * 64)
    with pytest.raises(SystemExit, match="new to that preset only"):
        fresh_traces.check_frozen()


@pytest.mark.parametrize("name", [*router_collapse.VARIANTS, *router_collapse.EXPLORATION])
def test_every_variant_is_a_configuration(name: str) -> None:
    variant = (router_collapse.VARIANTS | router_collapse.EXPLORATION)[name]
    config = router_collapse.configure(variant, 100)
    check(config)
    assert config.seed == 100


def test_intervals_by_hand() -> None:
    """Mean 3, deviation √2.5, 5 seeds: ±2.776 · √0.5 = ±1.963."""
    mean, low, high = router_collapse.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - 1.963, 3.0 + 1.963), abs=1e-3)
