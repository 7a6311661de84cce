"""Small tables, and a replica in plain Python: one iteration after the other, nothing clever."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keel.apps.serving.observations import update_pace
from keel.apps.serving.tables import Tables, make_tables
from keel.apps.serving.workload import Workload


def toy_tables(grouped: bool = False, blocks: int = 4_000) -> Tables:
    """Times that differ wherever a rule looks: one layer, milliseconds."""
    tokens = np.arange(1025.0)
    linear = 1.0 + 0.01 * tokens
    batch, kv = np.arange(129.0)[:, None], np.arange(65.0)
    decode = 0.1 + 0.02 * batch + 0.003 * batch * kv
    read = np.arange(513.0)
    prefill = 0.05 + 0.001 * read + 0.0001 * read * np.arange(65.0)[:, None]
    return make_tables("toy", (linear, decode, prefill), 1, grouped, blocks)


def seconds(tables: Tables, batch: list[tuple[dict[str, Any], int]]) -> float:
    """Of one iteration: requests, and how many tokens of each."""
    total = sum(tokens for _, tokens in batch)
    spent = float(tables.linear[math.ceil(total / 8) * 8])
    writing = [x["processed"] for x, _ in batch if x["processed"] > x["prefill"]]
    if writing:
        mean = min(math.ceil(int(np.mean(writing)) / 64), 64)
        factor = 1.1 if tables.grouped and len(writing) > 1 else 1.0
        spent += factor * float(tables.decode[len(writing), mean])
    reading = [(x, n) for x, n in batch if not x["processed"] > x["prefill"]]
    if reading:
        kv = sum(math.ceil(x["processed"] / 64) * 64 for x, _ in reading)
        size = round(math.sqrt(sum(n * n for _, n in reading)))
        factor = 1.1 if tables.grouped and len(reading) > 1 else 1.0
        spent += factor * float(tables.prefill[min(kv, 4096) // 64, size])
    return spent * tables.layers * 1e-3


def one_by_one(
    tables: Tables,
    workload: Workload,
    blocks: int,
    chunk: int = 512,
    cap: int = 128,
    told: dict[str, float] | None = None,
) -> list[dict[str, Any]]:
    """A single replica, Sarathi's order, iteration by iteration; `told` is filled with its pace,
    its busy seconds and the tokens it has read and written."""
    requests = [
        {"id": i, "arrival": float(a), "prefill": int(p), "total": int(p + o), "processed": 0,
         "held": 0, "first": math.nan, "end": math.nan, "restarts": 0}
        for i, (a, p, o) in enumerate(
            zip(workload.arrival, workload.prompt, workload.output, strict=True))
    ]  # fmt: skip
    coming, queue, running, free = list(requests), [], [], blocks
    watermark, now = int(0.01 * blocks), 0.0
    pace, busy, done = 0.0, 0.0, 0

    def restart(x: dict[str, Any]) -> None:
        nonlocal free
        x["prefill"], x["processed"] = x["processed"], 0
        x["restarts"] += 1
        free += x["held"]
        x["held"] = 0
        queue.insert(0, x)

    while coming or queue or running:
        while coming and coming[0]["arrival"] <= now:
            queue.append(coming.pop(0))
        batch: list[tuple[dict[str, Any], int]] = []
        reading: list[dict[str, Any]] = []
        while running and len(batch) < cap:
            x = running.pop(0)
            if not x["processed"] > x["prefill"]:
                reading.append(x)
                continue
            while free < 1:
                if running:
                    restart(running.pop())
                else:
                    restart(x)
                    break
            else:
                if x["processed"] > x["held"] * 16:
                    x["held"] += 1
                    free -= 1
                batch.append((x, 1))
        used, aside = len(batch), []
        for x in reading:
            more = min(x["prefill"] - x["processed"], chunk - used)
            if more > 0:
                batch.append((x, more))
                used += more
            else:
                aside.append(x)
        running = sorted([*aside, *running], key=lambda x: x["arrival"])
        while queue and len(batch) + len(running) < cap:
            need = math.ceil(queue[0]["prefill"] / 16)
            more = min(queue[0]["prefill"], chunk - used)
            if free - need < watermark or more <= 0:
                break
            x = queue.pop(0)
            x["held"] = need
            free -= need
            batch.append((x, more))
            used += more
        if not batch:
            now = coming[0]["arrival"]
            continue
        spent = seconds(tables, batch)
        now, busy, done = now + spent, busy + spent, done + used
        if any(x["processed"] > x["prefill"] for x, _ in batch):
            pace = update_pace(pace, spent)
        for x, tokens in batch:
            x["processed"] += tokens
            if x["processed"] == x["prefill"]:
                x["processed"] += 1
                x["first"] = now if math.isnan(x["first"]) else x["first"]
            if x["processed"] == x["total"]:
                x["end"] = now
                free += x["held"]
            else:
                running.append(x)
    if told is not None:
        told |= {"pace": pace, "busy": busy, "tokens": done}
    return requests
