"""Normalization of observations and rewards, as immutable values.

The statistics are frozen while a rollout is collected and while it is learned from, and change only
where a new normalizer is asked for. So the replay of a rollout sees what its sampling saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from keel.envs.protocol import Obs
from keel.envs.spaces import is_image
from keel.errors import InputError, ShapeError
from keel.types import ENCODING, FIRST_ENCODING


class RunningMoments(NamedTuple):
    """Weight `[]`, mean `[*shape]` and sum of squared deviations `[*shape]`, float64.

    The numpy twin of `keel.functional.Moments`; a test holds them together.
    """

    weight: np.ndarray
    mean: np.ndarray
    deviations: np.ndarray

    @property
    def variance(self) -> np.ndarray:
        """Population variance; 1 before anything was seen, so that dividing is harmless."""
        if self.weight <= 0:
            return np.ones_like(self.mean)
        return np.asarray(self.deviations / self.weight)

    def absorb(self, batch: np.ndarray, weight: np.ndarray | None = None) -> RunningMoments:
        """Return the moments of all that was seen and of a batch.

        Args:
            batch: `[*lead, *shape]`.
            weight: `[*lead]`; rows of weight 0 do not count.
        """
        shape = self.mean.shape
        lead = batch.shape[: batch.ndim - len(shape)]
        if lead + shape != batch.shape or (weight is not None and weight.shape != lead):
            raise ShapeError(
                f"batch: expected [*lead, *{list(shape)}] with weight [*lead], got "
                f"{list(batch.shape)}" + ("" if weight is None else f" with {list(weight.shape)}")
            )
        rows = batch.reshape(-1, *shape)
        if weight is not None:
            rows = rows[weight.reshape(-1) > 0]
        rows = rows.astype(np.float64)
        amount = np.ones(len(rows)) if weight is None else weight[weight > 0].astype(np.float64)
        total = amount.sum()
        if total == 0:
            return self
        mean = np.tensordot(amount, rows, 1) / total
        deviations = np.tensordot(amount, (rows - mean) ** 2, 1)
        # two samples as one (Chan, Golub and LeVeque 1979)
        both = self.weight + total
        gap, share = mean - self.mean, total / both
        return RunningMoments(
            np.asarray(both),
            self.mean + gap * share,
            self.deviations + deviations + gap * gap * self.weight * share,
        )


def no_moments(shape: tuple[int, ...] = ()) -> RunningMoments:
    """Return the moments before the first batch."""
    return RunningMoments(np.zeros(()), np.zeros(shape), np.zeros(shape))


class Scaling(NamedTuple):
    """Offset and factor that normalize an observation, float32 each."""

    mean: np.ndarray
    inverse: np.ndarray
    """1 / standard deviation"""

    def towards(self, other: Scaling, share: float) -> Scaling:
        """Return the scaling after a share of the way to another; exactly the other one at 1."""
        if share == 1.0:
            return other
        return Scaling(*(a + np.float32(share) * (b - a) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, eq=False)
class ObsNormalizer:
    """(x − mean) / √(variance + ε), clipped, for every float32 vector; other keys pass unchanged.

    New statistics change the policy. So what was seen (`moments`) and what is in force (`scaling`)
    are apart: `absorb` adds to the first, `settle` moves the second towards it. Images, counted
    observations and masks have no entry in either.
    """

    moments: Mapping[str, RunningMoments]
    clip: float = 10.0
    epsilon: float = 1e-8
    scaling: Mapping[str, Scaling] = field(default_factory=dict)
    """of every key; by default that of `moments`"""

    def __post_init__(self) -> None:
        if not self.scaling:
            object.__setattr__(self, "scaling", self._measured())

    def _measured(self) -> dict[str, Scaling]:
        """Return the scaling of all that was seen."""
        return {
            key: Scaling(
                moment.mean.astype(np.float32),
                (1.0 / np.sqrt(moment.variance + self.epsilon)).astype(np.float32),
            )
            for key, moment in self.moments.items()
        }

    @classmethod
    def for_space(
        cls, space: gymnasium.Space[Any], clip: float = 10.0, encoding: int = ENCODING
    ) -> ObsNormalizer:
        """Return a normalizer that has seen nothing yet.

        Args:
            space: `envs.observation_space`.
            clip: largest absolute value of a normalized observation.
            encoding: encoding of observations; in the first one, images of floats are vectors.
        """
        images = encoding == FIRST_ENCODING
        fields = dict(space.items()) if isinstance(space, spaces.Dict) else {"obs": space}
        floats = {
            key: inner
            for key, inner in fields.items()
            if inner.dtype == np.float32 and (images or not is_image(inner))
        }
        return cls({key: no_moments(inner.shape or ()) for key, inner in floats.items()}, clip)

    def apply(self, obs: Obs) -> Obs:
        """Normalize observations; the input is untouched.

        Args:
            obs: `[*lead, *shape]` each, raw.
        """
        out = dict(obs)
        for key, (mean, inverse) in self.scaling.items():
            array = obs[key] - mean
            array *= inverse
            np.minimum(array, self.clip, out=array)
            np.maximum(array, -self.clip, out=array)
            out[key] = array
        return out

    def absorb(self, batch: Obs, weight: np.ndarray | None = None) -> ObsNormalizer:
        """Return a normalizer that has also seen a batch; it normalizes as before.

        Args:
            batch: Raw observations `[T, N, *shape]`, not normalized.
            weight: `[T, N]`, 0 for rows that do not count.
        """
        moments = {key: moment.absorb(batch[key], weight) for key, moment in self.moments.items()}
        return replace(self, moments=moments)

    def settle(self, share: float = 1.0) -> ObsNormalizer:
        """Move the scaling a share of the way to that of all observations seen so far.

        Args:
            share: from 0 (nothing changes) to 1 (all the way).
        """
        measured = self._measured()
        scaling = {key: old.towards(measured[key], share) for key, old in self.scaling.items()}
        return replace(self, scaling=scaling)

    def export(self) -> dict[str, np.ndarray]:
        """Return statistics (float64) and scaling (float32); `restore` is the inverse."""
        parts: dict[str, Mapping[str, np.ndarray]] = {
            key: {**moment._asdict(), **_scaling_arrays(self.scaling[key])}
            for key, moment in self.moments.items()
        }
        return {
            f"{key}.{name}": np.array(x) for key, part in parts.items() for name, x in part.items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> ObsNormalizer:
        """Return a normalizer like this one with the statistics and the scaling of `state`.

        Version 0.1 saved no scaling: there, that of the statistics was always in force.

        Args:
            state: as `export` returned it.
        """
        moments = {
            key: _restore_moments(moment, state, key) for key, moment in self.moments.items()
        }
        restored = replace(self, moments=moments, scaling={})
        if not any(f"{key}.{name}" in state for key in moments for name in SCALING):
            return restored
        return replace(
            restored,
            scaling={
                key: _restore_scaling(old, state, key) for key, old in restored.scaling.items()
            },
        )


@dataclass(frozen=True, eq=False)
class RewardNormalizer:
    """Rewards over the standard deviation of their discounted sum, so that returns are of size 1.

    With R ← γ R + r along an episode, the reward becomes r / √(Var R + ε). The mean is not
    subtracted: that would change which behavior is best.
    """

    total: np.ndarray
    """`[N]` float64: R of the episode that is under way."""
    moments: RunningMoments
    gamma: float = 0.99
    clip: float | None = 10.0
    epsilon: float = 1e-8

    @classmethod
    def for_envs(
        cls, lead: int | tuple[int, ...], gamma: float = 0.99, clip: float | None = 10.0
    ) -> RewardNormalizer:
        """Return a normalizer that has seen nothing yet.

        Args:
            lead: N environments, or (N, A) with A agents each; all have one scale.
            gamma: discount of the running sum.
            clip: largest absolute value of a normalized reward; None for no limit.
        """
        return cls(np.zeros(lead), no_moments(), gamma, clip)

    def apply_rollout(
        self, reward: np.ndarray, done: np.ndarray, weight: np.ndarray | None = None
    ) -> tuple[np.ndarray, RewardNormalizer]:
        """Normalize a whole rollout by one scale, which includes the rollout itself.

        Args:
            reward: `[T, N]`, raw.
            done: `[T, N]` bool: the episode ended with this row, in either way.
            weight: `[T, N]`: 0 for rows that do not count; they are as if they were not there.

        Returns:
            float32 `[T, N]` and the new state.
        """
        if reward.shape != done.shape or reward.shape[1:] != self.total.shape:
            raise ShapeError(
                f"reward: expected [T, {', '.join(map(str, self.total.shape))}] like done, got "
                f"{list(reward.shape)} "
                f"and {list(done.shape)}"
            )
        sums = np.empty(reward.shape, dtype=np.float64)
        total, counts = self.total, None if weight is None else weight > 0
        for row in range(len(reward)):
            running = total * self.gamma + reward[row]
            if counts is not None:
                running = np.where(counts[row], running, total)
            sums[row] = running
            ends = done[row] if counts is None else done[row] & counts[row]
            total = np.where(ends, 0.0, running)
        after = replace(self, total=total, moments=self.moments.absorb(sums, weight))
        return after.apply(reward), after

    def apply(self, reward: np.ndarray) -> np.ndarray:
        """Normalize rewards by the present scale; float32.

        Args:
            reward: of any shape, raw.
        """
        scaled = reward / np.sqrt(self.moments.variance + self.epsilon)
        if self.clip is not None:
            scaled = np.clip(scaled, -self.clip, self.clip)
        return np.asarray(scaled, np.float32)

    def export(self) -> dict[str, np.ndarray]:
        """Return the state as float64 arrays; `restore` is the inverse."""
        moments = {name: np.array(value) for name, value in self.moments._asdict().items()}
        return {"total": self.total.copy(), **{f"return.{k}": v for k, v in moments.items()}}

    def restore(self, state: Mapping[str, np.ndarray]) -> RewardNormalizer:
        """Return a normalizer like this one with the statistics of `state`.

        Args:
            state: as `export` returned it.
        """
        total = np.array(state["total"], dtype=np.float64)
        if total.shape != self.total.shape:
            raise InputError(f"total: expected {list(self.total.shape)}, got {list(total.shape)}")
        return replace(self, total=total, moments=_restore_moments(self.moments, state, "return"))


SCALING = ("scaling_mean", "scaling_inverse")


def _scaling_arrays(scaling: Scaling) -> dict[str, np.ndarray]:
    return dict(zip(SCALING, scaling, strict=True))


def _restore_scaling(template: Scaling, state: Mapping[str, np.ndarray], key: str) -> Scaling:
    names = [f"{key}.{name}" for name in SCALING]
    missing = [name for name in names if name not in state]
    if missing:
        raise InputError(f"the state of a normalizer lacks {', '.join(missing)}")
    saved = Scaling(*(np.array(state[name], dtype=np.float32) for name in names))
    if saved.mean.shape != template.mean.shape or saved.inverse.shape != template.mean.shape:
        raise InputError(
            f"{key}: expected a scaling of shape {list(template.mean.shape)}, "
            f"got {list(saved.mean.shape)} and {list(saved.inverse.shape)}"
        )
    return saved


def _restore_moments(
    template: RunningMoments, state: Mapping[str, np.ndarray], key: str
) -> RunningMoments:
    names = [f"{key}.{name}" for name in template._fields]
    missing = [name for name in names if name not in state]
    if missing:
        raise InputError(f"the state of a normalizer lacks {', '.join(missing)}")
    saved = RunningMoments(*(np.array(state[name], dtype=np.float64) for name in names))
    if saved.mean.shape != template.mean.shape:
        raise InputError(
            f"{key}: expected statistics of shape {list(template.mean.shape)}, "
            f"got {list(saved.mean.shape)}"
        )
    return saved
