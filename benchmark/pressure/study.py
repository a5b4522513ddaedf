# SPDX-License-Identifier: Apache-2.0
"""What is found again when the working set exceeds the pools: Banyan, what it is made of, and its yardsticks.

    python -m benchmark.pressure.study --data FOLDER --draws 5      # make pressure

Everything here is a model: the decisions are the shipped ones, the trees, batches, copies and times are not. Times are
virtual, so nothing depends on the machine. What the report compares:

    single        one rank with all the memory, as stock SGLang has it
    belady        one rank with all the memory that evicts what is wanted latest
    random        one rank with all the memory that evicts leaves by lot (arXiv 2601.18999 takes leaves at random)
    router        ranks that share nothing behind SGLang's router, cache_aware
    apart NAME    ranks that share nothing, under policy NAME
    lru           ranks that fetch; each evicts its oldest leaf; what a fetch displaces costs nothing
    displacing    as lru, with the cost of what a fetch displaces
    duplicates    as displacing, and each evicts duplicates among its oldest leaves first
    loss          as displacing, and each evicts what it expects to cost least
    splitting       as loss, and long nodes are split, so that a leaf's tail can go alone
    waiting       as splitting, and requests wait for a prefix that a rank is computing
    banyan        as waiting, and ranks hear what their peers are asked for: the default without an arena
    unlearnt      as banyan, and a page's age alone is its chance
    banyan arena  as banyan, with a host arena of four times the pools
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from benchmark.pressure.node import PAGE_TOKENS, Node
from benchmark.pressure.setting import (
    BELADY,
    DUPLICATES_FIRST,
    LOSS,
    LOSS_BY_AGE,
    RANDOM,
    ROUTER,
    Outcome,
    Setting,
)
from benchmark.pressure.workloads import Drawn, all_from
from benchmark.provenance import provenance

RATIOS = (0.5, 1.0, 1.75, 4.0)
RANKS = (2, 4, 8)
ARENA_POOLS = 4
APART = ("round_robin", "affinity", "linear", "lmetric", "unified", "hybrid")


def systems(num_ranks: int, total_pages: int, seed: int) -> dict[str, Setting]:
    """What is compared at equal memory."""
    pool = total_pages // num_ranks
    alone: dict[str, Any] = {"num_ranks": 1, "pool_pages": pool * num_ranks, "seed": seed}
    ranks: dict[str, Any] = {"num_ranks": num_ranks, "pool_pages": pool, "seed": seed}
    loss: dict[str, Any] = {**ranks, "counts_displaced": True, "evicts": LOSS}
    waiting: dict[str, Any] = {**loss, "splits": True, "waits": True}
    banyan: dict[str, Any] = {**waiting, "hears": True}
    return {
        "single": Setting(**alone),
        "belady": Setting(**alone, evicts=BELADY),
        "random": Setting(**alone, evicts=RANDOM),
        "router": Setting(**ranks, fetches=False, policy=ROUTER),
        **{f"apart {policy}": Setting(**ranks, fetches=False, policy=policy) for policy in APART},
        "lru": Setting(**ranks),
        "displacing": Setting(**ranks, counts_displaced=True),
        "duplicates": Setting(**{**loss, "evicts": DUPLICATES_FIRST}),
        "loss": Setting(**loss),
        "splitting": Setting(**loss, splits=True),
        "waiting": Setting(**waiting),
        "banyan": Setting(**banyan),
        "unlearnt": Setting(**{**banyan, "evicts": LOSS_BY_AGE}),
        "banyan arena": Setting(**banyan, arena_pages=ARENA_POOLS * total_pages),
    }


def cells(kinds: dict[str, Any], *, num_prompts: int, draws: int) -> Iterator[dict[str, Any]]:
    """One row for each workload, ratio, number of ranks, system and draw."""
    for kind, draw in kinds.items():
        for seed in range(draws):
            drawn: Drawn = draw(num_prompts, seed)
            longest = max(map(len, drawn.prompts))
            for ratio in RATIOS:
                total_pages = int(drawn.num_distinct / ratio)
                for num_ranks in RANKS:
                    # A rank that cannot hold two prompts at once is another study.
                    if total_pages // num_ranks < 2 * longest:
                        continue
                    for name, setting in systems(num_ranks, total_pages, seed).items():
                        outcome = Node(setting).play(drawn.prompts, drawn.num_measured)
                        about = {"workload": kind, "ratio": ratio, "num_ranks": num_ranks, "system": name, "seed": seed}
                        yield {**about, **row(outcome), "setting": asdict(setting)}


def row(outcome: Outcome) -> dict[str, float]:
    """What a draw gave."""
    return {
        "hits": outcome.hits,
        "distinct_share": fmean(outcome.distinct),
        "spare_share": fmean(outcome.spare),
        "fetched_share": outcome.num_fetched / outcome.num_tokens,
        "evicted_last_share": outcome.num_evicted_last / max(1, outcome.num_evicted),
        "ttft_mean_s": fmean(outcome.ttft_s),
        "ttft_p90_s": quantiles(outcome.ttft_s, n=10)[8],
    }


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the draws."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["workload"], one["ratio"], one["num_ranks"], one["system"]), []).append(one)
    names = (
        "hits",
        "distinct_share",
        "spare_share",
        "fetched_share",
        "evicted_last_share",
        "ttft_mean_s",
        "ttft_p90_s",
    )
    return [
        {
            **dict(zip(("workload", "ratio", "num_ranks", "system"), key, strict=True)),
            "draws": len(group),
            **{name: round(fmean(one[name] for one in group), 4) for name in names},
            "hits_by_draw": [round(one["hits"], 3) for one in group],
        }
        for key, group in groups.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pressure", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of recorded workloads; without it only those that are made")
    parser.add_argument("--workload", action="append", help="one of them; give several")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/pressure/report.json"))
    args = parser.parse_args(argv)
    kinds = {name: draw for name, draw in all_from(args.data).items() if not args.workload or name in args.workload}
    if not kinds:
        print(f"pressure: none of these workloads is there: {args.workload}", file=sys.stderr)
        return 2
    rows = []
    for one in cells(kinds, num_prompts=args.prompts, draws=args.draws):
        rows.append(one)
        where = (
            f"{one['workload']:>10} x{one['ratio']:<5} {one['num_ranks']} ranks  #{one['seed']}  {one['system']:<18}"
        )
        print(
            f"{where} hits {one['hits']:.3f}  distinct {one['distinct_share']:.3f}  spare {one['spare_share']:.3f}",
            flush=True,
        )
    report = {
        "what": "a model: hits, distinct pages and moved tokens are counted, times are virtual",
        "provenance": provenance(),
        "page_tokens": PAGE_TOKENS,
        "prompts": args.prompts,
        "table": table(rows),
        "draws": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
