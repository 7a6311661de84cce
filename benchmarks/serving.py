"""Routers for replicas: train, judge on held-out traces, measure speed, write the page's tables.

    python -m benchmarks.serving train --runs RUNS [--seeds 0 1 2]
    python -m benchmarks.serving judge --runs RUNS      into docs/data/serving.json
    python -m benchmarks.serving fresh --runs RUNS      on traces that are newer than the preset
    python -m benchmarks.serving collapse               the router that collapsed, mended, and why
    python -m benchmarks.serving explore                pulses beside hierarchical exploration
    python -m benchmarks.serving speed                  decisions and simulated requests a second
    python -m benchmarks.serving page                   tables and pictures from that

`--data FOLDER` holds `traces/` (Azure's, Mooncake's) and `vidur/` (its results and their tables, of
which tests/data has two runs). What is not there keeps its earlier figures. All of it may be
interrupted: finished seeds are never trained twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import fresh_traces, router_collapse
from benchmarks.fresh_traces import saved
from benchmarks.seeds import train_seed
from keel.apps.serving import (
    HEURISTICS,
    clairvoyant,
    closed_form,
    compare,
    draw_scenario,
    evaluate_routers,
    gain,
    headroom,
    held_out,
    load_scorer,
    load_tables,
    make_setting,
    simulate,
)
from keel.apps.serving.evaluation import LEARNED, best_heuristic, evaluate_scorer
from keel.apps.serving.plots import write_latencies, write_timeline
from keel.apps.serving.results import means
from keel.apps.serving.vector import vector_env

DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA, TABLES, IMAGES = DOCS / "data" / "serving.json", DOCS / "data" / "serving", DOCS / "images"
VIDUR_SPEED = {
    "llama2_7b_conv_rr": ("llama2_7b_a100_tp1", 728.0),
    "llama2_7b_arxiv_rr": ("llama2_7b_a100_tp1", 145.0),
    "codellama_34b_conv_bursty_rr": ("codellama_34b_a100_tp2", 772.0),
    "llama2_7b_fixed_preempt_lor": ("llama2_7b_a100_tp1", 149.0),
}
"""Vidur's own results, the tables they were made with, and its requests a second on these, which
were measured once, with version 0.1 of Keel (November 2026) and commit 7d47513 of Vidur."""
TRACES, REQUESTS = 20, 1_000
SETTINGS = ("mixed", "speeds", "equal", "fixed")
SIZES = (2, 4, 8, 16)
RECORDED = {
    "Azure, conversations": "splitwise_conv.csv",
    "Azure, code": "splitwise_code.csv",
    "Mooncake, conversations": "mooncake_conversation_trace.jsonl",
}
"""Files in `traces/` of the data folder."""
LOADS = ((0.5, 0.95), (1.0, 1.5), (1.5, 2.0))
MEASURES = {"end_to_end": "mean end to end", "ttft_p99": "p99 to the first token"}


def judge_all(runs: Path, data: Path) -> None:
    """Every trained seed and every heuristic, on the same traces."""
    told: dict[str, Any] = {}
    seeds, scorers = held_out(TRACES), _trained(runs)
    for name in SETTINGS:
        told[name] = _beside_all(name, make_setting(name, requests=REQUESTS), seeds, scorers)
    told["sizes"] = {
        f"{count}, {name}": _beside_speeds(
            make_setting(name, replicas=count, requests=REQUESTS), scorers
        )
        for name in ("mixed", "speeds")
        for count in SIZES
    }
    told["loads"] = {
        f"{low:g} to {high:g}": _beside_best(
            make_setting("mixed", load=(low, high), requests=REQUESTS), scorers
        )
        for low, high in LOADS
    }
    told["traces"] = _earlier().get("traces", {}) | {
        name: _beside_best(
            make_setting("mixed", trace=str(data / "traces" / file), requests=REQUESTS), scorers
        )
        for name, file in RECORDED.items()
        if (data / "traces" / file).is_file()
    }
    _keep(told)
    _draw(scorers, told["mixed"]["headroom"]["end_to_end"]["best"])


def _trained(runs: Path) -> dict[str, Any]:
    """Return the routers that `train` left."""
    return {x.name: load_scorer(x) for x in sorted((runs / "router").glob("seed-*"))}


def _beside_all(
    name: str,
    setting: Any,
    seeds: list[int],
    scorers: dict[str, Any],
    draw: Any = draw_scenario,
) -> dict[str, Any]:
    """Every heuristic, both clairvoyants and every trained seed on the same traces."""
    found = evaluate_routers(setting, seeds, HEURISTICS, draw=draw)
    entry: dict[str, Any] = {"routers": {}, "headroom": {}, "policies": {}}
    for router, reports in found.items():
        entry["routers"][router] = _means(reports)
    for measure in MEASURES:
        entry["headroom"][measure] = headroom(found, measure).to_dict()
    for seed, scorer in scorers.items():
        own = evaluate_scorer(scorer, setting, seeds, draw=draw)
        best = {m: entry["headroom"][m]["best"] for m in MEASURES}
        entry["policies"][seed] = {
            **_means(own),
            "gains": {m: vars(gain(own, found[best[m]], m)) for m in MEASURES},
            "jsq": vars(gain(own, found["least-outstanding"], "end_to_end")),
        }
        print(name, seed, json.dumps(entry["policies"][seed]["gains"]), flush=True)
    return entry


def fresh(runs: Path) -> None:
    """Judge trained seeds once, on traces that are newer than the preset."""
    fresh_traces.check_frozen()
    scorers = _trained(runs)
    for name, family in fresh_traces.families(REQUESTS).items():
        earlier = _earlier().get("fresh", {})
        if set(earlier.get(name, {}).get("policies", {})) == set(scorers):
            continue
        seeds = family.seeds(TRACES)
        entry = _beside_all(name, family.setting, seeds, scorers, family.draw)
        _keep({"fresh": earlier | {name: entry | {"what": family.what}}})


def _beside_speeds(setting: Any, scorers: dict[str, Any]) -> dict[str, Any]:
    """Gains over JSQ by speeds that it guesses, and by those it is told."""
    seeds, entry = held_out(TRACES), {}
    others = {
        kind: evaluate_routers(
            replace(setting, known_speeds=kind == "told"), seeds, ("least-by-speed",),
            clairvoyant=False,
        )["least-by-speed"]
        for kind in ("guessed", "told")
    }  # fmt: skip
    for seed, scorer in scorers.items():
        own = evaluate_scorer(scorer, setting, seeds)
        entry[seed] = {kind: vars(gain(own, other)) for kind, other in others.items()}
    print(setting.replicas, json.dumps(entry), flush=True)
    return entry


def _beside_best(setting: Any, scorers: dict[str, Any]) -> dict[str, Any]:
    """Gains over the best heuristic of each measure."""
    seeds, entry = held_out(TRACES), {}
    found = evaluate_routers(setting, seeds, HEURISTICS, clairvoyant=False)
    for seed, scorer in scorers.items():
        own = evaluate_scorer(scorer, setting, seeds)
        entry[seed] = {m: vars(gain(own, found[best_heuristic(found, m)], m)) for m in MEASURES}
    print(setting.load, setting.trace, json.dumps(entry), flush=True)
    return entry


def _earlier() -> Any:
    """Return the figures that were kept before."""
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def _keep(parts: dict[str, Any]) -> None:
    """Keep new figures beside the earlier ones."""
    DATA.write_text(json.dumps(_earlier() | parts, indent=1, sort_keys=True) + "\n")


def _means(reports: list[Any]) -> dict[str, float]:
    """Of shares the largest of any trace, and of drops all."""
    return means(reports) | {
        "largest_share": max(max(r.shares) for r in reports),
        "dropped": float(sum(r.dropped for r in reports)),
    }


def _draw(scorers: dict[str, Any], best_name: str) -> None:
    """One held-out trace: the best heuristic, the first trained router, the clairvoyant."""
    setting = make_setting("mixed", requests=REQUESTS)
    seed = held_out(1)[0]
    scene = draw_scenario(setting, seed)
    from keel.apps.serving.vector_clusters import VectorClusters

    many = VectorClusters(setting, 1)
    many.begin(0, scene, seed)
    many.observe(many.all)
    scorer = next(iter(scorers.values()))
    for _ in range(setting.requests):
        replicas, request, mask = many.observations
        many.step(np.where(mask, scorer(replicas, request), -np.inf).argmax(1))
    policy = many.result(0, LEARNED)
    best = simulate(scene.cluster, scene.workload, best_name, scene.conditions, seed)
    others = [
        simulate(scene.cluster, scene.workload, name, scene.conditions, seed)
        for name in ("round-robin", "cache-work")
    ]
    all_of_them = [
        *others,
        best,
        policy,
        clairvoyant(scene.cluster, scene.workload, scene.conditions),
    ]
    write_latencies(all_of_them, IMAGES / "serving-latencies.png")
    write_timeline(best, IMAGES / "serving-heuristic.png")
    write_timeline(policy, IMAGES / "serving-policy.png")


def collapse(seeds: list[int]) -> None:
    """The router that collapsed, mended, and what makes its largest share, beside round robin."""
    run_seeds("collapse", {"after": router_collapse.EVEN} | router_collapse.VARIANTS, seeds)
    found = evaluate_routers(
        make_setting("light-load"), held_out(TRACES), ("round-robin", "least-outstanding")
    )
    _keep({
        "collapse_round_robin": _means(found["round-robin"]),
        "collapse_headroom": headroom(found).to_dict(),
    })  # fmt: skip


def run_seeds(key: str, variants: Mapping[str, router_collapse.Variant], seeds: list[int]) -> None:
    """Run what is not in the data yet, and keep it."""
    for name, variant in variants.items():
        for seed in seeds:
            runs = _earlier().get(key, {})
            if str(seed) in runs.get(name, {}):
                continue
            summary = router_collapse.run_variant(variant, seed)
            print(key, name, seed, json.dumps(summary), flush=True)
            _keep({key: runs | {name: runs.get(name, {}) | {str(seed): summary}}})


def speed(data: Path) -> None:
    """On one thread: decisions a second of 64 clusters, simulated requests beside Vidur's."""
    torch.set_num_threads(1)
    told = {"speed": {"decisions": {}, "vidur": _earlier().get("speed", {}).get("vidur", {})}}
    for setting in ("equal", "mixed"):
        envs = vector_env(64, setting=setting)
        envs.reset(0)
        actions = np.random.default_rng(0).integers(0, 4, (512, 64))
        rates = []
        for _ in range(6):
            begin = time.perf_counter()
            for action in actions:
                envs.step(action)
            rates.append(actions.size / (time.perf_counter() - begin))
        told["speed"]["decisions"][setting] = statistics.median(rates[1:])
    for name, (tables, theirs) in VIDUR_SPEED.items():
        results = data / "vidur" / f"{name}.csv"
        if not results.is_file():
            continue
        found = compare(results, load_tables(data / "vidur" / f"{tables}_tables.npz"))
        told["speed"]["vidur"][name] = {
            **found.to_dict(),
            "vidur": theirs,
            "ratio": found.requests_per_second / theirs,
        }
    print(json.dumps(told["speed"], indent=1))
    _keep(told)


