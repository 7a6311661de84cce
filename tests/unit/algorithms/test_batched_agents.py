"""Independent agents in one batched pass learn what they learn one by one."""

from __future__ import annotations

import torch

from benchmarks.agents import Sides


def test_a_batched_step_is_the_steps_of_all_agents() -> None:
    sides = Sides(3, minibatch=32)
    together, alone = sides.batched(), sides.loop()
    assert len(alone) == 3
    for a, single in enumerate(alone):
        for ours, theirs in zip(together.opt_state, single.opt_state, strict=True):
            torch.testing.assert_close(ours[a : a + 1], theirs, rtol=1e-4, atol=1e-6)
        assert not torch.equal(single.opt_state.params, sides.opt_state.params[a : a + 1])
        for ours, theirs in zip(together.statistics, single.statistics, strict=True):
            torch.testing.assert_close(ours[a : a + 1], theirs, rtol=1e-4, atol=1e-6)
