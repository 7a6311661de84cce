"""A policy as one ONNX file: raw observations in, actions out, the normalizer inside.

    inputs    one per key of the observation, `[batch, …]` as `keel.envs` lays it out (`obs/KEY`
              where the file has something else under KEY), and `action_mask` where the environment
              gives one; `memory` of an actor that remembers, zeros where an episode begins
    outputs   `action`, `logits` (discrete) or `log_std` (continuous), and `next_memory`

The action is the likeliest one: squashed or clipped into its bounds, counted from 0.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from keel import __version__
from keel.distributions.actions import Categorical, Gaussian
from keel.distributions.composed import Bernoulli, MultiCategorical, SquashedGaussian
from keel.envs import MissingExtraError
from keel.errors import InputError, KeelError
from keel.networks.agent import load_weights
from keel.networks.recurrent import ACTOR_HIDDEN_STATE, EPISODE_STARTS, RecurrentActorCritic
from keel.training.policy import Policy
from keel.types import MASK, Tree

MEMORY, NEXT_MEMORY = "memory", "next_memory"
ACTION, LOGITS, LOG_STD = "action", "logits", "log_std"
TAKEN = (ACTION, LOGITS, LOG_STD, MEMORY, NEXT_MEMORY)
"""Names in the file that an observation cannot have there."""
EXPORTED = (Categorical, MultiCategorical, Bernoulli, Gaussian, SquashedGaussian)
"""Distributions whose likeliest action can stand in the file."""
TOLERANCE = 1e-4
"""Largest difference from torch, relative to the largest output: float32 rounding is 1e-6."""


class ExportError(KeelError):
    """Error of a policy that cannot be exported, or whose export differs from it."""


@dataclass(frozen=True)
class Exported:
    """Exported file and its comparison with the policy."""

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float
    """largest absolute difference between the file in onnxruntime and Keel's own policy"""
    rows: int
    """random observations that were compared"""


def export_onnx(policy: Policy, path: Path, *, rows: int = 256, seed: int = 0) -> Exported:
    """Write a policy as ONNX, run the file and compare; a file that differs is removed.

    Args:
        policy: as `open_policy` returns it.
        path: the file.
        rows: number of random observations to compare.
        seed: of these observations.
    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingExtraError("the export to ONNX", "onnx") from error
    if not path.parent.is_dir():
        raise InputError(f"--onnx: the folder {str(path.parent)!r} does not exist")
    if policy.agent.groups != 1:
        raise InputError(f"export: one policy a file, this run has {policy.agent.groups}")
    if type(policy.agent.dist) not in EXPORTED:
        raise InputError(f"export: {type(policy.agent.dist).__name__} is no distribution of Keel's")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        outputs = _write(policy, draft, random_observations(policy, 2, seed))
        difference = max(
            compare(policy, draft, random_observations(policy, n, seed + n)) for n in (1, rows)
        )
        draft.replace(path)
    except OSError as error:
        raise ExportError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    inputs = tuple(map(input_name, random_observations(policy, 1, seed)))
    return Exported(path, inputs, outputs, difference, rows)


def input_name(key: str) -> str:
    """Return the name in the file of an observation, a mask or a memory."""
    if key == ACTOR_HIDDEN_STATE:
        return MEMORY
    return f"obs/{key}" if key in TAKEN else key


def random_observations(policy: Policy, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Draw raw observations `[rows, …]` from the space, with masks and memory where needed.

    Every mask leaves an action in each choice.
    """
    space = copy.deepcopy(policy.observation_space)
    space.seed(seed)
    parts = dict(space.items()) if isinstance(space, spaces.Dict) else {"obs": space}
    obs = {
        key: np.stack([np.asarray(part.sample(), dtype=part.dtype) for _ in range(rows)])
        for key, part in parts.items()
    }
    if policy.masked:
        obs[MASK] = np.random.default_rng(seed).random((rows, policy.agent.dist.outputs)) < 0.5
        starts = [0, *np.cumsum(getattr(policy.agent.dist, "sizes", ()))[:-1]]
        obs[MASK][:, starts] = True
    if ACTOR_HIDDEN_STATE in policy.agent.hidden_state_sizes:
        shape = rows, policy.agent.hidden_state_sizes[ACTOR_HIDDEN_STATE]
        obs[ACTOR_HIDDEN_STATE] = (
            np.random.default_rng(seed).uniform(-1.0, 1.0, shape).astype(np.float32)
        )
    return obs


def act_once(network: nn.Module, obs: Tree) -> tuple[Tensor, Tensor | None]:
    """Return the policy's output for each row and, of a recurrent actor, its next hidden state."""
    if not isinstance(network, RecurrentActorCritic):
        return network(obs, "actor").policy, None
    rows = {key: x[:, None] for key, x in obs.items() if key != ACTOR_HIDDEN_STATE}
    rows[EPISODE_STARTS] = torch.zeros_like(
        next(iter(rows.values())).flatten(2)[..., 0], dtype=torch.bool
    )
    if ACTOR_HIDDEN_STATE in obs:
        rows[ACTOR_HIDDEN_STATE] = obs[ACTOR_HIDDEN_STATE]
    outputs = network(rows, "actor")
    state = outputs.hidden_state.get(ACTOR_HIDDEN_STATE)
    return outputs.policy[:, 0], None if state is None else state[:, 0]


