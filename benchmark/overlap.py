# SPDX-License-Identifier: Apache-2.0
"""How much of the store's I/O the forward pass hides: layer by layer against loading everything first.

    python -m benchmark.overlap --rates 500,1000,2000

For each read rate (a device throttled in software) and each way of reading, a server of one rank is started on the same
store. Each cell is a prompt of `--tokens` tokens of which a share lies in the store. `stall_s` is the time that the
forward pass waited for layers, as the server counts it; `io_s` the bytes over the rate; `compute_s` the same new tokens
behind the same prefix, which then lies in the rank's own pool. Hidden is what of the I/O time was not waited for.
Writes build/overlap/report.json.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from banyan.planner import Action
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.results import write_report
from benchmark.servers import unwind_on_sigterm
from benchmark.store_server import StoreServer, prompts

PAGE_TOKENS = 16
HIT_PERCENTS = (0, 50, 75, 90, 95, 98)
FLAGS = ("--max-total-tokens", "16000", "--banyan-store-gb", "16")
WAYS = {"layer_wise": "1", "everything_first": "0"}


def split(num_tokens: int, hit_percent: int) -> int:
    """Tokens of the stored prefix: whole pages."""
    return num_tokens * hit_percent // 100 // PAGE_TOKENS * PAGE_TOKENS


def write_prefixes(
    store: Path, model: Path, logs: Path, cells: dict[tuple[int, int], list[int]], num_tokens: int
) -> None:
    """Fill the store with the prefix of every cell, a prompt by hit share and repeat."""
    with StoreServer("writer", store, model, logs, dp=1, args=(*FLAGS, "--banyan-host-gb", "4")) as server:
        num_pages = 0
        for (hit_percent, _), ids in cells.items():
            num_cached = split(num_tokens, hit_percent)
            if num_cached:
                server.ask([*ids[:num_cached], 5], rank=0)
                num_pages += num_cached // PAGE_TOKENS
        if server.wait_stored(num_pages) < num_pages:
            raise RuntimeError(f"{server.total('archived_pages')} of {num_pages} pages were stored")


def measure(server: StoreServer, ids: list[int], num_cached: int, rate_mb_per_s: int) -> dict[str, Any]:
    """One prefill behind a stored prefix, then the same new tokens behind the same prefix in the pool."""
    before = {name: server.total(name) for name in ("wait_us", "read_bytes")}
    answer = server.ask(ids, rank=0, action=Action.MOVE)
    after = {name: server.total(name) for name in before}
    if not num_cached - PAGE_TOKENS <= answer.details.get("storage", 0) <= num_cached:
        raise RuntimeError(f"{num_cached} tokens should have come from the store: {answer.details}")
    # Other new tokens of the same number behind the prefix, which the pool holds now.
    computed = server.ask([*ids[:num_cached], *reversed(ids[num_cached:])], rank=0)
    if computed.details.get("storage", 0):
        raise RuntimeError(f"nothing should have come from the store: {computed.details}")
    return {
        "ttft_s": answer.ttft_s,
        "stall_s": (after["wait_us"] - before["wait_us"]) / 1e6,
        "io_s": (after["read_bytes"] - before["read_bytes"]) / (rate_mb_per_s * 1e6),
        "compute_s": computed.ttft_s,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each cell, and how much of the I/O each way hides."""
    cells = []
    for key in dict.fromkeys((row["rate_mb_per_s"], row["hit_percent"], row["way"]) for row in rows):
        same = [row for row in rows if (row["rate_mb_per_s"], row["hit_percent"], row["way"]) == key]
        figures = {
            name: statistics.median(row[name] for row in same) for name in ("ttft_s", "stall_s", "io_s", "compute_s")
        }
        hidden = 1 - figures["stall_s"] / figures["io_s"] if figures["io_s"] else None
        cells.append(
            {
                **dict(zip(("rate_mb_per_s", "hit_percent", "way"), key, strict=True)),
                **figures,
                "hidden_share": hidden,
                "io_below_compute": figures["io_s"] < figures["compute_s"],
                "num_repeats": len(same),
            }
        )
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=lambda text: [int(part) for part in text.split(",")], default=[500, 1000, 2000])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/overlap"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    keys = list(product(HIT_PERCENTS, range(args.repeats)))
    cells = dict(zip(keys, prompts(model, [args.tokens] * len(keys), seed=args.seed), strict=True))
    store = args.out / "store"
    for left in (store, args.out / "read"):
        shutil.rmtree(left, ignore_errors=True)
    write_prefixes(store, model, args.out / "logs", cells, args.tokens)
    rows = []
    for rate in args.rates:
        for way, layers in WAYS.items():
            throttle = ("--banyan-store-read-mb-per-s", str(rate), "--banyan-store-layers-per-read", layers)
            flags = (*FLAGS, "--banyan-host-gb", "2", *throttle)
            # A copy each: what this server answers is archived, and would be found by the next one.
            read = shutil.copytree(store, args.out / "read")
            with StoreServer(f"{way}-{rate}", read, model, args.out / "logs", dp=1, args=flags) as server:
                server.ask(list(range(1000, 1400)), rank=0)
                for (hit, repeat), ids in cells.items():
                    row = measure(server, ids, split(args.tokens, hit), rate)
                    rows.append({"rate_mb_per_s": rate, "way": way, "hit_percent": hit, "repeat": repeat, **row})
            shutil.rmtree(read)
    report = {"cells": summarise(rows), "rows": rows}
    write_report(args.out / "report.json", report, args)
    shutil.rmtree(store, ignore_errors=True)
    for cell in report["cells"]:
        hidden = "-" if cell["hidden_share"] is None else f"{cell['hidden_share']:.0%}"
        times = "  ".join(f"{name} {cell[name]:.3f}" for name in ("stall_s", "io_s", "compute_s", "ttft_s"))
        print(f"{cell['rate_mb_per_s']:5d} MB/s {cell['hit_percent']:3d} % {cell['way']:16s} {times}  hidden {hidden}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
