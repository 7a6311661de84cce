"""Success rates on the page of language models: intervals over prompts and seeds."""

from __future__ import annotations

import json

import pytest

from benchmarks import language


def test_one_seed_has_wilsons_interval() -> None:
    """8 of 10: (0.8 + z²/20 ± …) / (1 + z²/10) with z² = 3.8415."""
    assert language.share([0.8], 10) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)


def test_several_seeds_have_students_interval_of_their_rates() -> None:
    """0.5, 0.6, 0.7: 0.6 ± 4.303 · 0.1/√3; Wilson's of 1,000 prompts is narrower."""
    assert language.share([0.5, 0.6, 0.7], 1_000) == pytest.approx((0.6, 0.3516, 0.8484), abs=1e-4)


def test_seeds_that_agree_keep_the_doubt_of_their_prompts() -> None:
    """All seeds solve all of the same 200 prompts: 1/(1 + z²/200) is the low end, not 1."""
    assert language.share([1.0, 1.0, 1.0], 200) == pytest.approx((1.0, 0.98115, 1.0), abs=1e-5)


def test_no_interval_leaves_what_a_rate_can_be() -> None:
    _, low, high = language.share([0.0, 0.1, 0.0], 20)
    assert (low, high < 1.0) == (0.0, True)
    assert language.share([0.97, 0.975, 0.99], 200)[2] == 1.0


@pytest.mark.parametrize("name", ["tasks.md", "controller.md", "hacking.md"])
def test_the_tables_are_what_the_figures_say(name: str) -> None:
    told = language.tables(json.loads(language.DATA.read_text(encoding="utf-8")))[name]
    assert (language.FOLDER / name).read_text(encoding="utf-8") == "\n".join(told) + "\n"


def test_imitation_of_other_seeds_stands_beside_fresh_ones_and_says_so() -> None:
    old = {"seed-0": {"rl": {"success": 0.8}, "control": {"success": 0.5}}}
    fresh = {f"seed-{seed}": {"rl": {"success": 0.9}} for seed in range(100, 105)}
    imitation, beyond = language._beside_imitation(fresh, old | fresh, 100)
    assert imitation == "0.500 (0.404 to 0.596); seed 0"
    assert beyond == "0.300; seed 0"
    both = {name: run | {"control": {"success": 0.6}} for name, run in fresh.items()}
    _, beyond = language._beside_imitation(both, old | both, 100)
    assert beyond == "0.300 (0.300 to 0.300)"


def test_fresh_seeds_are_reported_once_there_are_enough() -> None:
    old = {f"seed-{seed}": {} for seed in (0, 1, 2)}
    fresh = {f"seed-{seed}": {} for seed in range(100, 105)}
    few = dict(list(fresh.items())[:4])
    told = language.reported({"a": {**old, **few}, "b": {**old, **fresh}, "c": few})
    assert told == {"a": old, "b": fresh, "c": few}
