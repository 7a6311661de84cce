"""Which backend gets a request: the policy's choice, and guards that hold it to a heuristic.

The policy sees the numbers it was trained on (`keel.apps.serving.observations`), here in numpy. Its
distribution over backends, and that of the reference, are added up over a window of decisions; the
KL between the two sums says how far the policy has moved traffic away from where the reference
would have it. (Decision by decision the KL of a policy that knows what it wants would be large even
where both share traffic alike.)
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
from keel.apps.serving.simulation import HONEST
from keel.errors import InputError, check_choice

log = logging.getLogger("keel.route")

Numbers = NDArray[np.float32]
Mask = NDArray[np.bool_]
Scoring = Callable[[Numbers, Numbers], Numbers]
"""Of replicas `[R, 11]` and a request `[2]`: scores `[R]`."""

SMOOTHING = 0.1
"""Share of the reference that is spread evenly: its KL to any policy is finite."""
FAULTS_IN_A_ROW, REST = 3, 1.0
"""After so many faults the policy rests for so many seconds: a slow one holds up everybody."""
WHY = {
    "no_policy": "there is no policy",
    "error": "the policy failed",
    "not_finite": "the policy's scores are no numbers",
    "slow": "the policy took longer than --deadline-ms",
    "kl": "the policy is farther from the reference than --max-kl",
    "share": "one backend gets more than --max-share",
}
"""Reasons to fall back to the reference."""


def see(view: View, prompt: int, now: float) -> tuple[Numbers, Numbers]:
    """Make the numbers of `observations.py` as `kernels_vector.see` does for training."""
    ints, times = view.ints, view.times
    outstanding = ints[f.V_WAITING] + ints[f.V_RUNNING] + ints[f.V_SENT]
    up, known = ints[f.V_UP] == 1, times[f.V_PACE] > 0.0
    log_pace = np.log(np.where(known, times[f.V_PACE], 1.0))
    told = log_pace[known & up]
    typical = float(told.mean()) if told.size else UNKNOWN_PACE
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


def burdens(name: str, view: View, prompt: int, output: float) -> Floats:
    """What a heuristic would rather have less of, `[R]`; as in `kernels_route.score`."""
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


def reference_odds(name: str, view: View, prompt: int, output: float, allowed: Mask) -> Floats:
    """How likely a heuristic takes each backend, `[R]`; round robin takes all alike."""
    chances = allowed.astype(np.float64)
    if name not in ("random", "round-robin"):
        burden = np.where(allowed, burdens(name, view, prompt, output), np.inf)
        chances = (burden == burden.min()).astype(np.float64)
    if name == "power-of-two":
        own = np.arange(len(burden))
        better = np.where(burden[:, None] <= burden, own[:, None], own)[np.ix_(allowed, allowed)]
        chances = np.bincount(better.ravel(), minlength=len(own)).astype(np.float64)
    odds: Floats = chances / chances.sum()
    return odds


@dataclass(frozen=True)
class Guards:
    """How far the policy may go."""

    max_kl: float = 0.5
    """nats between the policy's traffic and the reference's"""
    max_share: float = 0.6
    """of the decisions, for one backend"""
    deadline: float = 0.002
    """seconds for a decision of the policy"""
    window: int = 200
    """decisions"""
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


class Window:
    """Sums over the last so many rows `[R]`."""

    def __init__(self, length: int, width: int) -> None:
        self._rows: deque[Floats] = deque()
        self._length, self.sum = length, np.zeros(width)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Floats) -> None:
        """The oldest row goes when there are too many."""
        self._rows.append(row)
        self.sum += row
        if len(self._rows) > self._length:
            self.sum -= self._rows.popleft()

    def shares(self) -> Floats:
        """That sum to one."""
        return np.maximum(self.sum, 0.0) / max(1, len(self._rows))


@dataclass(frozen=True)
class Decision:
    """Which backend, and why not by the policy."""

    where: int
    fallback: str = ""
    """a name of `WHY`; empty: the policy's own choice"""


