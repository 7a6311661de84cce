"""Experience from environments: rollouts, their targets, and what is normalized on the way."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from keel.config import Config, options
from keel.envs import Envs, make_envs
from keel.envs.names import POOL, atari_game
from keel.envs.space_data import Interface, describe_spaces
from keel.experience.batch import Batch, Experience, Sampled, TargetFunction, Targets
from keel.experience.rollout import Collector, Rollout
from keel.experience.targets import compute_targets
from keel.networks.agent import Agent
from keel.registry import import_function
from keel.training.checkpoint import Checkpoint, check_same, check_shapes
from keel.training.loop import Seeds, TrainState, arrays, prefixed
from keel.training.shift import Shift, shift
from keel.types import MASK, HyperParams, UpdateReport

if TYPE_CHECKING:
    from keel.envs import AtariOptions, ObsNormalizer, RewardNormalizer
    from keel.experience.demos import DemoDataset
    from keel.training.source import Metrics, ProgressCallback, Saved

WINDOW = 100
"""Episodes over which the training return is averaged."""
EVALUATION_ENVS = 10
INTERFACE = "interface"
"""Key in a checkpoint of the spaces and agents of its environment, which need not be made."""
SAVED_STARTS = "starts"
"""Key in a checkpoint of the environments that begin an episode, for recurrent networks."""


class ResumeWarning(UserWarning):
    """Something of an interrupted run could not be restored exactly."""


@dataclass
class EnvironmentSource:
    """Environments, the place they stand at, and what a rollout goes through before an update."""

    config: Config
    seeds: Seeds
    envs: Envs
    agent: Agent
    collector: Collector
    shuffle: torch.Generator
    """of demonstrations, and of returns that a distributional critic samples"""
    device: torch.device
    encoding: int
    """how observations become numbers"""
    obs_normalizer: ObsNormalizer | None
    reward_normalizer: RewardNormalizer | None
    demo_dataset: DemoDataset | None = None
    temperature: float = 1.0
    """at which the next rollout is sampled; `HyperParams.temperature` is where it goes"""
    returns: tuple[float, ...] = ()
    """the last episodes' raw returns, at most `WINDOW`"""
    lengths: tuple[int, ...] = ()
    score: str = "eval/return_mean"
    transform: Callable[[Rollout], Rollout] | None = None
    """applied to rollouts before they are learned from"""
    _evaluators: Envs | None = None

    def prepare(self, state: TrainState, on_progress: ProgressCallback | None) -> TrainState:
        """Return the state as it is: training begins at once."""
        return state

    def collect(self, params: Tensor, hparams: HyperParams) -> Experience:
        """Roll out, move what is not a parameter within its share of the bound, compute targets."""
        started = time.perf_counter()
        rollout = self.collector.collect(params, self.temperature, self.obs_normalizer)
        rollout = self._with_rewards(rollout)
        sampled = time.perf_counter()
        enforced = self.config.region.certify
        moved = shift(
            self.agent,
            params,
            rollout,
            self.obs_normalizer,
            hparams.temperature,
            hparams.max_kl if enforced else math.inf,
        )
        self.obs_normalizer, self.temperature = moved.normalizer, moved.temperature
        learned = self._learned(moved.rollout)
        batch = learned.batch()
        if moved.changed:
            before = self._learned(rollout).batch()
            batch = batch._replace(sampled=Sampled(before.obs, rollout.temperature))
        batch, demo_metrics = self._with_demos(batch, params)
        known = rollout.value if not moved.changed else None  # the critic sees new statistics, too
        targets, target_metrics = self._targets(
            learned, params, None if known is None else known.to(self.device)
        )
        self._count(rollout)
        return Experience(
            batch=batch._replace(
                advantage=targets.advantage, target=targets.target, old_value=targets.raw
            ),
            targets=self._later_targets(learned),
            agents=rollout.agents,
            temperature=moved.temperature,
            metrics={
                **self._episode_metrics(rollout),
                **_action_share(rollout),
                **target_metrics,
                **demo_metrics,
                **_agent_returns(rollout),
                **moved.metrics,
                "train/temperature": rollout.temperature,
                "train/temp_is_pulsing": float(rollout.temperature > 1.0),
            },
            signals=_signals(rollout, moved),
            seconds=sampled - started,
        )

    def after_update(self, experience: Experience, params: Tensor, report: UpdateReport) -> Metrics:
        """Return the coefficient of demonstrations in use, and a warning where they dominate."""
        if "train/bc_coef" not in report.metrics:
            return {}
        from keel.tracking.metrics import DOMINATES

        ratio = report.metrics["train/bc_ppo_ratio"]
        return {
            "train/bc_coef_adjusted": report.metrics["train/bc_coef"],
            "warn/bc_dominates": ratio if ratio > DOMINATES else math.nan,
        }

    def evaluate(self, params: Tensor) -> Metrics:
        """Play whole episodes in environments of their own."""
        from keel.training.evaluation import evaluate, longest_episode

        config = self.config
        if self._evaluators is None:
            number = min(config.evaluation.episodes, EVALUATION_ENVS)
            self._evaluators = make_run_envs(config, number, self.seeds.evaluation)
        return evaluate(
            self.agent,
            params,
            self._evaluators,
            self.obs_normalizer,
            episodes=config.evaluation.episodes,
            deterministic=config.evaluation.deterministic,
            seed=self.seeds.evaluation,
            max_episode_steps=longest_episode(config),
        ).metrics()

    def draw_last_update(self, state: TrainState, path: Path) -> None:
        """Draw nothing: the run's metrics hold everything."""

    def conclude(
        self, params: Tensor, scores: Metrics, path: Path, on_progress: ProgressCallback | None
    ) -> Metrics:
        """Return nothing more: the last evaluation is like the others."""
        return {}

    def state_dict(self) -> Saved:
        """Return normalizers, the last episodes, and where environments and generators stand."""
        collector, envs = self.collector, self.envs.save()
        tensors = prefixed("obs/", collector.obs) | prefixed(
            "hidden_state/", {**collector.hidden_state, SAVED_STARTS: collector.episode_starts}
        )
        for name in ("obs_normalizer", "reward_normalizer"):
            normalizer = getattr(self, name)
            if normalizer is not None:
                tensors |= prefixed(f"{name}/", normalizer.export())
        data: dict[str, Any] = {
            "temperature": self.temperature,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "actions": collector.rng.bit_generator.state,
            "envs": None,
            "spaces": describe_spaces(self.envs),
            INTERFACE: Interface.of(
                self.envs, masked=MASK in collector.obs, encoding=self.encoding
            ).to_data(),
        }
        if envs is not None:
            tensors |= prefixed("envs/", envs[0])
            data["envs"] = dict(envs[1])
        return tensors, data

    def load_state_dict(self, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stood; environments that cannot begin their episodes anew."""
        check_same("the spaces", data["spaces"], describe_spaces(self.envs))
        for name in ("obs_normalizer", "reward_normalizer"):
            fresh = getattr(self, name)
            if fresh is not None:
                setattr(self, name, fresh.restore(arrays(tensors, f"{name}/")))
        # version 0.1 had one temperature
        self.temperature = data.get("temperature", data["hparams"]["temperature"])
        self.returns, self.lengths = tuple(data["returns"]), tuple(data["lengths"])
        collector = self.collector
        collector.rng.bit_generator.state = data["actions"]
        if data["envs"] is not None:
            self.envs.load(arrays(tensors, "envs/"), data["envs"])
            collector.obs = arrays(tensors, "obs/")
            collector.hidden_state = arrays(tensors, "hidden_state/")
            collector.episode_starts = collector.hidden_state.pop(SAVED_STARTS)
            return
        warnings.warn(
            f"{self.envs.backend}: environments cannot save their state, so running episodes "
            "begin anew; everything else goes on exactly",
            ResumeWarning,
            stacklevel=4,
        )
        seed = np.random.SeedSequence((self.seeds.envs, data["steps"])).generate_state(1)[0]
        collector.begin(self.envs.reset(int(seed)))

    def warm_start(self, checkpoint: Checkpoint) -> Tensor:
        """Return the weights of another run on the same spaces; its normalizers are taken over."""
        what, agent = f"start_from: {checkpoint.path}", self.agent
        check_same(f"{what}: the spaces", checkpoint.data["spaces"], describe_spaces(self.envs))
        check_shapes(f"{what}: its weights", checkpoint.weights, agent.named(agent.initial.cpu()))
        obs = arrays(checkpoint.tensors, "obs_normalizer/")
        if self.obs_normalizer is not None and obs:
            self.obs_normalizer = self.obs_normalizer.restore(obs)
        reward = arrays(checkpoint.tensors, "reward_normalizer/")
        if self.reward_normalizer is not None and reward:  # the critic counts in its units
            total = self.reward_normalizer.total
            self.reward_normalizer = self.reward_normalizer.restore({**reward, "total": total})
        return checkpoint.tensors["opt_state/params"]

    def weights(self, params: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return self.agent.named(params)

    def files(self, params: Tensor) -> dict[str, bytes]:
        """Return no further files."""
        return {}

    def close(self) -> None:
        """Close the environments, those of evaluations among them."""
        self.envs.close()
        if self._evaluators is not None:
            self._evaluators.close()

    def _with_rewards(self, rollout: Rollout) -> Rollout:
        """Return the rollout with rewards as they are learned from: normalized, clipped."""
        normalizer, bound = self.reward_normalizer, self.config.envs.clip_reward
        if normalizer is None and bound is None:
            return rollout
        reward = rollout.raw_reward
        assert reward is not None
        if normalizer is not None:
            done = (rollout.terminated | rollout.truncated).numpy()
            reward, normalizer = normalizer.apply_rollout(reward, done, rollout.weight.numpy())
            self.reward_normalizer = normalizer
        if bound is not None:
            reward = np.clip(reward, -bound, bound)
        learned = torch.from_numpy(np.asarray(reward, dtype=np.float32))
        return replace(rollout, reward=learned)

    def _learned(self, rollout: Rollout) -> Rollout:
        """Return the rollout as the update has it."""
        rollout = rollout.to(self.device)
        return rollout if self.transform is None else self.transform(rollout)

    def _targets(
        self, rollout: Rollout, params: Tensor, value: Tensor | None = None
    ) -> tuple[Targets, dict[str, float]]:
        config = self.config
        return compute_targets(
            self.agent,
            params,
            rollout,
            config.advantage,
            value,
            self.shuffle if config.critic.targets == "sampled" else None,
        )

    def _later_targets(self, rollout: Rollout) -> TargetFunction:
        """Return the targets as a function of the critic's parameters."""
        return lambda params: self._targets(rollout, params)[0]

    def _with_demos(self, batch: Batch, params: Tensor) -> tuple[Batch, dict[str, float]]:
        """Return the batch with as many demonstrated steps beside its rows, seen and counted as the
        run's own."""
        if self.demo_dataset is None:
            return batch, {}
        from keel.experience.demos import sample_demos

        normalizer = self.obs_normalizer
        demos, metrics = sample_demos(
            self.demo_dataset,
            self.agent,
            params,
            batch.rows,
            self.shuffle,
            self.config.demos,
            gamma=self.config.advantage.gamma,
            preprocess=normalizer.apply if normalizer is not None else dict,
            scale_reward=partial(
                _scaled, normalizer=self.reward_normalizer, bound=self.config.envs.clip_reward
            ),
        )
        return batch._replace(demos=demos), metrics

    def _count(self, rollout: Rollout) -> None:
        """Remember the episodes that ended."""
        episodes = rollout.episodes
        self.returns = (*self.returns, *episodes.returns.tolist())[-WINDOW:]
        self.lengths = (*self.lengths, *episodes.lengths.tolist())[-WINDOW:]

    def _episode_metrics(self, rollout: Rollout) -> dict[str, float]:
        known, episodes = bool(self.returns), rollout.episodes
        assert rollout.raw_reward is not None
        reward = rollout.raw_reward[rollout.weight.numpy() > 0]
        return {
            "rollout/return_mean": float(np.mean(self.returns)) if known else math.nan,
            "rollout/return_std": float(np.std(self.returns)) if known else math.nan,
            "rollout/length_mean": float(np.mean(self.lengths)) if known else math.nan,
            "rollout/episodes": float(episodes.returns.size),
            "rollout/reward_mean": float(reward.mean()) if reward.size else math.nan,
            **{
                f"env/{name}": float(np.nanmean(x)) if np.isfinite(x).any() else math.nan
                for name, x in episodes.measures.items()
            },
        }


def _signals(rollout: Rollout, moved: Shift) -> dict[str, float]:
    returns = rollout.episodes.returns
    mean = float(returns.mean()) if returns.size else math.nan
    return {"return_mean": mean, "temperature": moved.temperature}


def _scaled(
    reward: np.ndarray, normalizer: RewardNormalizer | None, bound: float | None
) -> np.ndarray:
    counted = reward if normalizer is None else normalizer.apply(reward)
    return counted if bound is None else np.clip(counted, -bound, bound)


def _agent_returns(rollout: Rollout) -> dict[str, float]:
    """Return the mean return of each of several agents, by its name."""
    returns = rollout.episodes.agents
    if returns is None:
        return {}
    means = torch.from_numpy(returns.mean(0)).tolist()
    return {f"rollout/return_mean/{a}": x for a, x in zip(rollout.agents, means, strict=True)}


def _action_share(rollout: Rollout) -> dict[str, float]:
    """How often the commonest of single discrete choices was taken: a policy that has collapsed
    onto one shows here before it shows in the return."""
    action, counts = rollout.action, rollout.weight > 0
    if action.dtype != torch.int64 or action.shape != rollout.weight.shape or not counts.any():
        return {}
    taken = torch.bincount(action[counts].flatten())
    return {"rollout/action_share_max": (taken.max() / counts.sum()).item()}


def atari_options(config: Config, **changes: Any) -> AtariOptions | None:
    """Return how the environments show their games; None where they play none.

    Rewards stay raw: the source clips them.
    """
    if atari_game(config.env.removeprefix(POOL)) is None:
        return None
    from keel.envs import AtariOptions

    return AtariOptions(**{**dataclasses.asdict(config.atari), **changes})


def make_run_envs(config: Config, num: int, seed: int = 0, **atari: Any) -> Envs:
    """Make environments as those of a run.

    Args:
        config: of the run.
        num: how many; a vector environment that was passed from Python has its own number.
        seed: of those that are seeded when they are made.
        **atari: changes of how games are shown.
    """
    return make_envs(
        config.env,
        num,
        backend=config.envs.backend,
        seed=seed,
        guard=config.envs.guard,
        timeout=config.envs.timeout,
        env_kwargs=options(config),
        wrappers=[import_function(name, ("an environment",)) for name in config.envs.wrappers],
        atari=atari_options(config, **atari),
    )
