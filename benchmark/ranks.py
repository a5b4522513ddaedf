# SPDX-License-Identifier: Apache-2.0
"""More ranks, and more load on each: what sharing is worth with 1 to 8 ranks and 1 to 16 requests a rank.

    python -m benchmark.ranks [--dp 1 --dp 2 --dp 4 --dp 8] [--load 1 --load 4 --load 16] [--repetitions 3]

For each number of ranks a server with Banyan and one with sharing off are up and take turns; who has no turn is
stopped. A turn is one load: prompts that have nothing in common are asked, then asked again in another order, with so
many requests in flight for each rank that has been started. Every rank's pool has room for all of them, so what a
server does not find again is what lies at another rank. There are more ranks than cores, so the times of servers with
different numbers of ranks are not comparable; those of on and off are. `--policy round_robin` has Banyan place requests
as sharing off does: what is left of a difference is not of placement.

The model is a small Llama with random weights, wide enough that a prompt is worth computing only once. Leaves
build/ranks/report.json, and every request in results.jsonl. Exits with 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from banyan.config import POLICY_CHOICES
from benchmark.compare import Target, across_repetitions, mean_ratio, measure_alternately
from benchmark.load import Arrivals
from benchmark.measure import RunResult, Workload
from benchmark.metrics import paired_ratio
from benchmark.modes.models import WIDE, ensure, random_prompt
from benchmark.processor import CPU_ENGINE
from benchmark.results import append_lines, write_report
from benchmark.servers import Server, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.warm import ForkedServer
from benchmark.workload.known import KnownPrompts

PAGE_TOKENS = 16
PROMPT_TOKENS = 600
OUTPUT_TOKENS = 12
MIN_PROMPTS = 32
START_TIMEOUT_S = 600.0
KINDS: tuple[Share, ...] = ("off", "on")


def prompts_of(num_prompts: int, seed: int) -> KnownPrompts:
    """Prompts that have nothing in common."""
    rng = random.Random(f"ranks-{seed}")
    return KnownPrompts(
        {f"prompt-{number}": random_prompt(rng, PROMPT_TOKENS) for number in range(num_prompts)}, OUTPUT_TOKENS
    )


def num_prompts_at(num_ranks: int, load: int) -> int:
    """Enough that every rank has its load to begin with."""
    return max(MIN_PROMPTS, num_ranks * load)


def pool_tokens(num_ranks: int, loads: Sequence[int]) -> int:
    """Of each rank: all prompts with their answers, and what a step of decoding takes besides."""
    per_prompt = math.ceil((PROMPT_TOKENS + OUTPUT_TOKENS) / PAGE_TOKENS + 1) * PAGE_TOKENS
    return (num_prompts_at(num_ranks, max(loads)) + 8) * per_prompt


def start(share: Share, num_ranks: int, args: argparse.Namespace, model: Path, logs: Path) -> Server:
    flags = (
        *(*CPU_ENGINE, "--page-size", str(PAGE_TOKENS), "--context-length", "2048", "--sleep-on-idle"),
        *("--max-total-tokens", str(pool_tokens(num_ranks, args.load))),
        *("--max-running-requests", str(max(args.load) * 4)),
        *(("--banyan-policy", args.policy) if share == "on" and args.policy else ()),
    )
    return ForkedServer(
        ServerSpec(share, num_ranks, share, flags, cpu_env(dp=num_ranks, num_cores=args.num_cores)), model, logs
    )


def measure_ranks(num_ranks: int, args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """The rows of one number of ranks: both kinds under every load."""
    logs = args.out / f"logs-{num_ranks}"
    with ExitStack() as stack:
        servers = [start(share, num_ranks, args, model, logs) for share in KINDS]
        for server in servers:
            stack.callback(server.stop)
        wait_ready(servers, timeout_s=START_TIMEOUT_S)
        targets = [Target(server.spec.label, server.url, server) for server in servers]
        return [row_of(num_ranks, load, _measure_load(targets, num_ranks, load, args)) for load in args.load]


def _measure_load(
    targets: Sequence[Target], num_ranks: int, load: int, args: argparse.Namespace
) -> Sequence[RunResult]:
    def finished(result: RunResult) -> None:
        append_lines(args.out / "results.jsonl", ({"dp": num_ranks, "load": load, **x} for x in result.to_lines()))
        summary = result.summary
        ttft, share = summary["ttft_s"], summary["cached_share"]
        print(
            f"[ranks] dp {num_ranks}, {load} a rank, {result.label}, repetition {result.repetition}, run {result.run}: "
            f"TTFT {ttft['mean'] if ttft else 0:.3f} s, {share or 0:.1%} cached, {summary['num_errors']} failed",
            file=sys.stderr,
        )

    prompts = prompts_of(num_prompts_at(num_ranks, load), args.seed)
    workload = Workload(prompts.scripts, prompts, Arrivals(concurrency=num_ranks * load), args.seed)
    return asyncio.run(measure_alternately(targets, workload, args.repetitions, finished=finished))


def row_of(num_ranks: int, load: int, results: Sequence[RunResult]) -> dict[str, Any]:
    """What one number of ranks under one load came to, on and off."""
    return {
        "dp": num_ranks,
        "requests_per_rank": load,
        "num_prompts": num_prompts_at(num_ranks, load),
        "ttft_ratios": {run: mean_ratio("ttft_s", results, "on", "off", run) for run in (1, 2)},
        "latency_ratios": {run: mean_ratio("latency_s", results, "on", "off", run) for run in (1, 2)},
        "tpot_p90_ratio": paired_ratio(*(_values(results, kind, "time_per_output_token_ms") for kind in ("on", "off"))),
        "kinds": {kind: {run: _figures(results, kind, run) for run in (1, 2)} for kind in KINDS},
        "num_errors": sum(result.summary["num_errors"] for result in results),
    }


def _values(results: Sequence[RunResult], kind: str, name: str) -> list[float]:
    """The p90 of each run, first and second, in the order of repetitions."""
    chosen = sorted((result.repetition, result.run, result) for result in results if result.label == kind)
    return [result.summary[name]["p90"] for _, _, result in chosen if result.summary[name]]


def _figures(results: Sequence[RunResult], kind: str, run: int) -> dict[str, Any]:
    found = across_repetitions(results, kind, run)
    kept = ("cached_share", "ttft_s_mean", "ttft_s_p50", "ttft_s_p90", "time_per_output_token_ms_p90")
    return {name: found[name] for name in (*kept, "completed_per_s", "num_errors")}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.ranks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dp", type=int, action="append", metavar="N", help="default: 1, 2, 4 and 8")
    parser.add_argument("--load", type=int, action="append", metavar="N", help="requests a rank; default: 1, 4 and 16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--policy", choices=POLICY_CHOICES, help="how Banyan places requests; default: its own default")
    parser.add_argument("--num-cores", type=int, default=2, help="that the ranks are spread over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/ranks"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.dp, args.load = args.dp or [1, 2, 4, 8], args.load or [1, 4, 16]
    unwind_on_sigterm()
    (args.out / "results.jsonl").unlink(missing_ok=True)
    model = ensure(WIDE)
    rows = [row for num_ranks in args.dp for row in measure_ranks(num_ranks, args, model)]
    sizes = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "model": WIDE.name}
    write_report(args.out / "report.json", {"rows": rows, "sizes": sizes}, args)
    print(json.dumps({"num_errors": sum(row["num_errors"] for row in rows)}))
    return 1 if any(row["num_errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