@dataclass
class Chooser:
    """Decides, remembers its decisions, and tells loudly when the policy is overruled."""

    count: int
    policy: Scoring | None = None
    reference: str = "least-outstanding"
    guards: Guards = field(default_factory=Guards)
    seed: int | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        check_choice("--reference", self.reference, HONEST)
        width, length = self.count, self.guards.window
        self.wanted, self.expected, self.taken = (Window(length, width) for _ in range(3))
        self.episodes: Counter[str] = Counter()
        self._quiet: dict[str, int] = {}
        self._rng, self._turn = np.random.default_rng(self.seed), 0
        self._faults, self._fault, self._error, self._rest_until = 0, "", "", -math.inf

    def __call__(
        self, view: View, prompt: int, now: float, allowed: Mask, output: float = 256.0
    ) -> Decision:
        """For one request; at least one backend must be allowed."""
        odds = reference_odds(self.reference, view, prompt, output, allowed)
        wish, fallback = self._ask(view, prompt, now, allowed)
        if wish is not None:
            self.wanted.add(wish)
            self.expected.add((1.0 - SMOOTHING) * odds + SMOOTHING * allowed / allowed.sum())
            fallback = self._overruled(int(allowed.sum()))
        self._tell(fallback)
        if wish is not None and not fallback:
            where = int(wish.argmax())
        elif self.reference == "round-robin":
            where = self._next_in_turn(allowed)
        else:
            where = int(self._rng.choice(self.count, p=odds))
        self.taken.add(np.eye(self.count)[where])
        return Decision(where, fallback)

    def warm_up(self) -> None:
        """The first call of a policy is slow, and nobody's request should wait for it."""
        self._ask(blank_view(self.count), 1, 0.0, np.ones(self.count, dtype=np.bool_))
        self._faults, self._rest_until = 0, -math.inf

    def kl(self) -> float:
        """KL(policy‖reference) of the traffic over the window, in nats."""
        p, q = self.wanted.shares(), self.expected.shares()
        some = p > 1e-12
        return float((p[some] * np.log(p[some] / np.maximum(q[some], 1e-12))).sum())

    def falling_back(self) -> tuple[str, ...]:
        """Reasons for which the policy was overruled within the window."""
        return tuple(self._quiet)

    def _ask(self, view: View, prompt: int, now: float, allowed: Mask) -> tuple[Floats | None, str]:
        """The policy's distribution, or what is wrong with it."""
        if self.policy is None:
            return None, "no_policy"
        begun = self.clock()
        if begun < self._rest_until:
            return None, self._fault
        try:
            scores = np.asarray(self.policy(*see(view, prompt, now)), dtype=np.float64)[allowed]
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
        wish = np.zeros(self.count)
        weight = np.exp(scores - scores.max())
        wish[allowed] = weight / weight.sum()
        return wish, ""

    def _overruled(self, living: int) -> str:
        guards = self.guards
        if len(self.wanted) >= guards.enough and self.kl() > guards.max_kl:
            return "kl"
        limit = max(guards.max_share, 1.0 / living)
        enough = len(self.taken) >= guards.enough and living > 1
        return "share" if enough and self.taken.shares().max() > limit else ""

    def _tell(self, fallback: str) -> None:
        """Once for each episode; one ends with a whole window of decisions without its reason."""
        for reason in list(self._quiet):
            self._quiet[reason] += 1
            if self._quiet[reason] > self.guards.window:
                del self._quiet[reason]
                log.warning("no longer falling back: %s", WHY[reason])
        if fallback:
            if fallback not in self._quiet:
                self.episodes[fallback] += 1
                why = WHY[fallback] + (self._error if fallback == "error" else "")
                if fallback != "no_policy":  # which nobody expected
                    log.warning("FALLING BACK to %s: %s", self.reference, why)
            self._quiet[fallback] = 0

    def _next_in_turn(self, allowed: Mask) -> int:
        while True:
            where, self._turn = self._turn % self.count, self._turn + 1
            if allowed[where]:
                return where
