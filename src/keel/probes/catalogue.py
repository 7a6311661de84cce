"""The probes: what each isolates, and what its failure means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.probes.decisions import END, Decisions

Judged = Literal["value", "explained", "actions", "agents", "tokens"]
"""What is looked at: the critic's mean value, its explained variance, the likeliest actions."""

TWO = ((-1.0,), (1.0,))
DECISIONS: dict[str, Decisions] = {
    "constant": Decisions(seen=((0.0,),), reward=((1.0, 1.0),), then=((END, END),)),
    "observation": Decisions(
        seen=TWO, reward=((-1.0, -1.0), (1.0, 1.0)), then=((END, END), (END, END)), starts=(0, 1)
    ),
    "discount": Decisions(seen=TWO, reward=((0.0, 0.0), (1.0, 1.0)), then=((1, 1), (END, END))),
    "action": Decisions(seen=((0.0,),), reward=((-1.0, 1.0),), then=((END, END),)),
    "observation-action": Decisions(
        seen=TWO, reward=((1.0, -1.0), (-1.0, 1.0)), then=((END, END), (END, END)), starts=(0, 1)
    ),
    "delay": Decisions(
        seen=((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)),
        reward=((0.0, 0.5), (1.0, 1.0), (0.0, 0.0)),
        then=((1, 2), (END, END), (END, END)),
    ),
    "mask": Decisions(
        seen=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        reward=((0.0, 0.3, 1.0, 9.0), (1.0, 9.0, 0.0, 0.3), (9.0, 0.3, 0.0, 1.0)),
        then=((END,) * 4,) * 3,
        starts=(0, 1, 2),
        legal=(
            (True, True, True, False),
            (True, False, True, True),
            (False, True, True, True),
        ),
    ),
    "truncation": Decisions(seen=((0.0,),), reward=((0.1, 0.5),), then=((0, END),), time_limit=1),
    "termination": Decisions(
        seen=TWO, reward=((0.6, 0.0), (1.0, 1.0)), then=((END, 1), (END, END))
    ),
}
"""The processes by name.

`truncation`: to stay pays 0.1 a step for ever, and the time limit is one step; to leave pays 0.5
once. Who takes the limit for an end leaves. `termination`: an end with 0.6, or one with 1 a step
later; who values what comes after an end counts rewards per step, and takes the 0.6.
"""


@dataclass(frozen=True)
class Probe:
    """One experiment."""

    name: str
    isolates: str
    """what can be wrong where it alone fails"""
    failure: str
    """what a failure means, and where to look"""
    judged: Judged = "actions"
    gamma: float = 0.99
    steps: int = 8_192
    settings: Mapping[str, Any] = field(default_factory=dict)
    """further settings of Keel's run, nested"""


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe(
            "constant",
            "the critic's loss and optimizer: one step, reward 1, nothing to see",
            "the critic cannot learn a constant: its loss, its target or its optimizer is wrong",
            judged="value",
        ),
        Probe(
            "observation",
            "the way from the observation to the value: one step, the reward is what is seen",
            "the critic learns a constant but not a function of the observation: its input, its "
            "normalization or the gradient into its first layer is wrong",
            judged="explained",
        ),
        Probe(
            "discount",
            "discounting and bootstrapping: two steps, reward 1 at the end, γ = 0.5",
            "values are not discounted, or do not bootstrap from the next state",
            judged="value",
            gamma=0.5,
        ),
        Probe(
            "action",
            "the policy's gradient: two actions, one pays 1 and one −1",
            "the policy does not follow the advantage: its sign, its log-prob or its optimizer is "
            "wrong",
        ),
        Probe(
            "observation-action",
            "both at once: the action that pays depends on what is seen",
            "each works alone and not together: observations and actions are paired wrongly, as "
            "where a batch is shuffled or reshaped on one side only",
        ),
        Probe(
            "delay",
            "credit over time: 0.5 now, or 1 a step later",
            "the later reward does not reach the earlier action: λ, the order of time in "
            "advantages, or episodes that are cut between them",
        ),
        Probe(
            "mask",
            "the action mask: an illegal action raises, and would pay most",
            "the mask is not in the distribution in sampling, or not the same in training",
        ),
        Probe(
            "truncation",
            "time limits: to stay is better, but only for who knows that it goes on",
            "truncated episodes are treated as terminated ones: V of the final observation belongs "
            "into their targets",
            gamma=0.99,
            steps=16_384,
        ),
        Probe(
            "termination",
            "ends of episodes: nothing comes after them",
            "terminated episodes are bootstrapped, from the first observation of the next one",
        ),
        Probe(
            "agents",
            "several agents: one must do what it sees, the other the opposite",
            "an agent acts or learns by another one's observation, network, reward or advantage",
            judged="agents",
        ),
        Probe(
            "tokens",
            "tokens: after each of two prompts one of two tokens is right",
            "prompt, completion and reward are not paired, or the completion's mask is shifted",
            judged="tokens",
        ),
    )
}
"""Every probe, in the order to read their results in: an earlier failure explains later ones."""
