"""Keel beside a peer, in turns: other load on the machine slows both sides alike."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.bench.settings import ENVPOOL_PEERS, PEERS, Algo, Backend, Settings, settings_for
from keel.bench.workers import Reading, Workers
from keel.errors import InputError, check_choice
from keel.resources import cores

LogLine = Callable[[str], None]
Caches = tuple[Path, Path]


@dataclass(frozen=True)
class Result:
    """Medians of both sides; speeds are steps per second, of `tokens` tokens per second."""

    env: str
    peer_name: str
    mode: str
    ours: float
    peer: float
    ratio: float
    """Speed of ours over that of the peer: the median of the pairs."""
    repeats: int
    floor: float | None
    """Rate that the environment and the network's arithmetic alone would allow; not of `tokens`."""
    ours_peak_mb: float
    peer_peak_mb: float
    peer_threads: int
    settings: dict[str, Any]
    versions: dict[str, dict[str, str]]
    choices: dict[str, Any]
    """Choices that ours made by itself: backend, compile, threads."""
    floor_details: dict[str, Any]
    overhead: dict[str, float]
    """shares of our iterations: `certify` (exact KL, its metrics) and `guard`"""
    all_ours: list[float] = field(default_factory=list)
    all_peer: list[float] = field(default_factory=list)
    thread_trials: dict[str, float] = field(default_factory=dict)
    """the peer's speed by number of threads, tried once"""
    updates: dict[str, float] = field(default_factory=dict)
    """medians of the seconds of one update, of both sides, and `ratio`, the median of the pairs"""
    whole: dict[str, float] | None = None
    """seconds from process start to end, with cold and with warm compile caches"""


def bench(
    algo: Algo,
    env: str,
    peer: str,
    *,
    repeats: int = 3,
    iterations: int | None = None,
    whole: int | None = None,
    backend: Backend = "auto",
    log: LogLine = lambda line: None,
    workers: Workers | None = None,
) -> Result:
    """Measure `algo` on `env`, ours and the peer in turns of a few iterations, a process each.

    Args:
        algo: ppo, trpo, or tokens: GRPO on a language model.
        env: CartPole-v1, HalfCheetah-v5 or Breakout; of tokens qwen3-0.8m, a model.
            `keel.bench.settings` holds the details.
        peer: sb3, sbx or cleanrl for PPO, sb3-contrib for TRPO, trl for tokens.
        repeats: how often each side is measured; the medians count.
        iterations: measured per repeat, after a warm-up; None: as suits the environment.
        whole: measure whole runs of so many steps, start-up and compiling included.
        backend: `auto`, the environments that each side makes by itself; `sync`, Gymnasium's one
            after the other on both; `envpool`, EnvPool's on both.
        log: called with one line per measurement.
    """
    name = check_choice("peer", peer, PEERS[algo])
    settings = settings_for(env, iterations, algo, backend)
    if backend == "envpool" and (settings.pixels or name not in ENVPOOL_PEERS):
        raise InputError(
            f"backend: EnvPool on both sides needs a peer of {', '.join(ENVPOOL_PEERS)} and an "
            f"environment without pixels, got {name} on {env}"
        )
    if repeats < 1:
        raise InputError(f"repeats: expected at least 1, got {repeats}")
    if whole is not None and whole < 1:
        raise InputError(f"whole: expected at least 1 step, got {whole}")
    workers = workers or Workers()
    workers.check()
    run = _Run(workers, settings, name, log)
    floor = None if algo == "tokens" else run.measure("floor", settings, "floor")
    trials = run.trials(sorted({1, cores()}))
    threads = max(trials, key=lambda count: trials[count])
    log(f"{name}: {threads} thread{'s' * (threads > 1)} it is")
    if whole is None:
        sides, seconds = run.steady(threads, repeats), None
    else:
        settings = settings.whole(whole)
        sides, seconds = run.whole(settings, threads, repeats)
    return _result(sides, settings, name, repeats, floor, trials, seconds)


def _result(
    sides: tuple[list[Reading], list[Reading]],
    settings: Settings,
    peer: str,
    repeats: int,
    floor: Reading | None,
    trials: dict[int, float],
    seconds: dict[str, float] | None,
) -> Result:
    """Return medians and details of the readings of both sides."""
    our_rate, peer_rate = (statistics.median(reading.rate for reading in side) for side in sides)
    return Result(
        env=settings.env,
        peer_name=peer,
        mode=settings.mode,
        ours=our_rate,
        peer=peer_rate,
        ratio=statistics.median(a.rate / b.rate for a, b in zip(*sides, strict=True)),
        repeats=repeats,
        floor=None if floor is None else floor.rate,
        ours_peak_mb=max(reading.peak_mb for reading in sides[0]),
        peer_peak_mb=max(reading.peak_mb for reading in sides[1]),
        peer_threads=max(trials, key=lambda count: trials[count]),
        settings=dataclasses.asdict(settings),
        versions={"ours": sides[0][0].versions, "peer": sides[1][0].versions},
        choices=dict(sides[0][0].details.get("choices", {})),
        floor_details={} if floor is None else floor.details,
        overhead=_medians([reading.details.get("overhead", {}) for reading in sides[0]]),
        all_ours=[reading.rate for reading in sides[0]],
        all_peer=[reading.rate for reading in sides[1]],
        thread_trials={str(count): rate for count, rate in trials.items()},
        updates=_updates(*sides),
        whole=seconds,
    )


