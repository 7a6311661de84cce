"""The table of a calibration as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.doctor_corpus.judging import ALONE, WITH_CALLBACK, Judged, is_main, shares
from benchmarks.doctor_corpus.making import ROOT
from benchmarks.doctor_corpus.table import HEALTHY, faults

DATA = ROOT / "docs" / "data" / "doctor.json"
PAGE = DATA.with_suffix(".md")
TITLES = {
    "keel": "Keel",
    "sb3": "Stable-Baselines3, callback",
    "cleanrl": "CleanRL's PPO",
    "trl": "TRL's GRPO, callback",
}


def write(half: str, judged: list[Judged], seconds: float, rules: str) -> None:
    """Write what was judged into the data of all halves, and the page made of it.

    Args:
        half: Name of the half.
        judged: What the doctor said.
        seconds: What it took.
        rules: Commit of the rules.
    """
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    data[half] = {
        "rules": rules,
        "seconds": round(seconds, 1),
        "shares": table_of(judged),
        "runs": [one.as_dict() for one in judged],
        **{k: v for k, v in data.get(half, {}).items() if k in ("restored", "others")},
    }
    save(data)


def save(data: Mapping[str, Any]) -> None:
    """Write data and page."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    PAGE.write_text("\n".join(lines(data)) + "\n")


def table_of(judged: Iterable[Judged]) -> dict[str, Any]:
    """Return the shares of all logs, of each trainer, and of the logs of SB3 without a callback."""
    judged = list(judged)
    main = [one for one in judged if is_main(one.trainer, one.source)]
    rows = {"all": shares(main)}
    for trainer in TITLES:
        rows[trainer] = shares(one for one in main if one.trainer == trainer)
    for trainer in WITH_CALLBACK:
        alone = [one for one in judged if one.trainer == trainer and one.source == ALONE]
        rows[f"{trainer} alone"] = shares(alone)
    return rows


def lines(data: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of the page."""
    yield "# The doctor, calibrated"
    for half in (name for name in ("judged", "writing") if name in data):
        yield from _half(half, data[half])


def _half(half: str, data: Mapping[str, Any]) -> Iterable[str]:
    made = (
        "made after the commit that froze the rules"
        if half == "judged"
        else "the rules were written on"
    )
    runs = len({(r["trainer"], r["kind"], r["setup"], r["seed"]) for r in data["runs"]})
    yield ""
    yield f"## The half that is {half}" if half == "judged" else "## The half for writing"
    yield ""
    yield (
        f"{runs} runs, {made}; rules of commit `{data['rules'][:12]}`; "
        f"{data['seconds']:.0f} s for all logs."
    )
    yield ""
    yield (
        "| logs of | healthy runs | called sick | called watch | faults | kinds | named first | "
        "among the first three |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    titles = TITLES | {
        "all": "**all**",
        "sb3 alone": "Stable-Baselines3, its CSV alone",
        "trl alone": "TRL's GRPO, its log alone",
    }
    for name, row in data["shares"].items():
        yield (
            f"| {titles[name]} | {row['healthy']} | {_share(row, 'false_sick', 'healthy')} | "
            f"{_share(row, 'false_watch', 'healthy')} | {row['faults']} | {row['kinds']} | "
            f"{_share(row, 'first', 'faults')} | {_share(row, 'among_three', 'faults')} |"
        )
    yield ""
    yield from _misses(data["runs"])
    yield from _beside(data)


def _misses(runs: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield what was missed, and what was said in its place."""
    known = faults()
    main = [r for r in runs if is_main(r["trainer"], r["source"])]
    yield "| planted | where | seed | place | said in its place |"
    yield "|---|---|---|---|---|"
    for run in main:
        wrong = run["findings"] if run["kind"] == HEALTHY else run["place"] != 1
        if not wrong:
            continue
        what = "nothing" if run["kind"] == HEALTHY else known[run["kind"]].what
        said = ", ".join(f"{rule} ({level})" for rule, level in run["findings"][:4])
        place = run["place"] or "–"
        yield (
            f"| {run['kind']}: {what} | {run['setup']} | {run['seed']} | {place} | "
            f"{said or run['verdict']} |"
        )


def _beside(data: Mapping[str, Any]) -> Iterable[str]:
    if "restored" in data:
        yield ""
        yield "| fix | where | seed | return of the fault | of the fix | healthy | restored |"
        yield "|---|---|---|---|---|---|---|"
        for one in data["restored"]:
            mark = "yes" if one["restored"] else "no"
            yield (
                f"| {one['kind']}: {one['change']} | {one['setup']} | {one['seed']} | "
                f"{one['faulty']:.4g} | {one['fixed']:.4g} | {one['healthy']:.4g} | {mark} |"
            )
    if "others" in data:
        yield ""
        yield (
            "| tool | logs it reads | healthy | alarms | ours | faults | named anywhere | "
            "ours, among the first three |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        for one in data["others"]:
            yield (
                f"| {one['tool']} | {one['logs']} | {one['healthy']} | {one['alarms']} | "
                f"{one['our_alarms']} | {one['faults']} | {one['named']} | {one['our_named']} |"
            )


def _share(row: Mapping[str, int], part: str, whole: str) -> str:
    if not row[whole]:
        return "–"
    return f"{row[part]} ({100.0 * row[part] / row[whole]:.0f} %)"
