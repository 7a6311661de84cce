"""Completions: groups that teach nothing, and how completions end."""

from __future__ import annotations

from keel.doctor.finding import Change, Evidence, Finding, Fix, Suspect, evidence
from keel.doctor.outcome import SOLVED, course, is_solved, outcome
from keel.doctor.rule import rule
from keel.doctor.run_log import RunLog
from keel.doctor.series import breach
from keel.doctor.settings import scaled

INFORMATIVE, ENDED = "rollout/informative", "rollout/ended"
STD, STD_GROUP = "rollout/reward_std", "rollout/reward_std_group"
LENGTH, LENGTH_MAX, LIMIT = "rollout/length_mean", "rollout/length_max", "rollout/length_limit"
FEW = 0.1
"""Share of informative groups below which almost nothing is learned; DAPO reports 0.5 and less in
healthy runs, and filters."""
CUT, CUT_MOST = 0.5, 0.2
"""Shares of completions that end by themselves; TRL's examples are above 0.5."""
AT_LIMIT = 0.9
ZERO = 1e-6


@rule(
    "groups-uninformative",
    "language",
    needs=(f"{INFORMATIVE}|{STD_GROUP}",),
    source="DAPO (Yu et al. 2025); issues of TRL: frac_reward_zero_std",
    suppresses=("returns-flat", "length-grows"),
    number=30,
)
def groups_uninformative(log: RunLog) -> Finding | None:
    """Find groups in which every completion scores the same, though the task is not solved."""
    informative, group, batch = log.get(INFORMATIVE), log.get(STD_GROUP), log.get(STD)
    now = outcome(log)
    if is_solved(log) or (now is not None and (now.rose or now.end >= SOLVED)):
        return None
    series, limit = (informative, FEW) if informative is not None else (group, ZERO)
    if series is None:
        return None
    found = breach(series, low=limit)
    if found is None or not found.lasting or series.end() >= limit:
        return None
    within = batch is not None and batch.end() > 1e-3
    what = "every completion of a prompt scores the same"
    if within and batch is not None:
        what += f", while prompts differ (standard deviation {batch.end():.2g} over the batch)"
    unit = "of the groups teach anything" if informative is not None else "is the spread in a group"
    number = f"{series.end():.0%}" if informative is not None else f"{series.end():.2g}"
    return Finding(
        cause=f"only {number} {unit}: {what}",
        level="sick" if len(series) >= 5 or within else "watch",
        evidence=(
            evidence(
                series,
                f"{series.end():.3g} at the end, below {limit:g} in {found.count} of {len(series)}",
                series.end(),
                threshold=limit,
                source="DAPO: groups without a spread have no gradient",
                onset=found.onset,
            ),
            *course(log),
        ),
        others=_group_suspects(within),
        fix=Fix(
            "Sample more completions of each prompt, at a higher temperature, of prompts that are "
            "solved sometimes.",
            (scaled(log, "sample.group", 2.0), Change("sample.temperature", to=1.0)),
        ),
        confidence=0.85 if within else 0.7,
    )


def _group_suspects(within: bool) -> tuple[Suspect, ...]:
    return (
        Suspect(
            "a reward that sees the prompt and not the completion"
            if within
            else "a reward that is constant",
            "score a right and a wrong completion of one prompt by hand: they must differ",
        ),
        Suspect(
            "prompts that are too hard, or too easy",
            "score 64 completions of 20 prompts: some of each are right",
        ),
        Suspect(
            "sampling without randomness (temperature near 0, one seed for the group)",
            "print two completions of one prompt: they must differ",
        ),
    )


@rule(
    "groups-solved",
    "language",
    needs=(INFORMATIVE,),
    source="issues that report a loss of 0 as a bug",
)
def groups_solved(log: RunLog) -> Finding | None:
    """Say that groups without a spread are usual where nearly all is solved."""
    series, now = log[INFORMATIVE], outcome(log)
    solved = is_solved(log) or (now is not None and now.rose and now.end >= SOLVED)
    if not solved or series.end() >= 0.5:
        return None
    return Finding(
        cause=f"{1.0 - series.end():.0%} of the groups have no spread because nearly all is "
        "solved: a loss of 0 is usual there",
        level="usual",
        evidence=(evidence(series, f"{series.end():.2f} at the end"), *course(log)),
        fix=Fix("Nothing to do; harder prompts would teach more."),
        confidence=0.85,
    )