class Deployed(nn.Module):
    """Policy as a module of its own, from raw observation to action."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        agent, space = policy.agent, policy.action_space
        self.network = _load_network(policy)
        self.dist = agent.dist
        scaling = {} if policy.normalizer is None else policy.normalizer.scaling
        self.normalized = tuple(scaling)
        for index, (mean, inverse) in enumerate(scaling.values()):
            for name, value in (("mean", mean), ("scale", inverse)):
                self.register_buffer(f"{name}_{index}", torch.from_numpy(np.float32(value)))
        self.clip = 0.0 if policy.normalizer is None else policy.normalizer.clip
        if isinstance(space, spaces.Box):
            self.register_buffer("low", torch.from_numpy(space.low.astype(np.float32)))
            self.register_buffer("high", torch.from_numpy(space.high.astype(np.float32)))

    def forward(self, obs: Tree) -> tuple[Tensor, ...]:
        """Return the action, the logits or log standard deviations, and the next memory if any."""
        normalized = dict(obs)
        for index, key in enumerate(self.normalized):
            centred = obs[key] - self.get_buffer(f"mean_{index}")
            scaled = centred * self.get_buffer(f"scale_{index}")
            normalized[key] = scaled.clamp(-self.clip, self.clip)
        output, memory = act_once(self.network, normalized)
        params = self.dist.params(output, obs.get(MASK), 1.0)
        state = () if memory is None else (memory,)
        if "mean" in params:
            return self._bounded(params["mean"]), params["log_std"], *state
        return self._likeliest(params["logits"]), params["logits"], *state

    def _bounded(self, mean: Tensor) -> Tensor:
        low, high = self.get_buffer("low"), self.get_buffer("high")
        if isinstance(self.dist, SquashedGaussian):
            return low + (high - low) * 0.5 * (torch.tanh(mean) + 1.0)
        return torch.minimum(torch.maximum(mean, low), high)

    def _likeliest(self, logits: Tensor) -> Tensor:
        if isinstance(self.dist, Bernoulli):
            return (logits > 0).long()
        if isinstance(self.dist, MultiCategorical):
            parts = torch.split(logits, list(self.dist.sizes), -1)
            return torch.stack([part.argmax(-1) for part in parts], -1)
        return logits.argmax(-1)


def _load_network(policy: Policy) -> nn.Module:
    network = copy.deepcopy(policy.agent.network).cpu().eval()
    load_weights(network, policy.agent.layout.unflatten(policy.params[0]))
    return network


def _write(policy: Policy, path: Path, example: dict[str, np.ndarray]) -> tuple[str, ...]:
    continuous = policy.agent.dist.log_stds > 0
    outputs: tuple[str, ...] = (ACTION, LOG_STD if continuous else LOGITS)
    if ACTOR_HIDDEN_STATE in example:
        outputs = (*outputs, NEXT_MEMORY)
    batch = torch.export.Dim("batch", min=1)
    try:
        with _silenced():
            program = torch.onnx.export(
                Deployed(policy),
                kwargs={"obs": {key: torch.from_numpy(x) for key, x in example.items()}},
                dynamo=True,
                input_names=list(map(input_name, example)),
                output_names=list(outputs),
                dynamic_shapes={"obs": {key: {0: batch} for key in example}},
                verbose=False,
            )
    except Exception as error:  # the exporter's own errors are many, and long
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ExportError(f"{policy.path}: torch cannot export this network: {reason}") from error
    assert program is not None
    program.model.metadata_props.update(
        keel=__version__,
        env=policy.config.env,
        run=str(policy.path),
        step=str(policy.step),
        action_space=str(policy.action_space),
        observations=json.dumps(
            {input_name(key): [str(x.dtype), *x.shape[1:]] for key, x in example.items()}
        ),
    )
    program.save(str(path))
    return outputs


def compare(policy: Policy, path: Path, obs: dict[str, np.ndarray]) -> float:
    """Return the largest difference between a file in onnxruntime and Keel's own way of acting.

    Where two actions are equally likely either may be chosen, so discrete actions are compared by
    their log-probability.
    """
    action, second, *states = run_onnx(path, {input_name(key): x for key, x in obs.items()})
    normalizer, dist = policy.normalizer, policy.agent.dist
    normalized = obs if normalizer is None else normalizer.apply(obs)
    tree = {key: torch.from_numpy(x) for key, x in normalized.items()}
    with torch.no_grad():
        output, memory = act_once(_load_network(policy), tree)
        params = dist.params(output, tree.get(MASK), 1.0)
    expected = dist.to_env(dist.mode(output.numpy(), normalized.get(MASK)))
    if isinstance(policy.action_space, spaces.Box):
        expected = np.clip(expected, policy.action_space.low, policy.action_space.high)
        pairs = [(action, expected), (second, params["log_std"].numpy())]
    else:
        chosen, best = (
            dist.log_prob(params, torch.from_numpy(np.asarray(x))).numpy()
            for x in (action, expected)
        )
        pairs = [(chosen, best), (second, params["logits"].numpy())]
    if memory is not None:
        pairs.append((states[0], memory.numpy()))
    difference = max(_difference(actual, expected_output) for actual, expected_output in pairs)
    size = max(float(np.abs(x[np.isfinite(x)]).max(initial=1.0)) for _, x in pairs)
    if not difference <= TOLERANCE * size:
        raise ExportError(
            f"{policy.path}: the exported file differs from the policy by {difference:.3g} "
            f"(allowed {TOLERANCE * size:.3g}); it was removed"
        )
    return difference


def run_onnx(path: Path, obs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run an exported file on one thread of the CPU, and return its outputs."""
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, obs))


def _difference(actual: np.ndarray, expected: np.ndarray) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    differs = actual != expected  # −inf is −inf
    gap = np.abs(actual[differs].astype(float) - expected[differs])
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence the exporter, which reports packages it does not need and its deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
