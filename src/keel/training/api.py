"""Training, evaluating and acting in a few lines of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any

from keel.config import nested
from keel.envs.names import given_env
from keel.tracking.record import read_config
from keel.training.kinds import bind_again, kind_of, plan
from keel.training.persist import Progress

if TYPE_CHECKING:
    from keel.tracking.live import Display
    from keel.training.evaluation import Score
    from keel.training.policy import Policy
    from keel.training.run import Run

OnIteration = Callable[[Progress], object]
"""Called after every iteration; training stops where it returns False."""


def train(
    env: Any = None,
    *,
    config: str | Path | None = None,
    runs: str | Path = "runs",
    name: str | None = None,
    preset_name: str | None = None,
    on_iteration: OnIteration | None = None,
    start_from: str | Path | None = None,
    progress: bool | None = None,
    trust_code: bool = False,
    wrappers: Sequence[Any] = (),
    **settings: Any,
) -> Run:
    """Train on `env` to the end, and return the run.

    Settings are those of `keel.Config`, nested (`region={"max_kl": 0.02}`) or by a last name that
    only one has (`max_kl=0.02`). They go before those of the file, which go before the preset.
    Ctrl-C ends the iteration, saves a checkpoint and raises `KeyboardInterrupt`.

    What is passed as an object is stored by its import path, so that `keel resume` finds it again.
    What has none (lambdas, instances, what the script defines) trains as well; such a run is gone
    on with by `keel.resume(RUN, env=…)`, where it is passed again.

    Args:
        env: an id, `module:attribute`, a class, a callable without arguments that makes one
            environment (Gymnasium's, or PettingZoo's parallel ones), an environment, or a
            `gymnasium.vector.VectorEnv`; by default the environment that the file names. An
            environment that is passed is copied, and never closed.
        config: a YAML file of settings.
        runs: where runs are kept.
        name: of the run, by default environment, algorithm and time.
        preset_name: settings to start from, by default those of the environment.
        on_iteration: called after every iteration, as `keel.iterate` yields them; training stops
            where it returns False.
        start_from: a run, or one of its checkpoints, whose weights and normalizers the new run
            begins with.
        progress: show the run. By default on a terminal only; True prints plain lines elsewhere.
        trust_code: import code that the file names, also from outside of Keel.
        wrappers: of each environment, the innermost first (as `gymnasium.make_vec` takes them).
        **settings: values that replace those of file and preset.

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     small = dict(num=2, rollout_steps=64, minibatch=64)
        ...     run = keel.train("CartPole-v1", runs=runs, total_steps=256, **small)
        ...     run.metrics.step.tolist()
        [128, 256]
    """
    whole, begin = plan(
        env, config, runs, name, preset_name, start_from, trust_code, wrappers, settings
    )
    return _run_to_end(whole, begin, progress, on_iteration, trust_code)


def iterate(
    env: Any = None,
    *,
    config: str | Path | None = None,
    runs: str | Path = "runs",
    name: str | None = None,
    preset_name: str | None = None,
    start_from: str | Path | None = None,
    trust_code: bool = False,
    wrappers: Sequence[Any] = (),
    **settings: Any,
) -> Generator[Progress, None, None]:
    """Train as a loop of yours: yields after every iteration; `break` saves a checkpoint.

    Settings are checked at once; nothing is opened, created or locked before the first iteration,
    and everything is closed however the loop ends. `iteration.set(learning_rate=…)` changes
    hyperparameters from the next update on.

    Args:
        env: as for `keel.train`, like all that follows.
        config: a YAML file of settings.
        runs: where runs are kept.
        name: of the run.
        preset_name: settings to start from.
        start_from: a run whose weights and normalizers the new run begins with.
        trust_code: import code that the file names, also from outside of Keel.
        wrappers: of each environment, the innermost first.
        **settings: values that replace those of file and preset.

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     small = dict(num=2, rollout_steps=64, minibatch=64)
        ...     for iteration in keel.iterate("CartPole-v1", runs=runs, **small):
        ...         iteration.set(learning_rate=1e-4)
        ...         if iteration.steps >= 256:
        ...             break
        >>> iteration.metrics["train/learning_rate"], iteration.done
        (0.0001, False)
    """
    _, begin = plan(
        env, config, runs, name, preset_name, start_from, trust_code, wrappers, settings
    )
    return _iterations(begin)


def resume(
    run: str | Path | Run,
    *,
    env: Any = None,
    wrappers: Sequence[Any] = (),
    on_iteration: OnIteration | None = None,
    progress: bool | None = None,
    trust_code: bool = False,
    **settings: Any,
) -> Run:
    """Go on with a run to its end, exactly as if it had never stopped.

    Args:
        run: the folder of a run, or the one above it if that has a single seed.
        env: the environment again, if it was passed as an object without an import path.
        wrappers: the same of wrappers.
        on_iteration: called after every iteration; training stops where it returns False.
        progress: as for `keel.train`.
        trust_code: import code that the run's file names, also from outside of Keel.
        **settings: what a resumed run may set anew: total_steps, evaluation, checkpoints, …

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     small = dict(runs=runs, num=1, rollout_steps=64, minibatch=32)
        ...     run = keel.train("CartPole-v1", total_steps=64, **small)
        ...     keel.resume(run, total_steps=128).metrics.step.tolist()
        [64, 128]
    """
    from keel.tracking.directory import find_run
    from keel.training.runner import resume as go_on

    path = find_run(_path_of(run))
    data = read_config(path)
    kind = kind_of(data.get("env"))
    stored = kind.read(data)
    if env is not None or wrappers:
        bind_again(stored, env, wrappers, path)
    changed = kind.read(nested(settings, stored), stored)
    begin = partial(go_on, path, changed, trust_code=trust_code)
    return _run_to_end(changed, begin, progress, on_iteration, trust_code, path)


def load(
    path: str | Path,
    checkpoint: str | int | None = None,
    trust_code: bool = False,
    seed: int = 0,
) -> Policy:
    """Return the policy of a run, ready to act; its environment is neither made nor imported.

    Args:
        path: a run, the folder above it if that has a single seed, or a folder of a checkpoint.
        checkpoint: "best", "last" or a step; by default the best, or the last where no evaluation
            has marked a best.
        trust_code: for runs of version 0.1, whose checkpoints do not say what is observed: let
            their environment be made by code that the run's file names.
        seed: of the actions that are sampled (`act(obs, deterministic=False)`).

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     run = keel.train("CartPole-v1", runs=runs, total_steps=64, rollout_steps=64)
        ...     policy = keel.load(run.path)
        >>> action, state = policy.act([0.0, 0.1, 0.0, -0.1])
        >>> int(action) in (0, 1)
        True
    """
    from keel.training.policy import open_policy

    return open_policy(Path(path), checkpoint, trust_code=trust_code, seed=seed)


def evaluate(
    policy: Policy | Run | str | Path,
    env: Any = None,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int = 0,
    *,
    max_episode_steps: int = 0,
    trust_code: bool = False,
) -> Score:
    """Play whole episodes in new environments, and return their returns and lengths.

    Args:
        policy: of `keel.load`, or a run.
        env: as for `keel.train`; by default the environment of the run. The run's own wrappers
            go around it, too.
        episodes: number of episodes.
        deterministic: take the likeliest action in place of a sample.
        seed: of environments and actions.
        max_episode_steps: where an episode that does not end is cut; 0: as the run evaluated.
        trust_code: import code that the run's file names, also from outside of Keel.

    Examples:
        >>> import tempfile
        >>> import keel
        >>> with tempfile.TemporaryDirectory() as runs:
        ...     run = keel.train("CartPole-v1", runs=runs, total_steps=64, rollout_steps=64)
        ...     score = keel.evaluate(run, episodes=3)
        >>> len(score.returns), score.returns == [float(x) for x in score.lengths]
        (3, True)
    """
    from keel.training.policy import Policy, evaluate_policy, open_policy

    if not isinstance(policy, Policy):
        policy = open_policy(_path_of(policy), trust_code=trust_code)
    return evaluate_policy(
        policy,
        episodes=episodes,
        deterministic=deterministic,
        seed=seed,
        max_episode_steps=max_episode_steps,
        env=None if env is None else given_env(env).name,
    )


def check_env(
    env: Any, *, steps: int = 200, seed: int = 0, env_kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Return what is wrong with an environment, one sentence each; an empty list if nothing is.

    Args:
        env: as for `keel.train`.
        steps: length of each of two runs of random legal actions.
        seed: of the environment and of the actions.
        env_kwargs: options of the constructor.

    Examples:
        >>> import keel
        >>> keel.check_env("CartPole-v1", steps=50)
        []
    """
    from keel.envs.check import check_env as check_named_env

    return check_named_env(given_env(env).name, steps=steps, seed=seed, env_kwargs=env_kwargs)


