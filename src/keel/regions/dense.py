"""The optimizer step of two small MLPs, differentiated by hand, in numpy.

A 64×64 network at 256 rows is 0.4 ms of matrix products; around them autograd spends 4 ms on a
thousand tiny operations, and a compiler 20 s before its first step. Written out there are about
ninety numpy calls, so that the step is as fast as a compiled one from the first update on, and a
run gives the same numbers whether or not anything was compiled before. It does what
`stepper.make_step` does, for the usual PPO objective; a test holds both to the same result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keel.models.agent import Agent
from keel.models.distributions import LOG_2PI, Categorical, Gaussian
from keel.models.networks import MLP, Separate
from keel.regions.objective import Batch, Objective, Statistics
from keel.regions.stepper import BETAS, EPSILON, Optimum, Step, StepResult
from keel.types import KNOB_INDEX

Array = NDArray[np.float32]
MAX_WIDTH = 256
"""Above this the matrix products are all that counts, and torch's threads help with them."""


def fits(agent: Agent, objective: Objective) -> bool:
    """Whether this step can be taken by hand."""
    network = agent.network
    return (
        agent.groups == 1
        and agent.initial.device.type == "cpu"
        and isinstance(network, Separate)
        and isinstance(agent.dist, Categorical | Gaussian)
        and len(network.encoder.shapes) == 1
        and not network.encoder.classes
        and (network.head.log_std is not None) == isinstance(agent.dist, Gaussian)
        and all(_is_small(mlp) for mlp in (network.actor, network.critic))
        and objective.surrogate == "clip"
        and not objective.penalise
        and objective.dual_clip is None
        and objective.value_clip is None
        and objective.entropy_floor is None
    )


def _is_small(mlp: MLP) -> bool:
    widths = [layer.out_features for layer in mlp.layers if isinstance(layer, torch.nn.Linear)]
    return mlp.act_name in ("tanh", "relu") and max(widths) <= MAX_WIDTH


def make_dense_step(agent: Agent, objective: Objective, *, max_grad_norm: float) -> Step:
    """The same function as `make_step` gives, for an agent and an objective that fit."""
    network = agent.network
    assert isinstance(network, Separate)
    (key,) = network.encoder.shapes
    dist = agent.dist
    loss_of = _categorical if isinstance(dist, Categorical) else _gaussian
    bounds = dist.log_std_bounds if isinstance(dist, Gaussian) else (0.0, 0.0)
    room = _Room()
    actor = _Net(agent, network.actor, "actor", room)
    critic = _Net(agent, network.critic, "critic", room)
    spread = agent.layout.slice_of("head.log_std") if isinstance(dist, Gaussian) else None
    policy_columns = agent.policy_columns.numpy()
    gradient = np.empty(agent.initial.shape[1], np.float32)

    @np.errstate(all="ignore")  # what is not finite is looked for, and never applied
    def step(
        optimum: Optimum, rows: Batch, index: Tensor, real: Tensor, knobs: Tensor, active: Tensor
    ) -> StepResult:
        dials = _Dials(knobs)
        params = optimum.params.numpy()[0]
        chosen = index.numpy()
        obs = rows.obs[key].numpy().take(chosen, 0)
        obs = obs.reshape(obs.shape[0], -1).astype(np.float32, copy=False)
        part = _Part.take(rows, chosen, real.numpy())

        output, seen = actor.forward(params, obs)
        log_std = None if spread is None else params[spread]
        policy = loss_of(output, log_std, bounds, part, dials, objective)
        actor.backward(params, gradient, seen, policy.output)
        if spread is not None:
            gradient[spread] = policy.log_std

        value, seen = critic.forward(params, obs)
        error = value[:, 0] - part.target
        share = policy.share
        value_loss = 0.5 * float(np.dot(share, error * error))
        critic.backward(params, gradient, seen, (objective.value_coef * share * error)[:, None])

        norm = math.sqrt(float(np.dot(gradient, gradient)))
        moves = math.isfinite(norm) and bool(active[0])
        if moves:
            np.multiply(gradient, min(1.0, max_grad_norm / (norm + 1e-6)), out=gradient)
            optimum = _adam(optimum, gradient, dials.learning_rate, policy_columns)
        bonus = dials.entropy_coef * policy.entropy if objective.entropy_bonus else 0.0
        loss = policy.loss + objective.value_coef * value_loss - bonus
        numbers = (
            *(loss, policy.loss, value_loss, policy.entropy, policy.kl, policy.clipped),
            *(policy.quarantined, norm),
        )
        *statistics, seen_norm = torch.tensor(numbers)[:, None].unbind(0)
        return StepResult(optimum, Statistics(*statistics), seen_norm, torch.tensor([moves]))

    return step


