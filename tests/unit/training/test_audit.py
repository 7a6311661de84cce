"""An audit of runs from raw parameters: KL(what acted ‖ what acts next), by a forward pass of its
own in float64, statistics and temperature included, is inside the bound after every update; so is
the KL between both without their temperatures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from keel.config import from_dict
from keel.presets import preset
from keel.training.environments import EnvironmentSource
from keel.training.loop import TrainState, run
from keel.training.session import initial_state, open_session

ROUNDING = 1e-4
"""Share of the bound by which float32 may be off."""


class Drifting(gymnasium.Env[np.ndarray, np.ndarray]):
    """Observations whose scale and offset double every 100 steps: statistics never settle."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.steps = 0

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**kwargs)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observe(), float(-np.abs(action - 0.5).sum()), self.steps % 30 == 0, False, {}

    def _observe(self) -> np.ndarray:
        scale = 2.0 ** (self.steps / 100.0)
        return (scale * (1.0 + self.np_random.normal(size=3))).astype(np.float32)


DRIFTING = "keel/Drifting-v0"
if DRIFTING not in gymnasium.registry:
    gymnasium.register(DRIFTING, Drifting)  # type: ignore[arg-type]

NORMALISED = {"envs": {"num": 4, "backend": "sync", "normalize_obs": True}}
PULSES = {"explore": {"pulses": True, "pulse_interval": 2, "pulse_magnitude": 3.0}}
LADDER = {"explore": {"hierarchical": True, "pulse_interval": 2, "pulse_magnitude": 3.0}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "HalfCheetah, TRPO": ("halfcheetah-trpo", {}),
    "Walker2d, TRPO": ("walker2d-trpo", {}),
    "HalfCheetah, PPO": ("HalfCheetah", {"env": "HalfCheetah-v5"}),
    "drifting, PPO": ("default", {"env": DRIFTING, **NORMALISED}),
    "drifting, TRPO": ("default-trpo", {"env": DRIFTING, **NORMALISED}),
    "pulses, PPO": ("default", {"env": "CartPole-v1", **PULSES}),
    "pulses, TRPO": ("default-trpo", {"env": "CartPole-v1", **PULSES}),
    "ladder, PPO": ("default", {"env": "CartPole-v1", **LADDER}),
    "ladder, TRPO": ("default-trpo", {"env": "CartPole-v1", **LADDER}),
}


@dataclass
class Acting:
    """A policy as it acts: weights by name, scaling of observations, temperature; in float64."""

    weights: dict[str, np.ndarray]
    mean: np.ndarray | float
    inverse: np.ndarray | float
    temperature: float

    @classmethod
    def of(cls, source: EnvironmentSource, state: TrainState) -> Acting:
        named = source.agent.layout.unflatten(state.opt_state.params[0])
        mean: Any = 0.0
        inverse: Any = 1.0
        if source.obs_normalizer is not None:
            mean, inverse = (x.astype(np.float64) for x in source.obs_normalizer.scaling["obs"])
        weights = {name: x.numpy().astype(np.float64) for name, x in named.items()}
        return cls(weights, mean, inverse, source.temperature)

    def output(self, raw: np.ndarray) -> np.ndarray:
        """The last layer of the actor, `[R, K]`; hidden layers are tanh."""
        normalized = not isinstance(self.mean, float)
        x = (raw - self.mean) * self.inverse
        x = np.clip(x, -10.0, 10.0) if normalized else x
        layers = sum(name.startswith("actor.layers") for name in self.weights) // 2
        for i in range(layers):
            weight, bias = (self.weights[f"actor.layers.{i}.{kind}"] for kind in ("weight", "bias"))
            x = x @ weight.T + bias
            x = np.tanh(x) if i < layers - 1 else x
        return x

    def kl_to(self, other: Acting, raw: np.ndarray) -> np.ndarray:
        """KL(self‖other) of every row, `[R]`."""
        ours, theirs = self.output(raw), other.output(raw)
        if "head.log_std" in self.weights:
            s, t = self.weights["head.log_std"], other.weights["head.log_std"]
            terms = t - s + (np.exp(2 * s) + (ours - theirs) ** 2) / (2 * np.exp(2 * t)) - 0.5
            return terms.sum(1)
        p, q = (
            logits - np.logaddexp.reduce(logits, -1, keepdims=True)
            for logits in (ours / self.temperature, theirs / other.temperature)
        )
        return (np.exp(p) * (p - q)).sum(1)


@pytest.mark.parametrize("name", RUNS)
def test_what_acts_next_is_inside_the_bound_of_what_acted(name: str) -> None:
    of, changes = RUNS[name]
    small = {"rollout_steps": 256, "total_steps": 100_000, "seed": 3}
    session = open_session(from_dict(small | changes, base=preset(of)))
    source: Any = session.source
    try:
        state, used, temperatures = initial_state(session), [], {1.0}
        new = Acting.of(source, state)
        for iteration in run(session, state):
            old, new = new, Acting.of(source, iteration.state)
            store = source.collector._store
            raw = store.get("raw/obs", store["obs/obs"]).astype(np.float64)
            counts = ~store["ignored"].reshape(-1)
            rows = raw.reshape(-1, raw.shape[-1])[counts]
            without = replace(old, temperature=1.0).kl_to(replace(new, temperature=1.0), rows)
            kl = max(old.kl_to(new, rows).mean(), without.mean())
            bound = iteration.metrics["train/max_kl"]
            assert kl <= bound * (1.0 + ROUNDING)
            assert kl == pytest.approx(iteration.metrics["train/kl_exact"], rel=1e-3, abs=1e-7)
            used.append(kl / bound)
            temperatures.add(source.temperature)
            if iteration.state.iteration == 12:
                break
    finally:
        source.close()
    assert max(used) > 0.05, "an update that goes nowhere keeps any bound"
    heated = "pulses" in name or "ladder" in name
    assert (max(temperatures) == 3.0) == heated, "a pulse gets to its height"
    if source.obs_normalizer is not None:
        assert not np.array_equal(source.obs_normalizer.scaling["obs"].mean, 0.0 * rows[0])
