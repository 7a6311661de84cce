"""Run probes: through Keel's algorithm, or through somebody else's training function."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from keel.errors import InputError
from keel.probes.agents import AGENTS
from keel.probes.catalogue import DECISIONS, PROBES, Probe
from keel.probes.decisions import DecisionEnv

Act = Callable[[Any], Any]
"""From one observation to one action."""
Trainer = Callable[[Callable[[], Any], int, int], Act]
"""`(make_env, total_steps, seed) -> act(obs)`: a training function from outside of Keel."""
TOLERANCE = 0.1
"""Largest relative error of a mean value that passes."""
EXPLAINED = 0.9
"""Least explained variance that passes."""
SOLVED = 0.9
"""Least share of right completions that passes."""
SHARE = 0.8
"""Least share of right actions of somebody else's policy, which may be random, in each state."""
TRIES = 20
LAST = 5
"""Updates whose mean is looked at."""


@dataclass(frozen=True)
class Outcome:
    """What came of one probe."""

    probe: Probe
    passed: bool
    measured: str
    """what was measured beside what is right"""
    seconds: float
    error: str = ""
    """what training raised"""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "probe": self.probe.name,
            "passed": self.passed,
            "isolates": self.probe.isolates,
            "measured": self.measured,
            "failure": None if self.passed else self.probe.failure,
            "error": self.error or None,
            "seconds": round(self.seconds, 2),
        }


def select(names: Sequence[str] = ()) -> list[Probe]:
    """Return probes by name, in their own order; all by default."""
    from keel.errors import check_choice

    chosen = {check_choice("probe", name, PROBES) for name in names} or set(PROBES)
    return [probe for name, probe in PROBES.items() if name in chosen]


def run_probes(
    probes: Sequence[Probe], settings: Mapping[str, Any] | None = None, seed: int = 0
) -> Iterator[Outcome]:
    """Train Keel on each probe, and yield what came of it.

    Args:
        probes: Of `select`.
        settings: Settings of Keel's runs that differ from the defaults, nested.
        seed: Of the runs.
    """
    for probe in probes:
        yield _timed(probe, partial(_judge_keel, probe, settings or {}, seed))


def run_elsewhere(trainer: Trainer, probes: Sequence[Probe], seed: int = 0) -> Iterator[Outcome]:
    """Train by somebody else's function on each probe that looks at actions alone.

    Args:
        trainer: `(make_env, total_steps, seed) -> act(obs)`.
        probes: Of `select`; those that look at values, agents or tokens are passed over.
        seed: Handed to the function.
    """
    for probe in probes:
        if probe.judged == "actions":
            yield _timed(probe, partial(_judge_elsewhere, trainer, probe, seed))


def _timed(probe: Probe, judge: Callable[[], tuple[bool, str]]) -> Outcome:
    started = time.perf_counter()
    try:
        passed, measured = judge()
    except InputError:
        raise
    except Exception as error:  # what training raises is the result of a probe
        message = f"{type(error).__name__}: {error}"
        return Outcome(probe, False, "training raised", time.perf_counter() - started, message)
    return Outcome(probe, passed, measured, time.perf_counter() - started)


def _judge_keel(probe: Probe, settings: Mapping[str, Any], seed: int) -> tuple[bool, str]:
    """Return whether a probe is passed, and what was measured."""
    with tempfile.TemporaryDirectory(prefix="keel-probe-") as runs:
        if probe.judged == "tokens":
            return _judge_tokens(runs, seed)
        run = _train(probe, settings, seed, runs)
        if probe.judged == "agents":
            return _judge_agents(run)
        decisions = DECISIONS[probe.name]
        if probe.judged == "value":
            return _judge_value(run, float(decisions.values(probe.gamma).max(axis=1).mean()))
        if probe.judged == "explained":
            explained = _end(run, "train/explained_variance")
            return explained > EXPLAINED, f"explained variance {explained:.3f}, wanted 1"
        policy = run.policy
        masks = decisions.legal or [None] * len(decisions.seen)
        chosen = [
            int(policy.act(np.array(seen, np.float32), mask=mask)[0])
            for seen, mask in zip(decisions.seen, masks, strict=True)
        ]
        return _judge_actions(probe, [[action] for action in chosen])