class _Dials:
    """The knobs this step reads, as Python numbers: float64 scalars would widen every array."""

    def __init__(self, knobs: Tensor) -> None:
        values = knobs.tolist()
        self.learning_rate: float = values[KNOB_INDEX["learning_rate"]]
        self.low: float = 1.0 - values[KNOB_INDEX["clip_low"]]
        self.high: float = 1.0 + values[KNOB_INDEX["clip_high"]]
        self.entropy_coef: float = values[KNOB_INDEX["entropy_coef"]]
        self.temperature: float = values[KNOB_INDEX["temperature"]]


class _Part(NamedTuple):
    """A minibatch; rows that do not count hold zeros."""

    behaviour: dict[str, Array]
    mask: NDArray[np.bool_] | None
    action: NDArray[Any]
    log_prob: Array
    advantage: Array
    target: Array
    weight: Array

    @classmethod
    def take(cls, rows: Batch, index: NDArray[np.int64], real: Array) -> _Part:
        weight = rows.weight.numpy().take(index) * real
        log_prob, advantage, target = (
            x.numpy().take(index) for x in (rows.log_prob, rows.advantage, rows.target)
        )
        if np.count_nonzero(weight) < weight.size:
            counts = weight > 0
            advantage, target = np.where(counts, advantage, 0.0), np.where(counts, target, 0.0)
        behaviour = {name: x.numpy().take(index, 0) for name, x in rows.behaviour.items()}
        action = rows.action.numpy().take(index, 0)
        legal = rows.obs.get("action_mask")
        mask = None if legal is None else legal.numpy().take(index, 0).astype(bool, copy=False)
        return cls(behaviour, mask, action, log_prob, advantage, target, weight)


class _Policy(NamedTuple):
    """What the policy's loss comes to, and its gradient at the network's output."""

    output: Array
    log_std: Array | None
    share: Array
    """weight over the sum of weights, `[M]`"""
    loss: float
    entropy: float
    kl: float
    clipped: float
    quarantined: float


class _Surrogate(NamedTuple):
    slope: Array
    """d loss / d log-prob, `[M]`"""
    share: Array
    loss: float
    clipped: float
    quarantined: float


def _surrogate(log_prob: Array, part: _Part, dials: _Dials, objective: Objective) -> _Surrogate:
    """PPO's clipped loss; a log-ratio that is not finite is quarantined (`functional.ratio`)."""
    difference = log_prob - part.log_prob
    weight, quarantined = part.weight, 0.0
    finite = np.isfinite(difference)
    if np.count_nonzero(finite) < finite.size:
        quarantined = float(np.count_nonzero(~finite & (weight > 0)))
        weight = np.where(finite, weight, np.float32(0.0))
    if np.count_nonzero(weight) < weight.size:
        difference = np.where(finite & (weight > 0), difference, np.float32(0.0))
    limit = objective.max_log_ratio
    log_ratio = np.clip(difference, -limit, limit)
    ratio = np.exp(log_ratio)
    share = weight / (float(weight.sum()) or 1.0)
    free = -ratio * part.advantage
    bounded = -np.clip(ratio, dials.low, dials.high) * part.advantage
    clipped = bounded > free
    slope = np.where(clipped | (log_ratio != difference), np.float32(0.0), free) * share
    return _Surrogate(
        slope=slope,
        share=share,
        loss=float(np.dot(share, np.maximum(free, bounded))),
        clipped=float(np.dot(share, clipped)),
        quarantined=quarantined,
    )


