"""PopArt around an algorithm: the critic's units follow the returns of every rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keel.experience.batch import Experience
from keel.losses.ppo import Objective
from keel.losses.token import TokenObjective
from keel.networks.agent import Agent
from keel.networks.popart import rescale_critic
from keel.trust_region.certify import Algorithm
from keel.trust_region.measure import group_moments
from keel.types import AlgorithmState, HyperParams, OptimizerState, UpdateReport


@dataclass(frozen=True, eq=False)
class PopArt:
    """An algorithm after whose updates the critic's last layer is rescaled, so that its outputs
    stay what they are in units of reward (van Hasselt et al. 2016)."""

    algorithm: Algorithm

    @property
    def agent(self) -> Agent:
        """The algorithm's own agent."""
        return self.algorithm.agent

    @property
    def objective(self) -> Objective | TokenObjective:
        """The algorithm's own objective."""
        return self.algorithm.objective

    def init(self) -> OptimizerState:
        """Return the algorithm's own state."""
        return self.algorithm.init()

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Update, then follow the value targets of the rollout."""
        after, report = self.algorithm.update(state, experience, hparams)
        moments = group_moments(experience.batch.target, experience.batch)
        params = rescale_critic(self.agent, after.opt_state.params, *moments)
        return replace(after, opt_state=after.opt_state._replace(params=params)), report
