# SPDX-License-Identifier: Apache-2.0
"""What a store is worth after a restart: first turns from the store against computing them again.

    python -m benchmark.restart --repeats 2

A server answers a set of prompts and is stopped. It is started again `--repeats` times; each time every prompt is asked
once as it is (its pages are in the store) and once under a salt (they are nowhere), in alternating order, one request
at a time. Outputs of 16 greedy tokens are compared with those of the first server. Reads go around the page
cache. Writes build/restart/report.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banyan.planner import Action
from benchmark.metrics import spread
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm
from benchmark.store_server import StoreServer, prompts

PAGE_TOKENS = 16
NUM_OUTPUT_TOKENS = 16
NUM_RANKS = 2


def measure(server: StoreServer, asked: Sequence[list[int]], repeat: int) -> list[dict[str, Any]]:
    """Both ways for each prompt, the first one taking turns; then the tokens."""
    rows = []
    # The first forwards allocate: no lesson.
    server.ask(list(range(1000, 1400)), rank=0)
    server.ask(list(range(1000, 1400)), rank=1)
    for number, ids in enumerate(asked):
        rank, salt = number % NUM_RANKS, f"again-{repeat}-{number}"
        row: dict[str, Any] = {"repeat": repeat, "prompt": number, "num_tokens": len(ids)}
        for way in ("store", "compute") if (number + repeat) % 2 else ("compute", "store"):
            if way == "store":
                answer = server.ask(ids, rank=rank)
                row |= {"store_s": answer.ttft_s, "storage_tokens": answer.details.get("storage", 0)}
            else:
                row["compute_s"] = server.ask(ids, rank=rank, action=Action.COMPUTE, salt=salt).ttft_s
        row["tokens"] = server.ask(ids, rank=rank, num_tokens=NUM_OUTPUT_TOKENS).tokens
        rows.append(row)
    return rows


def summarise(rows: Sequence[dict[str, Any]], expected: Sequence[tuple[int, ...]], num_stored: int) -> dict[str, Any]:
    """The figures of the issue: hit share, identity, and the ratio of mean TTFTs."""
    by_repeat: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_repeat.setdefault(row["repeat"], []).append(row)
    ratios = [
        statistics.mean(row["store_s"] for row in group) / statistics.mean(row["compute_s"] for row in group)
        for group in by_repeat.values()
    ]
    hits = [sum(row["storage_tokens"] for row in group) // PAGE_TOKENS for group in by_repeat.values()]
    return {
        "ttft_store_to_compute": spread(ratios),
        "ttft_store_s": spread([row["store_s"] for row in rows]),
        "ttft_compute_s": spread([row["compute_s"] for row in rows]),
        "num_stored_pages": num_stored,
        "storage_hit_share": min(hits) / num_stored if num_stored else None,
        "outputs_identical": all(row["tokens"] == expected[row["prompt"]] for row in rows),
        "num_compared": len(rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.restart", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], metavar="N,N,...")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/restart"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    asked = prompts(model, args.lengths or [2000, 3000, 4000, 5000, 6000, 7000], seed=args.seed)
    store = args.out / "store"
    shutil.rmtree(store, ignore_errors=True)
    flags = ("--max-total-tokens", "32000", "--banyan-host-gb", "3", "--banyan-store-gb", "16")
    with StoreServer("first", store, model, args.out / "logs", dp=NUM_RANKS, args=flags) as server:
        expected = [
            server.ask(ids, rank=number % NUM_RANKS, num_tokens=NUM_OUTPUT_TOKENS).tokens
            for number, ids in enumerate(asked)
        ]
        num_stored = server.wait_stored(sum(len(ids) // PAGE_TOKENS for ids in asked))
    rows: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        with StoreServer(f"again-{repeat}", store, model, args.out / "logs", dp=NUM_RANKS, args=flags) as server:
            rows += measure(server, asked, repeat)
            ranks = list(server.engine.ranks().values())
    report = {
        **summarise(rows, expected, num_stored),
        "rows": [row | {"tokens": list(row["tokens"])} for row in rows],
        "store": [rank["store"] for rank in ranks],
        "flags": flags,
    }
    write_report(args.out / "report.json", report, args)
    shutil.rmtree(store, ignore_errors=True)
    shown = {name: value for name, value in report.items() if name not in ("rows", "flags", "store")}
    print(json.dumps(shown, indent=2))
    return 0 if report["outputs_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
