"""Guarded policy of the router: the policy chooses a backend, inside of guards around a heuristic.

The policy gets the observations it was trained on (`keel.apps.serving.observations`), here in
numpy. Its distribution over backends, and that of the reference, are summed over a window of
decisions; the KL between the two sums measures how far the policy has moved traffic away from the
reference. (Decision by decision the KL of a confident policy would be large even where both
distribute traffic alike.)
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keel.apps.serving import fields as f
from keel.apps.serving.arrays import Floats, View, blank_view
from keel.apps.serving.observations import REPLICA, REQUEST, UNKNOWN_PACE
from keel.apps.serving.simulation import HEURISTICS
from keel.errors import InputError, check_choice

log = logging.getLogger("keel.route")

Features = NDArray[np.float32]
Mask = NDArray[np.bool_]
ScoreFunction = Callable[[Features, Features], Features]
"""Function from replicas `[R, 11]` and a request `[2]` to scores `[R]`."""

SMOOTHING = 0.1
"""Share of the reference that is spread evenly: its KL to any policy is finite."""
FAULTS_IN_A_ROW, REST = 3, 1.0
"""Faults in a row after which the policy is not called, and for how many seconds: a slow policy
delays all requests."""
FALLBACK_REASONS = {
    "no_policy": "there is no policy",
    "error": "the policy failed",
    "not_finite": "the policy's scores are no numbers",
    "slow": "the policy took longer than --deadline-ms",
    "kl": "the policy is farther from the reference than --max-kl",
    "share": "one backend gets more than --max-share",
}
"""Reasons to fall back to the reference."""


def observe(view: View, prompt: int, now: float) -> tuple[Features, Features]:
    """Return the policy's observation, as `kernels_vector.write_observation` does for training.

    Args:
        view: What is known of R backends.
        prompt: Tokens of the request's prompt.
        now: Time in seconds.

    Returns:
        Features of the replicas `[R, 11]` and of the request `[2]`.
    """
    ints, times = view.ints, view.times
    outstanding = ints[f.V_WAITING] + ints[f.V_RUNNING] + ints[f.V_SENT]
    up, known = ints[f.V_UP] == 1, times[f.V_PACE] > 0.0
    log_pace = np.log(np.where(known, times[f.V_PACE], 1.0))
    up_paces = log_pace[known & up]
    typical = float(up_paces.mean()) if up_paces.size else UNKNOWN_PACE
    pace = np.where(known, log_pace, typical) - UNKNOWN_PACE
    tokens, to_read = ints[f.V_UNREAD] + ints[f.V_SENT_TOKENS], prompt - ints[f.V_HIT]
    replicas = np.empty((len(outstanding), len(REPLICA)), dtype=np.float32)
    replicas[:, 0] = np.log1p(outstanding)
    replicas[:, 1] = np.log1p(ints[f.V_RUNNING])
    replicas[:, 2] = np.log1p(tokens / 512.0)
    replicas[:, 3] = times[f.V_MEMORY]
    replicas[:, 4] = pace
    replicas[:, 5] = ints[f.V_HIT] / prompt
    replicas[:, 6] = np.log1p(to_read / 512.0)
    replicas[:, 7] = np.log1p(ints[f.V_SENT])
    replicas[:, 8] = np.log1p(np.maximum(0.0, now - times[f.V_REPORTED]))
    replicas[:, 9] = np.log1p(outstanding) + pace
    replicas[:, 10] = np.log1p((tokens + to_read) / 512.0) + pace
    request = np.empty(len(REQUEST), dtype=np.float32)
    request[0] = math.log1p(prompt / 512.0)
    request[1] = math.log1p(outstanding[up].sum() / max(1, up.sum()))
    return replicas, request


def heuristic_costs(name: str, view: View, prompt: int, output: float) -> Floats:
    """Return the costs that a heuristic minimizes, `[R]`, as `kernels_route.heuristic_cost` does.

    Args:
        name: The heuristic.
        view: What is known of R backends.
        prompt: Tokens of the request's prompt.
        output: Expected tokens of an answer.
    """
    ints = view.ints
    reported: Floats = np.asarray(ints[f.V_WAITING] + ints[f.V_RUNNING], dtype=np.float64)
    outstanding: Floats = reported + ints[f.V_SENT]
    if name in ("least-outstanding", "power-of-two"):
        return reported
    if name == "local-count":
        return outstanding
    if name == "sticky":
        return np.asarray(outstanding - 1e9 * (ints[f.V_HIT] / prompt))
    pace = view.times[f.V_PACE]
    typical = pace[pace > 0.0].mean() if (pace > 0.0).any() else 1.0
    pace = np.where(pace > 0.0, pace, typical)
    if name == "least-by-speed":
        return np.asarray((outstanding + 1.0) * pace)
    work: Floats = ints[f.V_UNREAD] + ints[f.V_SENT_TOKENS] + output * outstanding
    if name == "token-work":
        return work
    work = work + prompt - ints[f.V_HIT]
    return work if name == "cache-work" else np.asarray(work * pace)


def reference_probs(name: str, view: View, prompt: int, output: float, allowed: Mask) -> Floats:
    """Return the probability that a heuristic takes each backend, `[R]`; uniform for round robin.

    Args:
        name: The heuristic.
        view: What is known of R backends.
        prompt: Tokens of the request's prompt.
        output: Expected tokens of an answer.
        allowed: Backends that may be taken, `[R]`.
    """
    weights = allowed.astype(np.float64)
    if name not in ("random", "round-robin"):
        costs = np.where(allowed, heuristic_costs(name, view, prompt, output), np.inf)
        weights = (costs == costs.min()).astype(np.float64)
    if name == "power-of-two":
        own = np.arange(len(costs))
        better = np.where(costs[:, None] <= costs, own[:, None], own)[np.ix_(allowed, allowed)]
        weights = np.bincount(better.ravel(), minlength=len(own)).astype(np.float64)
    probs: Floats = weights / weights.sum()
    return probs


@dataclass(frozen=True)
class Guards:
    """Limits of the policy; beyond them the reference decides."""

    max_kl: float = 0.5
    """nats between the policy's traffic and the reference's"""
    max_share: float = 0.6
    """largest share of the decisions for one backend"""
    deadline: float = 0.002
    """seconds for a decision of the policy"""
    window: int = 200
    """length of the window in decisions"""
    enough: int = 20
    """decisions before KL and shares mean anything"""

    def __post_init__(self) -> None:
        if not self.max_kl > 0.0:
            raise InputError(f"--max-kl: expected more than 0, got {self.max_kl:g}")
        if not 0.0 < self.max_share <= 1.0:
            raise InputError(f"--max-share: expected more than 0 and 1 at most: {self.max_share:g}")
        if not self.deadline > 0.0:
            raise InputError(f"--deadline-ms: expected more than 0, got {1e3 * self.deadline:g}")
        if self.window < self.enough:
            raise InputError(f"--window: expected at least {self.enough}, got {self.window}")


class RollingSum:
    """Sum over the last `length` rows `[R]`."""

    def __init__(self, length: int, width: int) -> None:
        self._rows: deque[Floats] = deque()
        self._length, self.sum = length, np.zeros(width)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Floats) -> None:
        """Add a row, and drop the oldest when there are too many."""
        self._rows.append(row)
        self.sum += row
        if len(self._rows) > self._length:
            self.sum -= self._rows.popleft()

    def shares(self) -> Floats:
        """Return the mean row `[R]`: shares that sum to one."""
        return np.maximum(self.sum, 0.0) / max(1, len(self._rows))


@dataclass(frozen=True)
class Decision:
    """Chosen backend, and the reason for a fallback."""

    backend: int
    fallback: str = ""
    """a name of `FALLBACK_REASONS`; empty: the policy's own choice"""