@rule(
    "completions-cut",
    "language",
    needs=(ENDED,),
    source="issues of TRL: completions/clipped_ratio near 1",
    suppresses=("groups-uninformative", "returns-flat", "length-grows", "rewards-constant"),
)
def completions_cut(log: RunLog) -> Finding | None:
    """Find completions that are cut before they can score."""
    ended, now = log[ENDED], outcome(log)
    if not log.is_language or is_solved(log) or _never_ends(log):
        return None
    found, share = breach(ended, low=CUT), ended.end()
    if found is None or not found.lasting or share >= CUT:
        return None
    if now is not None and now.rose:
        return None
    limit = _limit(log)
    where = "" if limit is None else f" at {limit:.0f} tokens"
    sick = share < CUT_MOST and (len(ended) >= 5 or limit is not None)
    return Finding(
        cause=f"{1.0 - share:.0%} of the completions are cut{where}: what comes after the cut, "
        "often the answer, is never scored",
        level="sick" if sick else "watch",
        evidence=(
            evidence(
                ended,
                f"{share:.2f} end by themselves, below {CUT:g} in {found.count} of {len(ended)}",
                share,
                threshold=CUT,
                source="TRL's examples: most completions end",
                onset=found.onset,
            ),
            *_lengths(log),
            *course(log),
        ),
        others=(
            Suspect(
                "an end token that is not known, or a second one that nobody counts",
                "decode one completion: text goes on after the end of the answer",
            ),
            Suspect(
                "a model that repeats itself",
                "read three cut completions",
            ),
        ),
        fix=Fix(
            "Let completions be longer.",
            (
                Change("sample.max_new_tokens", to=round(2 * limit))
                if limit
                else Change("sample.max_new_tokens", times=2.0),
            ),
        ),
        confidence=0.8 if sick else 0.75,
    )


@rule(
    "end-token-unknown",
    "language",
    needs=(ENDED, f"{LENGTH}|{LENGTH_MAX}"),
    source="issues of TRL, verl and OpenRLHF: eos_token_id of the base model",
    suppresses=("completions-cut", "groups-uninformative", "rewards-constant", "length-grows"),
)
def end_token_unknown(log: RunLog) -> Finding | None:
    """Find completions of which not one ever ended."""
    if not log.is_language or not _never_ends(log):
        return None
    ended, limit = log[ENDED], _limit(log)
    lengths = log[LENGTH] if LENGTH in log else log[LENGTH_MAX]
    return Finding(
        cause=f"the end token is unknown: not one completion ended in {len(ended)} "
        f"update{'s' if len(ended) > 1 else ''}, all have {lengths.end():.4g} tokens",
        level="sick" if len(ended) >= 3 or limit is not None else "watch",
        evidence=(
            evidence(
                ended,
                f"0 in all {len(ended)} rows, from the first on",
                0.0,
                threshold=0.0,
                source="a model that was tuned ends some of its texts",
                onset=int(ended.step[0]),
            ),
            *_lengths(log),
            *course(log),
        ),
        others=(
            Suspect(
                "a limit that is too short for any answer",
                "train with sample.max_new_tokens × 4: some completions end",
            ),
            Suspect(
                "a model that was never taught to end",
                "sample 100 completions of 4 × that length: none ends",
            ),
        ),
        fix=Fix(
            "Give generation every end token of the tokenizer and of the chat template "
            "(eos_token_id as a list).",
            (scaled(log, "sample.max_new_tokens", 4.0),)
            if log.setting("sample.max_new_tokens")
            else (),
        ),
        confidence=0.8,
    )


def _never_ends(log: RunLog) -> bool:
    """Return whether no completion ever ended, and all are as long as can be."""
    ended = log[ENDED]
    if len(ended) == 0 or not (ended.values == 0.0).all():
        return False
    lengths, limit = log.get(LENGTH), _limit(log)
    if lengths is None:
        return limit is not None and LENGTH_MAX in log and log[LENGTH_MAX].end() >= limit
    if limit is not None:
        return bool((lengths.values >= 0.99 * limit).all())
    return len(lengths) >= 2 and bool((lengths.values == lengths.values[0]).all())


def _limit(log: RunLog) -> float | None:
    """Return the largest length of a completion, where it is known."""
    if LIMIT in log:
        return log[LIMIT].end()
    setting = log.setting("sample.max_new_tokens")
    return setting if setting else None


def _lengths(log: RunLog) -> tuple[Evidence, ...]:
    lengths = log.get(LENGTH) or log.get(LENGTH_MAX)
    if lengths is None:
        return ()
    limit = _limit(log)
    text = f"{lengths.end():.4g} tokens" + ("" if limit is None else f" of {limit:.0f} allowed")
    return (evidence(lengths, text, threshold=None if limit is None else AT_LIMIT * limit),)
