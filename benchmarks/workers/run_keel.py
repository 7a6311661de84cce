"""Keel, everything that is on by default (guard, gate, certificate, metrics) left on."""

import statistics
import time

from common import Clock, answer, job, total_steps

from keel.config import Advantage, Config, Envs, Explore, Natural, Network, Region
from keel.training.loop import run
from keel.training.session import initial_state, open_session

LONG_RUN = 10_000_000
"""Steady speed is that of a long run: what `compile="auto"` chooses depends on the length."""


def configuration(work) -> Config:
    whole = work.mode == "whole"
    return Config(
        env=work.env,
        algo=work.algo,
        seed=work.seed,
        total_steps=total_steps(work) if whole else max(LONG_RUN, total_steps(work)),
        rollout_steps=work.rollout_steps,
        envs=Envs(
            num=work.num_envs,
            backend=work.backend,
            normalize_obs=work.normalize,
            normalize_reward=work.normalize,
        ),
        network=Network(hidden=tuple(work.hidden), activation="tanh"),
        advantage=Advantage(gamma=work.gamma, lam=work.lam),
        region=Region(
            max_kl=work.max_kl if work.algo == "trpo" else Region.max_kl,
            clip=work.clip,
            value_coef=work.value_coef,
            epochs=work.epochs,
            minibatch=work.minibatch,
            learning_rate=work.learning_rate,
            schedule="constant",
            max_grad_norm=work.max_grad_norm,
        ),
        natural=Natural(cg_iters=work.cg_iters, damping=work.damping, fisher_fraction=1.0)
        if work.algo == "trpo"
        else Natural(),
        explore=Explore(entropy_coef=work.entropy_coef),
        threads=work.threads,
        compile=work.compile,
    )


def price(session, loop, iterations: int) -> dict[str, float]:
    """The shares of an iteration that the certificate takes, and the guard around the envs.

    Measured after the speed was: the stopwatches would slow it down.
    """
    spent = {"guarded": 0.0, "bare": 0.0}

    def timed(name, call):
        def wrapper(action):
            begin = time.perf_counter()
            result = call(action)
            spent[name] += time.perf_counter() - begin
            return result

        return wrapper

    guard = session.source.envs
    guard.envs.step = timed("bare", guard.envs.step)
    guard.step = timed("guarded", guard.step)
    certify, begin = 0.0, time.perf_counter()
    for _ in range(iterations):
        certify += next(loop).metrics["time/certify_seconds"]
    total = time.perf_counter() - begin
    return {"certify": certify / total, "guard": (spent["guarded"] - spent["bare"]) / total}


if __name__ == "__main__":
    work = job()
    session = open_session(configuration(work))
    clock, loop = Clock(work), run(session, initial_state(session))
    updates = []
    for _ in range(work.warmup + work.iterations):
        clock.tick()
        updates.append(next(loop).metrics["time/update_seconds"])
    clock.tick()
    overhead = price(session, loop, max(2, work.iterations // 4)) if work.mode == "steady" else {}
    loop.close()
    session.source.close()
    choices = {key: session.choices[key] for key in ("backend", "compile", "threads")}
    answer(
        clock,
        ["keel-rl", "torch", "gymnasium"],
        choices=choices,
        overhead=overhead,
        update_seconds=statistics.median(updates[work.warmup :]),
    )
