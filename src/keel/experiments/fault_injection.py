"""Deliberate bugs, to measure what each does, and to see it detected.

They are wrapped around what a run is made of; nothing of the core knows them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.optimizer import BETAS, Minibatch, Step, StepResult
from keel.algorithms.trpo import Problem
from keel.config import Faults
from keel.distributions.actions import Categorical
from keel.envs import Envs, ObsNormalizer
from keel.envs import Step as EnvStep
from keel.errors import InputError
from keel.experience.rollout import Collector, Rollout
from keel.functional.advantage import Advantages, gae
from keel.networks.agent import Agent
from keel.trust_region.certify import Algorithm
from keel.types import HPARAM_INDEX, MASK, OptimizerState

if TYPE_CHECKING:
    from keel.training.environments import EnvironmentSource

T = TypeVar("T")
INTERLEAVED = "keel.experiments.fault_injection:interleaved"


def inject(
    faults: Faults,
    make_algorithm: Callable[[Agent], tuple[Algorithm, T]],
    make_source: Callable[[], EnvironmentSource],
) -> tuple[Callable[[Agent], tuple[Algorithm, T]], Callable[[], EnvironmentSource]]:
    """Return functions that make a run's algorithm and source with faults.

    Args:
        faults: Faults to inject.
        make_algorithm: from the agent that learns to the algorithm, and what else is told of it.
        make_source: makes the source of experience.
    """

    def make_faulty_algorithm(agent: Agent) -> tuple[Algorithm, T]:
        algorithm, told = make_algorithm(learner(agent, faults))
        return faulty_algorithm(algorithm, faults), told

    return make_faulty_algorithm, lambda: faulty_source(make_source(), faults)


def faulty_algorithm(algorithm: Algorithm, faults: Faults) -> Algorithm:
    """Return an algorithm with the faults of its steps, inside of whatever it is wrapped in."""
    own: Any = algorithm
    if hasattr(own, "algorithm"):
        wrapped: Algorithm = replace(own, algorithm=faulty_algorithm(own.algorithm, faults))
        return wrapped
    if faults.plain_descent:
        own = replace(own, step=without_adam(own.step))
    if faults.entropy_outside_acceptance:
        own = replace(own, problem=EntropyOutsideAcceptance)
    return own  # type: ignore[no-any-return]


def faulty_source(source: EnvironmentSource, faults: Faults) -> EnvironmentSource:
    """Put the faults of collecting, replaying and estimating into a source."""
    source.transform = partial(broken, faults=faults)
    if faults.epsilon_greedy:
        source.collector = EpsilonGreedy(**vars(source.collector), epsilon=faults.epsilon_greedy)
    if faults.interleaved_gae:
        advantage = replace(source.config.advantage, estimator=INTERLEAVED)
        source.config = replace(source.config, advantage=advantage)
    return source


def broken(rollout: Rollout, faults: Faults) -> Rollout:
    """Return the rollout as a program with these faults would learn from it.

    Args:
        rollout: Rollout as it was sampled.
        faults: Faults to inject.
    """
    if faults.reward_gain != 1.0:
        rollout = replace(rollout, reward=rollout.reward * faults.reward_gain)
    if MASK not in rollout.obs:
        return rollout
    if faults.wrong_actor:
        rollout = _with_mask(rollout, torch.ones_like(rollout.obs[MASK]))
    elif faults.mask_drift:
        rollout = _with_mask(rollout, _drifted(rollout))
    return _among_first(rollout, faults.first_actions) if faults.first_actions else rollout


def _with_mask(rollout: Rollout, mask: Tensor) -> Rollout:
    return replace(rollout, obs=rollout.obs | {MASK: mask})


def _among_first(rollout: Rollout, count: int) -> Rollout:
    """Return the rollout as a program replays it that knows only the first legal actions.

    It takes an action beyond them for the last of them, as `logits[:5]` with `min(index, 4)` does.
    The log-prob stays that of the choice among all.

    Args:
        rollout: `[*lead]`, whose actions are legal under its mask `[*lead, A]`.
        count: number of legal actions that are left.
    """
    mask = rollout.obs[MASK].bool()
    rank = mask.cumsum(-1)
    first = mask & (rank <= count)
    action = rollout.action.long()[..., None]
    last = (first & (rank == rank.clamp(max=count).amax(-1, keepdim=True))).int().argmax(-1)
    action = torch.where(rank.gather(-1, action)[..., 0] > count, last, action[..., 0])
    return replace(
        _with_mask(rollout, first.to(rollout.obs[MASK].dtype)),
        action=action.to(rollout.action.dtype),
    )


def learner(agent: Agent, faults: Faults) -> Agent:
    """Return the agent as the update has it: with a wrong actor, the first's network for all."""
    if not faults.wrong_actor:
        return agent
    if agent.groups == 1:
        raise InputError("faults.wrong_actor: needs agents with networks of their own")
    confused = copy.copy(agent)
    confused.members = (0,) * len(agent.members)
    return confused


