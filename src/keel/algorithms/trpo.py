"""TRPO: one natural-gradient step, scaled to the exact KL, behind an honest line search."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from keel.algorithms.critic import CriticFit, require_critic
from keel.algorithms.optimizer import Step, initial_opt_state, joined_metrics
from keel.experience.batch import Batch, Experience, chunks, take, take_rows
from keel.functional.natural import ConjugateGradient, LineSearch, conjugate_gradient, line_search
from keel.functional.ratio import policy_ratio
from keel.losses.demos import Limit, cloning_metrics, mean_cloning_loss, pull
from keel.losses.ppo import Objective, largest_log_ratio
from keel.networks.agent import Agent
from keel.networks.fisher import fisher_product
from keel.trust_region.gate import not_finite
from keel.trust_region.measure import Bounded, behavior_at, group_mean
from keel.types import MASK, AlgorithmState, HyperParams, OptimizerState, UpdateReport

KL_BAND = (0.95, 0.985)
"""Shares of the bound: a step whose exact KL is at least the first is long enough, the second is
aimed at, as √KL is not quite linear."""
RESCALE_TRIALS = 5
GROWTH = 8.0
"""The quadratic model is never outdone by more than this factor."""


@dataclass(frozen=True, eq=False)
class TRPO:
    """Trust-region policy optimization (Schulman et al. 2015).

    maximise E[ratio·A] + entropy_coef·H subject to KL(old‖new) ≤ `HyperParams.max_kl`; with
    demonstrations, − bc_coef·cloning.

    One objective serves for the gradient, the prediction and the acceptance. The step is scaled, up
    or down, until the exact KL over the whole rollout is at its bound, before anything is
    backtracked. A step that is not accepted leaves the policy bit for bit as it was. The critic is
    fitted apart, after the policy; what both see through is the policy's.
    """

    agent: Agent
    step: Step
    """one step of the optimizer on the critic's loss, of a single agent"""
    cg_iters: int = 15
    fisher_fraction: float = 0.5
    backtrack_iters: int = 10
    backtrack_coeff: float = 0.8
    accept_ratio: float = 0.1
    rescale_to_kl: bool = True
    """scale the step until its exact KL is at the bound"""
    objective: Objective = field(default_factory=Objective)
    critic: CriticFit = field(default_factory=CriticFit)
    limit: Limit | None = None
    """on what demonstrations may do"""
    problem: Callable[..., Problem] = field(default_factory=lambda: Problem)
    """makes the constrained problem of a group"""

    def init(self) -> OptimizerState:
        """Return the optimizer; Adam's state is the critic's: the policy's part stays 0."""
        require_critic(self.agent)
        return initial_opt_state(self.agent.initial)

    def update(
        self, state: AlgorithmState, experience: Experience, hparams: HyperParams
    ) -> tuple[AlgorithmState, UpdateReport]:
        """Improve on one rollout; every group of a stack takes its own step."""
        batch, opt_state, agent = experience.batch, state.opt_state, self.agent
        if batch.group_axis is None:
            after, attempt, metrics = self._one(agent, opt_state, batch, hparams, state.rng)
            return replace(state, opt_state=after), _report([attempt], [metrics])
        states, attempts, tables = [], [], []
        for group in range(agent.groups):
            own = OptimizerState(*(x[group : group + 1] for x in opt_state))
            part = batch.of_members(agent.who(group))
            after, attempt, metrics = self._one(agent.alone(), own, part, hparams, state.rng)
            states.append(after)
            attempts.append(attempt)
            tables.append(metrics)
        after = OptimizerState(*map(torch.cat, zip(*states, strict=True)))
        return replace(state, opt_state=after), _report(attempts, tables)

    def _one(
        self,
        agent: Agent,
        state: OptimizerState,
        batch: Batch,
        hparams: HyperParams,
        rng: torch.Generator,
    ) -> tuple[OptimizerState, Attempt, dict[str, float]]:
        batch = batch.without_nan()  # a weight of 0 would still multiply a NaN in the backward pass
        pulled = None
        if batch.demos is not None:
            pulled = pull(agent, state.params, batch, hparams)
            hparams = hparams if self.limit is None else self.limit(hparams, pulled)
        problem = self.problem(agent, state.params, batch, hparams, self.objective)
        gradient, gap = problem.gradient()
        if pulled is not None:
            gradient -= hparams.bc_coef * pulled.cloning[: gradient.shape[0]].to(gradient)
        if not bool(gradient.isfinite().all()):
            tensors = {"advantage": batch.advantage, "log_prob": batch.log_prob}
            raise not_finite("the policy's gradient", 0, state.params, tensors)
        attempt = self._step(problem, gradient, rng)
        params = state.params if attempt.step is None else problem.moved(attempt.step, 1.0)
        fit = self.critic(agent, state._replace(params=params), batch, hparams, rng, self.step)
        cloned = problem.cloned(state.params)
        metrics = fit.metrics | {
            "train/policy_loss": -problem.before - hparams.bc_coef * cloned,
            "train/loss": fit.metrics["train/value_loss"] - problem.before,
            "train/policy_gradient_norm": gradient.norm().item(),
            "train/gate_log_ratio": gap,
            "train/damping": hparams.damping,
            "error/non_finite_ratio_count": float(problem.quarantined() if math.isnan(gap) else 0),
        }
        if pulled is not None:
            own = -group_mean(batch.advantage, batch).item()  # the surrogate at ratio 1
            metrics |= cloning_metrics(pulled, hparams, own, cloned)
        return fit.opt_state, attempt, metrics

    def _step(self, problem: Problem, gradient: Tensor, rng: torch.Generator) -> Attempt:
        max_kl = problem.hparams.max_kl
        product = problem.curvature(self.fisher_fraction, rng)
        solution = conjugate_gradient(product, gradient, iterations=self.cg_iters)
        curvature = solution.curvature
        if not (math.isfinite(curvature) and curvature > 0.0):
            return Attempt(None, solution, None, _why_no_direction(solution, gradient), 1.0)
        full = solution.solution * math.sqrt(2.0 * max_kl / curvature)
        tried: dict[float, tuple[float, float]] = {}

        def evaluate(fraction: float) -> tuple[float, float]:
            if fraction not in tried:
                tried[fraction] = problem.evaluate(problem.moved(full, fraction))
            return tried[fraction]

        scale = rescale_to_kl(lambda x: evaluate(x)[1], max_kl) if self.rescale_to_kl else 1.0
        search = line_search(
            lambda fraction: evaluate(fraction * scale),
            expected=(gradient @ full).item() * scale,
            max_kl=max_kl,
            shrink=self.backtrack_coeff,
            max_trials=self.backtrack_iters,
            accept_ratio=self.accept_ratio,
        )
        step = full * (search.fraction * scale) if search.accepted else None
        return Attempt(step, solution, search, search.reason, scale)


