"""The course of the return: flat, lost, gained where it should not be, or below a baseline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keel.doctor.finding import Change, Evidence, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import (
    NEEDS_RETURN,
    Outcome,
    course,
    is_solved,
    outcome,
    outcome_of,
    progress,
)
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import Series, trend
from keel.doctor.settings import pull_to_reference, scaled

ROWS = 20
PATIENCE = 0.3
"""Share of the budget before which a return may be flat: LunarLander and Breakout need a tenth."""
LOST = 0.7
"""Share of the gain that is gone in a collapse; dips of healthy runs lose less at their end."""
BEFORE = 10.0
"""Times its usual value that a sign before a collapse has."""
SIGNS = (
    "train/kl_exact", "train/approx_kl", "train/gradient_norm", "train/value_loss",
    "train/log_ratio_max", "train/clip_fraction", "train/action_std",
)  # fmt: skip
HELD_OUT = ("eval/reward_heldout", "eval/success", "env/success", "env/is_success")
ACCURACY = ("accuracy", "correct", "exact", "answer", "task")
FALLS = 0.2
"""Share of its best that a held-out score loses."""
GAP = 0.5
"""Share of what training gained that evaluation lacks."""
EVALUATIONS = 3
"""The newest of them, which must all be there: policies that still need their randomness do badly
at an evaluation now and then (calibration corpus, writing half: Acrobot, LunarLander, land)."""
OTHER = 3.0
"""A gap of so many gains is no loss of what was learned: evaluation is another task."""
SHORTER = 0.3
"""Share of its first length that an episode has left where the policy learns to end it."""
BASELINES = ("random", "noop", "greedy")


@rule(
    "returns-flat",
    "reward",
    needs=(NEEDS_RETURN,),
    source="Keel: what remains where no other rule finds a cause",
    rows=ROWS,
)
def returns_flat(log: RunLog) -> Finding | None:
    """Say that nothing is earned, where no other rule knows why."""
    now, done = outcome(log), progress(log)
    if now is None or len(now.series) < ROWS or not now.stagnates or now.ever_rose:
        return None
    if now.is_constant or is_solved(log) or (done is not None and done < PATIENCE):
        return None
    word = "fell" if now.fell else "did not rise"
    return Finding(
        cause=f"the return {word}: {now.start:.4g} at the start, {now.end:.4g} after "
        f"{log.last_step:,} steps",
        level="watch",
        evidence=(now.evidence(),),
        others=(
            Suspect(
                "a fault of the trainer",
                "keel probe --trainer module:function runs environments that any trainer learns",
            ),
            Suspect(
                "a fault of the environment",
                "keel probe ENV checks rewards, observations and actions",
            ),
            Suspect("too few steps", "train three times as long"),
        ),
        fix=Fix("Run the probes: the first that fails names the part."),
        confidence=0.35,
    )


@rule(
    "returns-collapsed",
    "reward",
    needs=(NEEDS_RETURN,),
    source="Keel; early signs: issues of SB3, verl and TRL",
    rows=ROWS,
    number=22,
)
def returns_collapsed(log: RunLog) -> Finding | None:
    """Find a return that was gained and lost, and what came before."""
    now = outcome(log)
    if now is None or len(now.series) < ROWS or now.lost < LOST:
        return None
    if now.best - now.end < 3.0 * now.tolerance:
        return None
    onset = _onset(now)
    signs = tuple(_signs(log, now.best_step, onset))
    tail = "; before it " + signs[0].text if signs else ""
    return Finding(
        cause=f"the return collapsed from {now.best:.4g} to {now.end:.4g} after step "
        f"{now.best_step:,}: {now.lost:.0%} of the gain is lost{tail}",
        level="sick" if signs else "watch",
        evidence=(
            evidence(
                now.series,
                f"{now.start:.4g} at the start, {now.best:.4g} at best, {now.end:.4g} at the end",
                now.end,
                threshold=now.best - LOST * (now.best - now.start),
                source="Keel: dips of healthy runs lose less than 70 %",
                onset=onset,
            ),
            *signs,
        ),
        others=(
            Suspect(
                "updates that go too far",
                "train again from the best checkpoint with region.learning_rate × 0.3",
            ),
            Suspect(
                "an environment or reward that changed",
                "evaluate the best checkpoint: it still earns what it did",
            ),
        ),
        fix=Fix(
            "Bound the KL of every update, and lower the learning rate towards the end.",
            (
                Change("region.certify", to=True),
                scaled(log, "region.learning_rate", 0.3),
                Change("region.schedule", to="linear"),
            ),
        ),
        confidence=0.6 if signs else 0.4,
    )


def _onset(now: Outcome) -> int:
    """Return the first step after the best at which half of the loss has come."""
    half = now.best - 0.5 * (now.best - now.end)
    after = (now.series.step > now.best_step) & (now.series.values < half)
    return int(now.series.step[after][0]) if after.any() else now.best_step


def _signs(log: RunLog, best: int, onset: int) -> Iterator[Evidence]:
    """Yield what left its usual range between the best return and the collapse."""
    for name in SIGNS:
        series = log.get(name)
        if series is None:
            continue
        finite = np.isfinite(series.values)
        values, step = series.values[finite], series.step[finite]
        before, during = values[step < best], (step >= best) & (step <= onset)
        if len(before) < 5 or not during.any():
            continue
        usual, high = float(np.median(before)), float(values[during].max())
        if usual > 0.0 and high > max(BEFORE * usual, 1.2 * float(before.max())):
            at = int(step[during][int(np.argmax(values[during]))])
            yield evidence(
                series,
                f"{series.label} rose to {high:.3g}, {high / usual:.3g} times its usual "
                f"{usual:.3g}",
                high,
                threshold=BEFORE * usual,
                source="Keel: ten times its median before the best return",
                onset=at,
            )


@rule(
    "reward-hacked",
    "reward",
    needs=(NEEDS_RETURN, "|".join((*HELD_OUT, "rollout/success", "rollout/reward/accuracy"))),
    source="Gao et al. 2023; issues: format up, accuracy down",
    rows=5,
    suppresses=("component-dominates", "length-grows"),
    number=41,
)
def reward_hacked(log: RunLog) -> Finding | None:
    """Find a reward that rises while what it stands for falls."""
    now = outcome(log)
    if now is None or not now.ever_rose or now.lost > 0.5:
        return None
    for series in _judges(log):
        if series.name == now.series.name or len(series.finite) < 4:
            continue
        best, at = float(series.finite.max()), int(np.argmax(series.finite))
        one, last = outcome_of(series), series.end(0.25)
        noise = 0.0 if one is None else one.tolerance
        late = len(series.finite) - at < 4
        sure = not late and _fell(series, at, one, last) and best - last > noise
        if sure and best > last and best - last > FALLS * abs(best):
            return _hacked(log, now, series, best, last)
    return None


def _fell(series: Series, best: int, course: Outcome | None, last: float) -> bool:
    """Return whether a score fell after its best; one that fell early has no trend any more."""
    after = trend(Series(series.name, series.label, series.step[best:], series.values[best:]))
    grounded = last < 0.5 * float(series.values[best]) and last < float(series.values[0])
    return after.change < 0.0 or grounded or (course is not None and course.fell)


def _hacked(log: RunLog, now: Outcome, series: Series, best: float, last: float) -> Finding:
    onset = int(series.step[int(np.argmax(series.values == best))])
    return Finding(
        cause=f"the reward is hacked: it rises from {now.start:.4g} to {now.end:.4g} while "
        f"{series.label} falls from {best:.3g} to {last:.3g}",
        level="sick",
        evidence=(
            evidence(
                series,
                f"{best:.3g} at best, {last:.3g} at the end: {(best - last) / abs(best):.0%} lost",
                last,
                threshold=(1.0 - FALLS) * best,
                source="Keel: a fifth of its best",
                onset=onset,
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "training prompts learned by heart",
                "score the policy on training prompts by the judge itself: it rises there",
            ),
            Suspect(
                "a part of the reward that is easier than the task (format, length)",
                "train without it: the judge's score no longer falls",
            ),
        ),
        fix=Fix(
            "Stop at the best held-out score, and pull towards the reference or repair the reward.",
            pull_to_reference(log),
        ),
        confidence=0.85,
    )


def _judges(log: RunLog) -> Iterator[Series]:
    """Yield what the reward stands for."""
    yield from (log[name] for name in HELD_OUT if name in log)
    if "rollout/success" in log:
        yield log["rollout/success"]
    parts = [name for name in log.series if name.startswith("rollout/reward/")]
    yield from (log[name] for name in parts if any(word in name.lower() for word in ACCURACY))


@rule(
    "evaluation-far-below-training",
    "reward",
    needs=("rollout/return_mean", "eval/return_mean"),
    source="issues of SB3 and IsaacLab: statistics of the normalizer not saved or not shared",
    rows=5,
)
def evaluation_far_below_training(log: RunLog) -> Finding | None:
    """Find evaluations that lack what training gained."""
    now, evaluated = outcome(log), log["eval/return_mean"]
    if now is None or not now.rose or len(evaluated.finite) < EVALUATIONS:
        return None
    gained, last = now.end - now.start, float(np.median(evaluated.finite[-EVALUATIONS:]))
    gap = now.end - last
    deviations = [log[n].end() for n in ("rollout/return_std", "eval/return_std") if n in log]
    noise = max((d for d in deviations if np.isfinite(d)), default=0.1 * abs(now.end))
    if gap < GAP * gained or gap < 2.0 * noise or gained < noise or gap > OTHER * gained:
        return None
    lost = last < now.start + 0.1 * gained
    normalized = log.settings.get("envs.normalize_obs")
    return Finding(
        cause=f"evaluation is far below training: {last:.4g} against {now.end:.4g}, so "
        f"{gap / gained:.0%} of what was gained is missing"
        + (", with statistics of observations in between" if normalized is True else ""),
        level="sick" if lost else "watch",
        evidence=(
            evidence(
                evaluated,
                f"{last:.4g}, median of the last {EVALUATIONS}; the gap is {gap:.3g}, "
                f"episodes differ by {noise:.3g}",
                last,
                threshold=now.end - GAP * gained,
                source="Keel: half of the gain",
                onset=int(evaluated.step[-EVALUATIONS]),
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "statistics of observations that are not saved, or not shared with evaluation",
                "print mean and variance in both environments: they must be equal",
            ),
            Suspect(
                "a policy that needs its randomness",
                "evaluate with evaluation.deterministic off: the gap closes",
            ),
            Suspect(
                "another environment in evaluation (wrappers, reward, time limit)",
                "evaluate in an environment made like those of training",
            ),
        ),
        fix=Fix("Save the normalizer's statistics with the policy, and evaluate with them frozen."),
        confidence=0.7 if lost else 0.5,
    )


@rule(
    "below-baseline",
    "reward",
    needs=(NEEDS_RETURN, "|".join(f"baseline/{name}_return" for name in BASELINES)),
    source="research list: show the baselines always",
    number=43,
)
def below_baseline(log: RunLog) -> Finding | None:
    """Find a policy that earns less than one that learned nothing."""
    now, done = outcome(log), progress(log)
    if now is None or (done is not None and done < PATIENCE):
        return None
    deviation = log.get("rollout/return_std")
    floor = 0.1 * abs(now.end) if deviation is None else 0.5 * deviation.end()
    better = {}
    for name in BASELINES:
        series = log.get(f"baseline/{name}_return")
        if series is not None and series.last - now.end > max(floor, now.tolerance):
            better[name] = series
    if not better or (now.rose and (done is None or done < 0.9)):
        return None
    name, series = next(iter(better.items()))
    return Finding(
        cause=f"the {name} policy is better: it earns {series.last:.4g}, this one {now.end:.4g}",
        level="sick" if now.is_known and name != "greedy" else "watch",
        evidence=(
            evidence(
                series,
                f"{series.last:.4g} against {now.end:.4g}, a difference of "
                f"{series.last - now.end:.3g}",
                series.last,
                threshold=now.end,
                source="keel probe: baselines",
            ),
            *course(log),
        ),
        others=(
            Suspect(
                "a reward with another sign than meant",
                "look at the reward of one good and one bad episode",
            ),
            Suspect(
                "penalties that make doing nothing the best",
                "train without them: the return passes the baseline",
            ),
        ),
        fix=Fix("Check sign and parts of the reward, then the trainer by its probes."),
        confidence=0.7,
    )


@rule(
    "suicide-incentive",
    "reward",
    needs=("rollout/return_mean", "rollout/length_mean", "rollout/reward_mean"),
    source="Schulman: rewards that are always negative teach to end the episode",
    rows=10,
    number=39,
)
def suicide_incentive(log: RunLog) -> Finding | None:
    """Find a policy that earns more only because it ends its episodes."""
    now, length, reward = outcome(log), log["rollout/length_mean"], log["rollout/reward_mean"]
    if now is None or not now.rose or not (reward.finite < 0.0).all() or len(reward.finite) < 10:
        return None
    before, after = length.start(0.1), length.end(0.1)
    step, worse = reward.start(0.1), reward.end(0.1)
    if not (after < SHORTER * before and worse < 1.2 * step):
        return None
    return Finding(
        cause=f"the policy learns to end its episodes: they shorten from {before:.4g} to "
        f"{after:.4g} steps, and a step costs more than before ({worse:.3g}, was {step:.3g})",
        level="watch",
        evidence=(
            evidence(length, f"{before:.4g} → {after:.4g}", after, threshold=SHORTER * before),
            evidence(
                reward,
                f"{step:.3g} → {worse:.3g} a step: a goal would make it less negative",
                worse,
                threshold=1.2 * step,
                source="Keel: a fifth worse",
            ),
            now.evidence(),
        ),
        others=(
            Suspect(
                "a goal that is reached sooner, and whose last step costs",
                "watch one episode: it ends at the goal",
            ),
        ),
        fix=Fix("Charge what ends an episode early, or reward every step survived."),
        confidence=0.55,
    )