def _updates(our_readings: list[Reading], peer_readings: list[Reading]) -> dict[str, float]:
    """Return the times of updates without the environments, where both sides measured them."""
    both = [
        [r.details.get("update_seconds") for r in side] for side in (our_readings, peer_readings)
    ]
    pairs = [(float(a), float(b)) for a, b in zip(*both, strict=True) if a and b]
    if not pairs:
        return {}
    return {
        "ours": statistics.median(a for a, _ in pairs),
        "peer": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


@dataclass(frozen=True)
class _Run:
    workers: Workers
    settings: Settings
    peer: str
    log: LogLine

    @property
    def ours(self) -> str:
        """Name of the worker of our side."""
        return "keel-tokens" if self.settings.algo == "tokens" else "keel"

    def measure(
        self, name: str, settings: Settings, label: str, caches: Caches | None = None
    ) -> Reading:
        reading = self.workers.run(name, settings, _environment(caches))
        if settings.mode == "whole":
            # the rate of a whole run is over its wall time, as its user waits for it
            steps = settings.iterations * settings.batch
            reading = dataclasses.replace(reading, rate=steps / reading.wall)
            seconds = f"{reading.wall:,.1f} s, "
        else:
            seconds = ""
        self.log(f"{label}: {seconds}{reading.rate:,.0f} {settings.unit}/s")
        return reading

    def trials(self, counts: list[int]) -> dict[int, float]:
        """Race the peer against itself with these numbers of threads, over half the iterations."""
        short = self.settings.replace(iterations=max(1, self.settings.iterations // 2))
        jobs = [(self.peer, short.replace(threads=count)) for count in counts]
        rates = [reading.rate for reading in self.workers.race(*jobs)]
        for count, rate in zip(counts, rates, strict=True):
            self.log(f"{self.peer}, {count} thread(s), trial: {rate:,.0f} {short.unit}/s")
        return dict(zip(counts, rates, strict=True))

    def steady(self, threads: int, repeats: int) -> tuple[list[Reading], list[Reading]]:
        pairs = []
        job, peer_job = self.settings, self.settings.replace(threads=threads)
        for repeat in range(1, repeats + 1):
            pair = self.workers.race((self.ours, job), (self.peer, peer_job))
            ours, peer = (reading.rate for reading in pair)
            both = f"keel {ours:,.0f}, {self.peer} {peer:,.0f} {job.unit}/s"
            self.log(f"{repeat}/{repeats}: {both}, {ours / peer:.2f}×")
            pairs.append(pair)
        return [ours for ours, _ in pairs], [peer for _, peer in pairs]

    def whole(
        self, settings: Settings, threads: int, repeats: int
    ) -> tuple[tuple[list[Reading], list[Reading]], dict[str, float]]:
        """Measure cold and warm runs in turn; both sides get compile caches of their own."""
        readings: dict[tuple[str, str], list[Reading]] = {}
        jobs = {self.ours: settings, self.peer: settings.replace(threads=threads)}
        for repeat in range(1, repeats + 1):
            with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
                for state in ("cold", "warm"):
                    for name, job in jobs.items():
                        caches = Path(folder) / f"{name}-torch", Path(folder) / f"{name}-jax"
                        label = f"{name} {state} {repeat}/{repeats}"
                        reading = self.measure(name, job, label, caches)
                        readings.setdefault((name, state), []).append(reading)
        seconds = {
            f"{side}_{state}_seconds": statistics.median(r.wall for r in readings[name, state])
            for side, name in (("ours", self.ours), ("peer", self.peer))
            for state in ("cold", "warm")
        }
        for state in ("cold", "warm"):
            peer, ours = seconds[f"peer_{state}_seconds"], seconds[f"ours_{state}_seconds"]
            seconds[f"ratio_{state}"] = peer / ours
        return (readings[self.ours, "warm"], readings[self.peer, "warm"]), seconds


def _medians(tables: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(table[key] for table in tables) for key in tables[0]}


def _environment(caches: Caches | None) -> dict[str, str]:
    if caches is None:
        return {}
    inductor, jax = map(str, caches)
    return {
        "TORCHINDUCTOR_CACHE_DIR": inductor,
        "NUMBA_CACHE_DIR": inductor,
        "JAX_COMPILATION_CACHE_DIR": jax,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