def _train(probe: Probe, settings: Mapping[str, Any], seed: int, runs: str) -> Any:
    """Train on a probe, in rollouts short enough for many updates."""
    from keel import train

    agents = probe.judged == "agents"
    options = {} if agents else {"decisions": probe.name}
    given = {
        "total_steps": probe.steps,
        "rollout_steps": 64,
        **settings,
        "seed": seed,
        "envs": {"num": 8, **settings.get("envs", {}), "normalize_reward": False}
        | {"options": options},
        "advantage": {**settings.get("advantage", {}), "gamma": probe.gamma},
        "evaluation": {"episodes": 0},
    }
    env = "keel.probes.agents:SameOpposite" if agents else "keel.probes.decisions:DecisionEnv"
    return train(env, runs=runs, progress=False, **given)


def _judge_value(run: Any, right: float) -> tuple[bool, str]:
    value = _end(run, "train/value_mean")
    near = abs(value - right) <= TOLERANCE * abs(right)
    return near, f"mean value {value:.3f}, right is {right:.3f}"


def _judge_agents(run: Any) -> tuple[bool, str]:
    wrong = []
    for bits in ((0, 0), (0, 1), (1, 0), (1, 1)):
        obs = {
            agent: np.array([2.0 * bit - 1.0], np.float32)
            for agent, bit in zip(AGENTS, bits, strict=True)
        }
        actions, _ = run.policy.act(obs)
        right = (bits[0], 1 - bits[1])
        wrong += [
            f"{agent} at {bits}"
            for agent, best in zip(AGENTS, right, strict=True)
            if int(actions[agent]) != best
        ]
    return not wrong, f"wrong: {', '.join(wrong)}" if wrong else "both right in all four cases"


def _judge_tokens(runs: str, seed: int) -> tuple[bool, str]:
    from keel import train

    run = train(
        "language",
        task="keel.probes.agents:TwoTokens",
        runs=runs,
        seed=seed,
        total_steps=3_840,
        control=False,
        preflight=False,
        warmup={"examples": 0},
        model={"hidden": 32, "layers": 1, "heads": 2},
        evaluation={"prompts": 20},
        region={"learning_rate": 1e-2, "max_kl": 0.2},
        progress=False,
    )
    solved = _end(run, "rollout/success")
    return solved >= SOLVED, f"{solved:.0%} of completions right, wanted 100 %"


def _judge_elsewhere(trainer: Trainer, probe: Probe, seed: int) -> tuple[bool, str]:
    act = trainer(lambda: DecisionEnv(probe.name), probe.steps, seed)
    if not callable(act):
        raise InputError(
            f"--trainer: the function must return act(obs), and returned {type(act).__name__}"
        )
    seen = (np.array(x, np.float32) for x in DECISIONS[probe.name].seen)
    return _judge_actions(probe, [[_action(act(x)) for _ in range(TRIES)] for x in seen])


def _action(returned: Any) -> int:
    """Return an action as a number; SB3's `predict` returns it beside a state."""
    action = returned[0] if isinstance(returned, tuple) else returned
    return int(np.asarray(action).reshape(-1)[0])


def _judge_actions(probe: Probe, chosen: Sequence[Sequence[int]]) -> tuple[bool, str]:
    """Judge actions that were tried in each state, `[S][tries]`."""
    best = DECISIONS[probe.name].best(probe.gamma)
    shares = [
        float(np.mean([best[state, action] for action in actions]))
        for state, actions in enumerate(chosen)
    ]
    matters = [not row.all() for row in best]  # where every action is best there is no wrong one
    wrong = [
        f"in state {state} action {max(set(actions), key=list(actions).count)}"
        for state, actions in enumerate(chosen)
        if matters[state] and shares[state] < SHARE
    ]
    if wrong:
        right = "; ".join(f"{np.flatnonzero(row).tolist()}" for row in best)
        return False, f"{', '.join(wrong)}; best are {right}"
    return True, "the best action in every state"


def _end(run: Any, metric: str) -> float:
    """Return the mean of the last known values of a metric."""
    column = run.metrics.columns.get(metric, np.array([math.nan]))
    known = column[np.isfinite(column)]
    return float(known[-LAST:].mean()) if len(known) else math.nan