def _categorical(
    output: Array,
    log_std: Array | None,
    bounds: tuple[float, float],
    part: _Part,
    dials: _Dials,
    objective: Objective,
) -> _Policy:
    logits = output / dials.temperature
    if part.mask is not None:
        logits = np.where(part.mask, logits, -np.inf)
    log_p, p = _log_softmax(logits)
    rows = np.arange(len(p))
    surrogate = _surrogate(log_p[rows, part.action], part, dials, objective)
    slope, share = surrogate.slope, surrogate.share
    gradient = p * -slope[:, None]
    gradient[rows, part.action] += slope
    entropy = kl = 0.0
    if objective.entropy_bonus:
        surprise = log_p if part.mask is None else np.where(part.mask, log_p, np.float32(0.0))
        negative = (p * surprise).sum(1)  # −H of each row
        entropy = -float(np.dot(share, negative))
        gradient += (dials.entropy_coef * share)[:, None] * p * (surprise - negative[:, None])
    if objective.track_kl:
        old, weight = _log_softmax(part.behaviour["logits"])
        terms = np.where(weight > 0, weight * (old - log_p), np.float32(0.0))
        kl = float(np.dot(share, terms.sum(1)))
    gradient /= dials.temperature
    return _Policy(gradient, None, share, surrogate.loss, entropy, kl, *surrogate[3:])


def _log_softmax(logits: Array) -> tuple[Array, Array]:
    """Log-probabilities and probabilities."""
    log_p = logits - logits.max(1, keepdims=True)
    p = np.exp(log_p)
    total = p.sum(1, keepdims=True)
    log_p -= np.log(total)
    p /= total
    return log_p, p


def _gaussian(
    output: Array,
    log_std: Array | None,
    bounds: tuple[float, float],
    part: _Part,
    dials: _Dials,
    objective: Objective,
) -> _Policy:
    assert log_std is not None
    bounded = np.clip(log_std, *bounds)
    free = bounded == log_std  # a bound that holds has no gradient
    bounded = bounded + 0.5 * math.log(dials.temperature)
    precision = np.exp(-bounded)
    z = (part.action - output) * precision
    squares = z * z
    constant = float(bounded.sum()) + 0.5 * LOG_2PI * len(bounded)
    surrogate = _surrogate(-0.5 * squares.sum(1) - constant, part, dials, objective)
    slope, share = surrogate.slope, surrogate.share
    by_log_std = slope @ squares - float(slope.sum())
    entropy = kl = 0.0
    if objective.entropy_bonus:
        total = float(share.sum())
        entropy = total * (constant + 0.5 * len(bounded))
        by_log_std -= dials.entropy_coef * total
    if objective.track_kl:
        mean, old = part.behaviour["mean"], part.behaviour["log_std"]
        gap = (mean - output) * precision
        terms = 0.5 * (np.expm1(2.0 * (old - bounded)) + gap * gap) - (old - bounded)
        kl = float(np.dot(share, terms.sum(1)))
    gradient = z * precision * slope[:, None]
    return _Policy(gradient, by_log_std * free, share, surrogate.loss, entropy, kl, *surrogate[3:])


