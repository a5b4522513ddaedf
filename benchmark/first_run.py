# SPDX-License-Identifier: Apache-2.0
"""What Banyan costs where it cannot help: prompts that nobody has seen, one at a time, on against off.

    python -m benchmark.first_run [--tokens 570 --tokens 1150] [--repetitions 7]

Servers with two ranks take turns; who has no turn is stopped. `off` and `off_again` are the same server started twice:
their ratio is what this machine makes of equal servers. Every turn begins with empty caches. What Banyan's own work on
the scheduler thread was, beside the forwards, is counted by the server. Leaves build/first_run/report.json, and every
request in results.jsonl. Exits with 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmark.compare import Target, across_repetitions, mean_ratio, measure_alternately
from benchmark.control import control_costs
from benchmark.load import Arrivals
from benchmark.measure import RunResult, Workload
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.modes.models import random_prompt
from benchmark.processor import CPU_ENGINE
from benchmark.results import append_lines, write_report
from benchmark.servers import Server, ServerSpec, Share, cpu_env, unwind_on_sigterm, wait_ready
from benchmark.warm import ForkedServer
from benchmark.workload.known import KnownPrompts

NUM_RANKS = 2
OUTPUT_TOKENS = 4
POOL_TOKENS = 16_000
"""Of a rank: twice what it is asked in a turn, and little enough that four servers fit into the memory."""
KINDS: dict[str, Share] = {"off": "off", "on": "on", "off_again": "off", "stock": "stock"}
BASELINE = "off"


def prompts_of(num_prompts: int, num_tokens: int, seed: int) -> KnownPrompts:
    """Prompts that have nothing in common."""
    rng = random.Random(f"first-run-{num_tokens}-{seed}")
    ids = {f"{num_tokens}-{number}": random_prompt(rng, num_tokens) for number in range(num_prompts)}
    return KnownPrompts(ids, OUTPUT_TOKENS)


def start(label: str, args: argparse.Namespace) -> Server:
    flags = (*CPU_ENGINE, "--page-size", "16", "--max-total-tokens", str(POOL_TOKENS), "--context-length", "4096")
    spec = ServerSpec(label, NUM_RANKS, KINDS[label], (*flags, "--sleep-on-idle"), cpu_env(dp=NUM_RANKS))
    return ForkedServer(spec, args.model, args.out / "logs")


def measure_length(targets: Sequence[Target], num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one length."""

    def finished(result: RunResult) -> None:
        append_lines(args.out / "results.jsonl", ({"tokens": num_tokens, **line} for line in result.to_lines()))
        ttft = result.summary["ttft_s"]
        print(
            f"[first run] {num_tokens} tokens, {result.label}, repetition {result.repetition}: "
            f"TTFT {ttft['mean'] if ttft else 0:.3f} s, {result.summary['num_errors']} failed",
            file=sys.stderr,
            flush=True,
        )

    prompts = prompts_of(args.prompts, num_tokens, args.seed)
    workload = Workload(prompts.scripts, prompts, Arrivals(concurrency=1), args.seed, num_runs=1)
    results = asyncio.run(measure_alternately(targets, workload, args.repetitions, finished=finished))
    return row_of(num_tokens, results)


def row_of(num_tokens: int, results: Sequence[RunResult]) -> dict[str, Any]:
    """Ratios of times to the first token and of whole requests, each within a repetition."""
    others = [label for label in KINDS if label != BASELINE]
    return {
        "prompt_tokens": num_tokens,
        "ttft_s": {label: across_repetitions(results, label, 1)["ttft_s_mean"] for label in KINDS},
        "ttft_ratios": {label: mean_ratio("ttft_s", results, label, BASELINE, 1) for label in others},
        "latency_ratios": {label: mean_ratio("latency_s", results, label, BASELINE, 1) for label in others},
        "num_errors": sum(result.summary["num_errors"] for result in results),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.first_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, action="append", metavar="N", help="of a prompt; default: 570 and 1150")
    parser.add_argument("--prompts", type=int, default=12, help="in each turn")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("build/first_run"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.tokens = args.tokens or [570, 1150]
    unwind_on_sigterm()
    (args.out / "results.jsonl").unlink(missing_ok=True)
    args.model = ensure_model(args.model)
    with ExitStack() as stack:
        servers = {}
        for label in KINDS:
            # One after the other: a server that starts takes what others load meanwhile for its own.
            servers[label] = stack.enter_context(start(label, args))
            wait_ready([servers[label]])
        targets = [Target(label, server.url, server) for label, server in servers.items()]
        rows = [measure_length(targets, num_tokens, args) for num_tokens in args.tokens]
        control = control_costs(servers["on"].url)
    write_report(args.out / "report.json", {"rows": rows, "control": control}, args)
    num_errors = sum(row["num_errors"] for row in rows)
    print(json.dumps({"num_errors": num_errors}))
    return 1 if num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