def _path_of(run: str | Path | Run) -> Path:
    """Return the folder of a run, however it was named."""
    return Path(run) if isinstance(run, str | Path) else run.path


def _iterations(
    begin: Callable[[], Generator[Progress, None, Any]],
) -> Generator[Progress, None, None]:
    with closing(begin()) as loop:
        yield from loop


def _run_to_end(
    config: Any,
    begin: Callable[..., Generator[Progress, None, Any]],
    progress: bool | None,
    on_iteration: OnIteration | None,
    trust_code: bool,
    path: Path | None = None,
) -> Run:
    """Consume a run, show it, and stop it where somebody asks for that."""
    from keel.training.run import Run
    from keel.training.signals import graceful_stop

    newest: Progress | None = None
    with graceful_stop() as stop, ExitStack() as stack:
        display = _display(config, progress)
        options = {} if display is None else {"evaluating": display.evaluating}
        loop = stack.enter_context(closing(begin(**options)))
        if display is not None:
            stack.enter_context(display)
        for newest in loop:
            if display is not None:
                display.update(newest.steps, newest.metrics, newest.done)
            stop.safe = newest.done or stop.requested is not None
            goes_on = on_iteration is None or on_iteration(newest) is not False
            if stop.requested is not None or not goes_on:
                break
    path = path if newest is None else newest.path
    assert path is not None, "a new run has an iteration"
    if stop.requested is not None:
        said = f"stopped on request; go on with keel.resume({str(path)!r})"
        raise KeyboardInterrupt(said) if stop.requested is SIGINT else SystemExit(stop.exit_code)
    return Run(path, trust_code)


def _display(config: Any, progress: bool | None) -> Display | None:
    """Return what shows a run, if it is to be shown."""
    if progress is False or (progress is None and not sys.stdout.isatty()):
        return None
    from keel.doctor.watching import Watching
    from keel.tracking.live import Display
    from keel.tracking.progress import PipedConsole, is_interactive

    console = PipedConsole()
    if progress is None and not is_interactive(console):
        return None
    diagnose = Watching(config) if config.doctor else None
    return Display(config, f"keel.train {config.env}", console, quiet=False, diagnose=diagnose)