def _drifted(rollout: Rollout) -> Tensor:
    """Return the mask of the step after; actions stay legal, or they could not be evaluated."""
    last = rollout.last_obs[MASK]
    mask = torch.cat([rollout.obs[MASK][1:], last[None]]).clone()
    return mask.scatter(-1, rollout.action.long()[..., None], True)


def interleaved(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    *,
    gamma: float,
    lam: float,
    weight: Tensor,
) -> Advantages:
    """Compute GAE of `[T, N, A]` as if agents acted in turn in one episode `[T·A, N]`.

    Args:
        reward: `[T, N, A]`.
        value: `[T, N, A]`.
        last_value: Values of the last observations, `[N, A]`.
        terminated: bool `[T, N, A]`.
        truncated: bool `[T, N, A]`.
        final_value: Values of final observations, `[T, N, A]`.
        gamma: Discount factor.
        lam: λ of GAE.
        weight: 1.0 for rows that count, `[T, N, A]`.
    """
    agents = reward.shape[2]

    def line(x: Tensor) -> Tensor:
        return x.movedim(2, 1).flatten(0, 1)

    rows = line(value)
    following = torch.cat([rows[1:], last_value[None, :, 0]])
    # only the last agent of a step ends anything
    ends = (torch.arange(len(rows), device=rows.device) % agents == agents - 1)[:, None]
    over, cut = line(terminated) & ends, line(truncated) & ends
    advantages = gae(
        line(reward),
        rows,
        last_value[:, 0],
        over,
        cut,
        torch.where(over | cut, line(final_value), following),
        gamma=gamma,
        lam=lam,
        weight=line(weight),
    )

    def back(x: Tensor) -> Tensor:
        return x.reshape(-1, agents, x.shape[1]).movedim(1, 2)

    return Advantages(*map(back, advantages))


@dataclass
class EpsilonGreedy(Collector):
    """Collector that takes a share of its actions at random, unknown to their log-probs."""

    epsilon: float = 0.0

    def collect(
        self, params: Tensor, temperature: float, normalizer: ObsNormalizer | None
    ) -> Rollout:
        """Take `steps` steps; actions are those taken, log-probs those of the actions meant."""
        envs = self.envs
        self.envs = straying = _Straying(envs, self)
        try:
            rollout = super().collect(params, temperature, normalizer)
        finally:
            self.envs = envs
        return replace(rollout, action=torch.from_numpy(np.stack(straying.actions)))


class _Straying:
    """Environments that are given other actions than the policy meant."""

    def __init__(self, envs: Envs, collector: EpsilonGreedy) -> None:
        self.envs, self.collector = envs, collector
        self.actions: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)

    def step(self, action: np.ndarray) -> EnvStep:
        """Replace a share of Discrete actions by draws from all that are legal, and step."""
        collector = self.collector
        if not isinstance(collector.agent.dist, Categorical):
            raise InputError("faults.epsilon_greedy: needs Discrete actions")
        mask = collector.obs.get(MASK)
        noise = collector.rng.random((*action.shape, collector.agent.dist.n))
        drawn = (noise if mask is None else np.where(mask, noise, -1.0)).argmax(-1)
        strayed = np.where(collector.rng.random(action.shape) < collector.epsilon, drawn, action)
        self.actions.append(strayed)
        return self.envs.step(strayed)


class EntropyOutsideAcceptance(Problem):
    """Problem of TRPO whose step is aimed with the entropy bonus and accepted without."""

    def __post_init__(self) -> None:
        """Set up the same problem without entropy, which judges steps."""
        super().__post_init__()
        objective = replace(self.objective, entropy_bonus=False, entropy_floor=None)
        self._judge = Problem(self.agent, self.params, self.batch, self.hparams, objective)

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient with the entropy bonus, and the largest |log-ratio|."""
        self._judge.gradient()  # measures where the step begins
        return super().gradient()

    def evaluate(self, params: Tensor) -> tuple[float, float]:
        """Return (improvement without entropy, exact mean KL(old‖new))."""
        return self._judge.evaluate(params)


def without_adam(step: Step) -> Step:
    """Return a step along the clipped gradient itself, at the policy's learning rate.

    Adam's first moment after one step from 0 is (1 − β₁) times that gradient.

    Args:
        step: one step of Adam.
    """

    def descend(opt_state: OptimizerState, minibatch: Minibatch) -> StepResult:
        nothing = torch.zeros_like(opt_state.params)
        fresh = opt_state._replace(first=nothing, second=nothing.clone())
        result = step(fresh, minibatch)
        gradient = result.opt_state.first / (1.0 - BETAS[0])
        rate = minibatch.hparams[HPARAM_INDEX["learning_rate"]]
        params = opt_state.params - rate * gradient
        return result._replace(opt_state=result.opt_state._replace(params=params))

    return descend