def page() -> None:
    """Tables from the data."""
    told = json.loads(DATA.read_text())
    TABLES.mkdir(exist_ok=True)
    for name in SETTINGS:
        if name in told:
            _write(f"{name}.md", _setting_table(told[name]))
    if "collapse_headroom" in told:
        _write("collapse.md", router_collapse.collapse_table(told))
        _write("collapse-causes.md", router_collapse.causes_table(told["collapse"]))
    if "explore" in told:
        _write("explore.md", router_collapse.explore_table(told["explore"]))
    if "fresh" in told:
        _write("fresh.md", fresh_traces.fresh_table(told["fresh"]))
    if "sizes" in told:
        _write("sizes.md", _sizes_table(told["sizes"]))
        _write("loads.md", _beside_table("load", told["loads"]))
        _write("traces.md", _beside_table("trace", told["traces"]))
    if "speed" in told:
        _write("fidelity.md", _fidelity_table(told["speed"]))


def _write(name: str, lines: list[str]) -> None:
    (TABLES / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), end="\n\n")


def _setting_table(entry: dict[str, Any]) -> list[str]:
    lines = [
        "| router | mean end to end | p99 to the first token | SLO | prefix cached | largest share "
        "| dropped |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = {**entry["routers"], **{f"**{k}**": v for k, v in entry["policies"].items()}}
    for name, x in rows.items():
        lines.append(
            f"| {name} | {x['end_to_end']:.3f} s | {x['ttft_p99']:.3f} s | {x['slo']:.1%} "
            f"| {x['cache_hits']:.0%} | {x['largest_share']:.0%} | {x['dropped']:.0f} |"
        )
    lines.append("")
    for measure, label in MEASURES.items():
        room = entry["headroom"][measure]
        lines.append(
            f"- {label}: {room['best']} is the best heuristic; the clairvoyant saves "
            f"{room['room']:.1%} ({room['low']:.1%} to {room['high']:.1%}): {room['verdict']}."
        )
        for seed, x in entry["policies"].items():
            own = x["gains"][measure]
            lines.append(
                f"    - {seed} saves {own['gain']:.1%} ({own['low']:.1%} to {own['high']:.1%})"
            )
    return lines


def _sizes_table(sizes: dict[str, Any]) -> list[str]:
    seeds = list(next(iter(sizes.values())))
    lines = [
        f"| replicas, setting | speeds | {' | '.join(seeds)} |",
        "|---|---|" + "---:|" * len(seeds),
    ]
    for name, entry in sorted(sizes.items(), key=lambda item: _by_number(item[0])):
        for kind in ("guessed", "told"):
            cells = " | ".join(saved(entry[seed][kind]) for seed in seeds)
            lines.append(f"| {name} | {kind} | {cells} |")
    return lines


def _by_number(name: str) -> tuple[str, int]:
    count, setting = name.split(", ")
    return setting, int(count)


def _beside_table(what: str, entries: dict[str, Any]) -> list[str]:
    seeds = list(next(iter(entries.values()), {}))
    lines = [
        f"| {what} | measure | best heuristic | {' | '.join(seeds)} |",
        "|---|---|---|" + "---:|" * len(seeds),
    ]
    for name, entry in entries.items():
        for measure, label in MEASURES.items():
            first = entry[seeds[0]][measure]
            cells = " | ".join(saved(entry[seed][measure]) for seed in seeds)
            lines.append(
                f"| {name} | {label} | {first['against']}, {first['other']:.3f} s | {cells} |"
            )
    return lines


def _fidelity_table(speed: dict[str, Any]) -> list[str]:
    lines = [
        "| Vidur's results | requests | largest error, any request | restarts | requests/s "
        "| Vidur, measured once |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, x in speed["vidur"].items():
        lines.append(
            f"| {name} | {x['requests']} | {x['max_relative_error']:.1e} | {x['restarts']} "
            f"| {x['requests_per_second']:,.0f} | {x['vidur']:,.0f} ({x['ratio']:,.0f}×) |"
        )
    return lines


def main() -> None:
    """What the first word says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "action", choices=("train", "judge", "collapse", "explore", "fresh", "speed", "page")
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    closed_form("llama-2-7b-a100")  # a typo in the tables is told before anything is trained
    if args.action == "train":
        for seed in args.seeds:
            train_seed(args.runs / "router", "serving", seed)
        return
    if args.action == "judge":
        judge_all(args.runs, args.data)
    if args.action == "collapse":
        collapse(args.seeds)
    if args.action == "fresh":
        fresh(args.runs)
    if args.action == "explore":
        run_seeds("explore", router_collapse.EXPLORATION, args.seeds)
    if args.action == "speed":
        speed(args.data)
    page()


if __name__ == "__main__":
    main()