class Attempt(NamedTuple):
    """The outcome of one group's step."""

    step: Tensor | None
    """`[P]`: None if it was rejected"""
    solver: ConjugateGradient
    search: LineSearch | None
    reason: str
    scale: float
    """by how much the exact KL lengthened the quadratic model's step"""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics as the registry names them; of a rejected step they are NaN, not 0."""
        nan, search = math.nan, self.search
        accepted = self.step is not None
        return {
            "train/line_search_success": float(accepted),
            "train/line_search_iters": float(search.iterations if search else 0),
            "train/step_fraction": search.fraction if search else 0.0,
            "train/step_scale": self.scale,
            "train/kl_tried": search.trials[0].kl if search else nan,
            "train/improvement_predicted": search.predicted if search else nan,
            "train/improvement": search.improvement if search else nan,
            "train/gain_ratio": search.gain_ratio if search and accepted else nan,
            "train/cg_residual": self.solver.residual,
            "train/cg_iterations": float(self.solver.iterations),
            "train/curvature": self.solver.curvature,
            "train/curvature_min": self.solver.min_curvature,
        }


@dataclass
class Problem:
    """The constrained problem of one group on one rollout, at the policy that sampled it."""

    agent: Agent
    params: Tensor
    """`[1, P]`"""
    batch: Batch
    hparams: HyperParams
    objective: Objective
    before: float = 0.0
    """the objective before the step; `gradient` finds it"""

    def __post_init__(self) -> None:
        """Set the entropy's weight: below the floor its penalty adds to it."""
        self.entropy_coef = self.hparams.entropy_coef if self.objective.entropy_bonus else 0.0
        entropy = self.agent.dist.entropy(self.batch.behavior)
        self._slope = self.entropy_coef
        floor = self.objective.entropy_floor
        if floor is not None and group_mean(entropy, self.batch).item() < floor:
            self._slope += self.objective.entropy_floor_coef

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient in the policy's parameters `[P]`, and the largest |log-ratio|.

        The latter is 0 where the policy is still the one that sampled; NaN if any is not finite.
        """
        agent, batch, start = self.agent, self.batch, self.agent.critic_from
        total = batch.weight.double().sum().clamp(min=1.0)
        policy = self.params[0, :start]
        gradient, gap = torch.zeros_like(policy), 0.0
        for part in chunks(batch):
            leaf = policy.detach().requires_grad_()
            tree = agent.policy_layout.unflatten(leaf)
            obs = {key: x[part] for key, x in batch.obs.items()}
            output = agent.outputs_of(tree, obs, "actor").policy
            assert output is not None
            now = agent.dist.params(output, obs.get(MASK), self.hparams.temperature)
            gain, largest = self._gain(now, part, self._slope)
            (slope,) = torch.autograd.grad(gain / total, leaf)
            gradient += slope
            gap = largest if math.isnan(largest) else max(gap, largest)
        start_policy = batch.behavior
        if batch.sampled is not None:  # the step begins at the policy as it acts next
            start_policy = behavior_at(agent, self.params, batch, self.hparams.temperature)
        self.before = self.value(start_policy, self.params)
        return gradient, gap

    def _gain(self, now: dict[str, Tensor], part: slice, slope: float) -> tuple[Tensor, float]:
        batch, dist = self.batch, self.agent.dist
        weight = batch.weight[part]
        ratio = policy_ratio(
            dist.log_prob(now, batch.action[part]),
            batch.log_prob[part],
            weight,
            max_log_ratio=self.objective.max_log_ratio,
        )
        advantage = torch.where(ratio.weight > 0, batch.advantage[part], 0.0)
        gain = (ratio.weight * ratio.ratio * advantage).sum(dtype=torch.float64)
        if slope:
            entropy = torch.where(ratio.weight > 0, dist.entropy(now), 0.0)
            gain = gain + slope * (ratio.weight * entropy).sum(dtype=torch.float64)
        return gain, largest_log_ratio(ratio).item()

    def quarantined(self) -> int:
        """Return how many rows `gradient` left out because their ratio is not finite."""
        batch, dist = self.batch, self.agent.dist
        now = behavior_at(self.agent, self.params, batch, self.hparams.temperature)
        ratio = policy_ratio(dist.log_prob(now, batch.action), batch.log_prob, batch.weight)
        return int(ratio.quarantined.sum().item())

    def curvature(self, fraction: float, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Return v ↦ (F + damping) v, F on a share of the rows."""
        batch, count = self.batch, self.batch.rows
        size = max(1, math.ceil(fraction * count))
        obs, weight = batch.obs, batch.weight
        if size < count:
            index = torch.randperm(count, generator=rng)[:size].to(weight.device)
            obs, weight = take(obs, index), take_rows(weight, index)
        policy = self.params[0, : self.agent.critic_from]
        hparams = self.hparams
        return fisher_product(
            self.agent,
            policy,
            obs,
            weight,
            temperature=hparams.temperature,
            damping=hparams.damping,
        )

    def moved(self, step: Tensor, fraction: float) -> Tensor:
        """Return all parameters `[1, P]`, the policy's moved by a share of `step`."""
        params = self.params.clone()
        params[0, : step.shape[0]] += fraction * step
        return params

    def cloned(self, params: Tensor) -> float:
        """Return the loss on demonstrations, before its coefficient."""
        if self.batch.demos is None:
            return 0.0
        return mean_cloning_loss(self.agent, params, self.batch.demos, self.hparams.temperature)

    def value(self, now: dict[str, Tensor], params: Tensor) -> float:
        """Return the objective of a policy on all rows.

        Args:
            now: Its distributions there.
            params: Its parameters.
        """
        total = self.batch.weight.double().sum().clamp(min=1.0).item()
        everything = slice(0, self.batch.rows)
        gain = self._gain(now, everything, self.entropy_coef)[0].item() / total
        floor = self.objective.entropy_floor
        if floor is not None:
            nats = group_mean(self.agent.dist.entropy(now), self.batch).item()
            gain -= self.objective.entropy_floor_coef * max(0.0, floor - nats)
        return gain - self.hparams.bc_coef * self.cloned(params)

    def evaluate(self, params: Tensor) -> tuple[float, float]:
        """Return (improvement, exact mean KL(old‖new)) over all rows, for the line search."""
        now = behavior_at(self.agent, params, self.batch, self.hparams.temperature)
        kl = self._bounded.kl(params, self.agent.dist.kl(self.batch.behavior, now))
        return self.value(now, params) - self.before, kl.max().item()

    @cached_property
    def _bounded(self) -> Bounded:
        return Bounded(self.agent, self.params, self.batch, self.hparams.temperature)