@dataclass
class GuardedPolicy:
    """Policy inside of guards: falls back to a heuristic, and logs when it does.

    Args:
        count: Number of backends, R.
        policy: The trained policy; without one the reference decides.
        reference: The heuristic that the policy is compared with and falls back to.
        guards: Limits of the policy.
        seed: Seed of the reference's random choices.
        clock: Source of seconds, for tests.
    """

    count: int
    policy: ScoreFunction | None = None
    reference: str = "least-outstanding"
    guards: Guards = field(default_factory=Guards)
    seed: int | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        check_choice("--reference", self.reference, HEURISTICS)
        width, length = self.count, self.guards.window
        self.policy_traffic, self.reference_traffic, self.decisions = (
            RollingSum(length, width) for _ in range(3)
        )
        self.episodes: Counter[str] = Counter()
        self._since_fallback: dict[str, int] = {}
        self._rng, self._turn = np.random.default_rng(self.seed), 0
        self._faults, self._fault, self._error, self._rest_until = 0, "", "", -math.inf

    def __call__(
        self, view: View, prompt: int, now: float, allowed: Mask, output: float = 256.0
    ) -> Decision:
        """Choose a backend for a request.

        Args:
            view: What is known of R backends.
            prompt: Tokens of the request's prompt.
            now: Time in seconds.
            allowed: Backends that may be taken, `[R]`; at least one.
            output: Expected tokens of an answer.
        """
        probs = reference_probs(self.reference, view, prompt, output, allowed)
        policy_probs, fallback = self._policy_probs(view, prompt, now, allowed)
        if policy_probs is not None:
            self.policy_traffic.add(policy_probs)
            self.reference_traffic.add(
                (1.0 - SMOOTHING) * probs + SMOOTHING * allowed / allowed.sum()
            )
            fallback = self._guard_reason(int(allowed.sum()))
        self._log_fallback(fallback)
        if policy_probs is not None and not fallback:
            backend = int(policy_probs.argmax())
        elif self.reference == "round-robin":
            backend = self._next_in_turn(allowed)
        else:
            backend = int(self._rng.choice(self.count, p=probs))
        self.decisions.add(np.eye(self.count)[backend])
        return Decision(backend, fallback)

    def warm_up(self) -> None:
        """Call the policy once: its first call is slow, and no request should wait for it."""
        self._policy_probs(blank_view(self.count), 1, 0.0, np.ones(self.count, dtype=np.bool_))
        self._faults, self._rest_until = 0, -math.inf

    def kl(self) -> float:
        """KL(policy‖reference) of the traffic over the window, in nats."""
        p, q = self.policy_traffic.shares(), self.reference_traffic.shares()
        some = p > 1e-12
        return float((p[some] * np.log(p[some] / np.maximum(q[some], 1e-12))).sum())

    def falling_back(self) -> tuple[str, ...]:
        """Reasons for which the policy was overruled within the window."""
        return tuple(self._since_fallback)

    def _policy_probs(
        self, view: View, prompt: int, now: float, allowed: Mask
    ) -> tuple[Floats | None, str]:
        """Return the policy's distribution `[R]`, or None and the reason to fall back."""
        if self.policy is None:
            return None, "no_policy"
        begun = self.clock()
        if begun < self._rest_until:
            return None, self._fault
        try:
            scores = np.asarray(self.policy(*observe(view, prompt, now)), dtype=np.float64)[allowed]
            fault = "" if np.isfinite(scores).all() else "not_finite"
        except Exception as error:  # whatever it is: requests go on
            fault, self._error = "error", f": {error!r}"
        ended = self.clock()
        if not fault and ended - begun > self.guards.deadline:
            fault = "slow"
        self._faults = self._faults + 1 if fault else 0
        if fault:
            self._fault = fault
            if self._faults >= FAULTS_IN_A_ROW:
                self._rest_until = ended + REST
            return None, fault
        policy_probs = np.zeros(self.count)
        weight = np.exp(scores - scores.max())
        policy_probs[allowed] = weight / weight.sum()
        return policy_probs, ""

    def _guard_reason(self, up_count: int) -> str:
        guards = self.guards
        if len(self.policy_traffic) >= guards.enough and self.kl() > guards.max_kl:
            return "kl"
        limit = max(guards.max_share, 1.0 / up_count)
        enough = len(self.decisions) >= guards.enough and up_count > 1
        return "share" if enough and self.decisions.shares().max() > limit else ""

    def _log_fallback(self, fallback: str) -> None:
        """Log each episode of fallback once.

        An episode ends with a whole window of decisions without its reason.
        """
        for reason in list(self._since_fallback):
            self._since_fallback[reason] += 1
            if self._since_fallback[reason] > self.guards.window:
                del self._since_fallback[reason]
                log.warning("no longer falling back: %s", FALLBACK_REASONS[reason])
        if fallback:
            if fallback not in self._since_fallback:
                self.episodes[fallback] += 1
                why = FALLBACK_REASONS[fallback] + (self._error if fallback == "error" else "")
                if fallback != "no_policy":  # without a policy, fallback is expected
                    log.warning("FALLING BACK to %s: %s", self.reference, why)
            self._since_fallback[fallback] = 0

    def _next_in_turn(self, allowed: Mask) -> int:
        while True:
            backend, self._turn = self._turn % self.count, self._turn + 1
            if allowed[backend]:
                return backend
