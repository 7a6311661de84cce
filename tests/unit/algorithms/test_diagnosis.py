"""Causes of a wrong replay by hand: an agent whose logits are its observations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.distributions.actions import Categorical, Gaussian
from keel.trust_region.diagnosis import Replay, cause
from keel.types import MASK

ROWS = 100
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(ROWS, 4, generator=GENERATOR)
ACTION = torch.randint(4, (ROWS,), generator=GENERATOR)


def policy(params: Tensor, obs: dict[str, Tensor], temperature: float = 1.0) -> dict[str, Tensor]:
    logits = obs["obs"] / temperature
    if MASK in obs:
        logits = logits.masked_fill(~obs[MASK], -torch.inf)
    return {"logits": logits}


def named(logits: Tensor, stored: Tensor, **changes: Any) -> str:
    """The cause where these logits are replayed, and others' log-probs were stored."""
    agent: Any = SimpleNamespace(groups=1, dist=Categorical(4), policy=policy)
    replay = Replay(
        agent,
        torch.zeros(1, 1),
        {"obs": logits},
        behavior={"logits": logits},
        action=ACTION,
        stored=stored,
        wrong=torch.ones(ROWS, dtype=torch.bool),
        temperature=1.0,
    )
    return cause(replay._replace(**changes))


def taken(log_p: Tensor, action: Tensor = ACTION) -> Tensor:
    return log_p.gather(-1, action[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.02, 0.3, 50.0])
def test_log_probs_of_a_temperature_from_a_fiftieth_to_fifty_are_named(temperature: float) -> None:
    """Logits T·x at a temperature of T are x."""
    message = named(temperature * LOGITS, taken(LOGITS.log_softmax(-1)))
    assert f"the log-probs are of a temperature of {temperature:g}," in message


@pytest.mark.parametrize("temperature", [0.0194, 51.0])
def test_log_probs_of_a_temperature_beyond_are_not(temperature: float) -> None:
    message = named(temperature * LOGITS, taken(LOGITS.log_softmax(-1)))
    assert message.startswith("Cause: unknown. The distributions are those that sampled")


@pytest.mark.parametrize(("strange", "is_named"), [(0, True), (1, False)])
def test_nearly_all_rows_must_have_another_actions_log_prob(strange: int, is_named: bool) -> None:
    """99 of 100 rows are not more than 99 %: one log-prob of 0 is that of no action."""
    stored = taken(LOGITS.log_softmax(-1), (ACTION + 1) % 4)
    stored[:strange] = 0.0
    message = named(LOGITS, stored)
    assert ("on 100% of the rows the log-prob is another action's" in message) == is_named
    assert ("Cause: unknown" in message) != is_named


def test_a_mixture_is_named_from_log_probs_with_three_digits() -> None:
    """0.7·π + 0.3/4; rounded to three digits a probability is off by up to 5e-4, which is more of
    a share where π is near ¼. What counts is the distance of probabilities."""
    mixed = 0.7 * taken(LOGITS.softmax(-1)) + 0.3 / 4
    stored = ((1000 * mixed).round() / 1000).log()
    assert "a mixture with 0.3 of uniformly random actions" in named(LOGITS, stored)


def test_the_share_of_rows_with_another_mask() -> None:
    """60 of 100 rows had all four actions, and now have three."""
    mask = torch.ones(ROWS, 4, dtype=torch.bool)
    mask[:60].scatter_(-1, ((ACTION[:60] + 1) % 4)[:, None], False)
    message = named(
        LOGITS,
        taken(LOGITS.log_softmax(-1)),
        obs={"obs": LOGITS, MASK: mask},
        wrong=torch.arange(ROWS) < 60,
    )
    assert "mask_drift: on 60% of the rows other actions are legal now" in message


def test_a_temperature_is_found_whatever_is_added_to_all_logits_of_a_row() -> None:
    """Stored as log-probs at a temperature of 2: softmax sees no difference."""
    behavior = {"logits": (LOGITS / 2.0).log_softmax(-1)}
    message = named(LOGITS, taken(behavior["logits"]), behavior=behavior)
    assert "temperature: the actions were drawn at 2, the update replays them at 1." in message


def test_logits_without_a_difference_have_no_temperature() -> None:
    """All actions are alike in the replay: no temperature makes of that what was stored."""
    behavior = {"logits": LOGITS}
    message = named(0.0 * LOGITS, taken(LOGITS.log_softmax(-1)), behavior=behavior)
    assert message.startswith("Cause: unknown. Look for another network")


@pytest.mark.parametrize(("uneven", "is_named"), [(0.0, True), (0.1, False)])
def test_gaussians_drawn_at_another_temperature(uneven: float, is_named: bool) -> None:
    """A temperature multiplies variances: log σ is larger by ½·log 4 = log 2 in both dimensions."""
    mean = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(1))
    log_std = torch.tensor([-1.0, 0.5]).expand(ROWS, 2)
    wider = log_std + torch.tensor([2.0, 2.0 + uneven]).log()
    dist = Gaussian(2)

    def replayed(*_: Any) -> dict[str, Tensor]:
        return {"mean": mean, "log_std": log_std}

    behavior = {"mean": mean, "log_std": wider}
    agent: Any = SimpleNamespace(groups=1, dist=dist, policy=replayed)
    message = named(
        LOGITS, dist.log_prob(behavior, mean), agent=agent, behavior=behavior, action=mean
    )
    assert ("the actions were drawn at 4, the update replays them at 1." in message) == is_named


@pytest.mark.parametrize(("strange", "is_named"), [(0, True), (1, False)])
def test_nearly_all_rows_must_be_another_agents(strange: int, is_named: bool) -> None:
    """Two agents; what the second one's network took is replayed by the first one's."""
    logits = torch.stack([LOGITS, LOGITS.flip(0)], 1)

    def policies(params: Tensor, *_: Any) -> dict[str, Tensor]:
        rows = params[:, 0].long()
        return {"logits": logits[:, rows]}

    params = torch.tensor([[0.0], [1.0]])
    action = torch.stack([ACTION, ACTION], 1)
    behavior = policies(torch.tensor([[1.0], [1.0]]))
    dist = Categorical(4)
    stored = dist.log_prob(behavior, action)
    stored[:strange, 0] = 0.0
    wrong = torch.ones(ROWS, 2, dtype=torch.bool) & torch.tensor([True, False])
    agent: Any = SimpleNamespace(
        groups=2, dist=dist, policy=policies, row_names=("red", "blue"), members=(0, 1)
    )
    agent.each_its_own = lambda: agent
    replay = Replay(agent, params, {}, behavior, action, stored, wrong, 1.0)
    assert ("wrong_actor: " in cause(replay)) == is_named
    assert ("blue's by red's" in cause(replay)) == is_named
