"""PopArt around an algorithm: the critic's units follow the returns of every rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keel.experience.batch import Experience
from keel.networks.popart import rescale_critic
from keel.trust_region.certify import Wrapper
from keel.trust_region.measure import group_moments
from keel.types import AlgorithmState, HyperParams, UpdateReport


@dataclass(frozen=True, eq=False)
class PopArt(Wrapper):
    """An algorithm after whose updates the critic's last layer is rescaled, so that its outputs
    stay what they are in units of reward (van Hasselt et al. 2016)."""

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Update, then follow the value targets of the rollout."""
        after, report = self.algorithm.update(state, experience, hparams)
        moments = group_moments(experience.batch.target, experience.batch)
        params = rescale_critic(self.agent, after.opt_state.params, *moments)
        return replace(after, opt_state=after.opt_state._replace(params=params)), report