class _Room:
    """Arrays by name and shape, made once."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, int, int], Array] = {}

    def __call__(self, name: str, rows: int, width: int) -> Array:
        key = (name, rows, width)
        if key not in self._arrays:
            self._arrays[key] = np.ones((rows, width), np.float32)
        return self._arrays[key]

    def ones(self, rows: int) -> Array:
        """Times a matrix, they sum its rows: four times as fast as `np.add.reduce`."""
        return self("ones", 1, rows)[0]


class _Net:
    """One MLP, as places in a row of the parameter matrix, and room to work in.

    Fresh arrays of this size are given back to the operating system and fetched again, page by
    page; and two networks with rooms of their own would not fit into a core's cache together. So
    there is one room: what a network wrote there holds until the next one's `forward`.
    """

    def __init__(self, agent: Agent, mlp: MLP, name: str, room: _Room) -> None:
        self.places: list[tuple[slice, slice, tuple[int, int]]] = []
        for i, layer in enumerate(mlp.layers):
            assert isinstance(layer, torch.nn.Linear)
            weight, bias = (
                agent.layout.slice_of(f"{name}.layers.{i}.{kind}") for kind in ("weight", "bias")
            )
            self.places.append((weight, bias, (layer.out_features, layer.in_features)))
        tanh = mlp.act_name == "tanh"
        self._squash, self._times_slope = (
            (_tanh, _times_tanh_slope) if tanh else (_relu, _times_relu_slope)
        )
        self._room = room

    def forward(self, params: Array, x: Array) -> tuple[Array, list[Array]]:
        """The output, and what every layer saw."""
        seen = [x]
        for number, (weight, bias, shape) in enumerate(self.places):
            out = self._room(f"out {number}", len(x), shape[0])
            np.matmul(x, params[weight].reshape(shape).T, out=out)
            out += params[bias]
            x = out
            if len(seen) < len(self.places):
                self._squash(x)
                seen.append(x)
        return x, seen

    def backward(self, params: Array, gradient: Array, seen: list[Array], slope: Array) -> None:
        """Write the gradient of this network's columns, from the slope at its output."""
        for number in range(len(self.places) - 1, -1, -1):
            weight, bias, shape = self.places[number]
            np.matmul(slope.T, seen[number], out=gradient[weight].reshape(shape))
            np.matmul(self._room.ones(len(slope)), slope, out=gradient[bias])
            if number:
                below = self._room(f"slope {number % 2}", *seen[number].shape)
                np.matmul(slope, params[weight].reshape(shape), out=below)
                spare = self._room("spare", *below.shape)
                self._times_slope(below, seen[number], spare)
                slope = below


def _tanh(x: Array) -> None:
    """2·sigmoid(2x) − 1 by torch's vectorised sigmoid: half the time of numpy's tanh."""
    x *= 2.0
    torch.from_numpy(x).sigmoid_()
    x *= 2.0
    x -= 1.0


def _relu(x: Array) -> None:
    np.maximum(x, np.float32(0.0), out=x)


def _times_tanh_slope(slope: Array, y: Array, spare: Array) -> None:
    """slope·(1 − y²), in place."""
    np.multiply(y, y, out=spare)
    np.subtract(np.float32(1.0), spare, out=spare)
    slope *= spare


def _times_relu_slope(slope: Array, y: Array, spare: Array) -> None:
    np.greater(y, np.float32(0.0), out=spare)
    slope *= spare


def _adam(old: Optimum, gradient: Array, rate: float, policy: NDArray[np.bool_]) -> Optimum:
    """`stepper._adam` for one group that moves; `gradient` is used up."""
    params, first, second = (x.numpy()[0] for x in (old.params, old.first, old.second))
    steps = old.steps + 1.0
    ages = steps[0].tolist()
    first = first * BETAS[0]
    first += (1 - BETAS[0]) * gradient
    second = second * BETAS[1]
    gradient *= gradient
    gradient *= 1 - BETAS[1]
    second += gradient
    # −rate/(1 − β₁ᵗ) · m / (√v/√(1 − β₂ᵗ) + ε): the corrections are numbers, not passes
    corrections = [
        (-rate / (1.0 - BETAS[0] ** age), 1.0 / math.sqrt(1.0 - BETAS[1] ** age)) for age in ages
    ]
    scale: float | Array
    unbias: float | Array
    scale, unbias = corrections[0]
    if ages[0] != ages[1]:  # after a rejected step the policy is younger than the critic
        scale, unbias = (
            np.where(policy, np.float32(a), np.float32(b))
            for a, b in zip(*corrections, strict=True)
        )
    move = np.sqrt(second)
    move *= unbias
    move += EPSILON
    np.divide(first, move, out=move)
    move *= scale
    move += params
    params, first, second = (torch.from_numpy(x[None]) for x in (move, first, second))
    return Optimum(params, first, second, steps)