def rescale_to_kl(kl_at: Callable[[float], float], bound: float) -> float:
    """Return the factor on the step at which the exact KL is at its bound or just inside.

    The KL grows with a power of the length: the square while steps are small. Two lengths tell the
    power, so that a few of them suffice; the longest that is inside the bound is returned.
    """
    best, scale, power = 0.0, 1.0, 2.0
    before: tuple[float, float] | None = None
    for _ in range(RESCALE_TRIALS):
        kl = kl_at(scale)
        if kl <= bound:
            best = max(best, scale)
            if kl >= KL_BAND[0] * bound or scale >= GROWTH:
                return scale
        if not math.isfinite(kl):
            scale *= 0.5
            continue
        if kl <= 0.0:
            scale = min(2.0 * scale, GROWTH)
            continue
        here = math.log(scale), math.log(kl)
        if before is not None and here[0] != before[0]:
            power = min(max((here[1] - before[1]) / (here[0] - before[0]), 0.5), 8.0)
        before = here
        scale = min(scale * (KL_BAND[1] * bound / kl) ** (1.0 / power), GROWTH)
    return best or scale


def _why_no_direction(solver: ConjugateGradient, gradient: Tensor) -> str:
    if not bool(gradient.any()):
        return "no_gradient"
    return "non_finite" if solver.stopped == "non_finite" else "non_positive_curvature"


def _report(attempts: list[Attempt], tables: list[dict[str, float]]) -> UpdateReport:
    """Average over the groups; a rejection of all of them is one of the update."""
    accepted = torch.tensor([float(o.step is not None) for o in attempts], dtype=torch.float64)
    nothing = torch.zeros(len(attempts), dtype=torch.float64)
    rows = [table | attempt.metrics for table, attempt in zip(tables, attempts, strict=True)]
    metrics = joined_metrics(rows)
    verdict: Literal["accepted", "rejected"] = "accepted" if bool(accepted.any()) else "rejected"
    reasons = sorted({o.reason for o in attempts if o.step is None})
    return UpdateReport(
        nothing, nothing, accepted, verdict, reason=", ".join(reasons), metrics=metrics
    )
