# SPDX-License-Identifier: Apache-2.0
"""Banyan beside what else one would use, on the same work: `make compare`.

    python -m benchmark.alternatives --quick
    python -m benchmark.alternatives --data FOLDER --trace conversations --trace documents --repetitions 2

Stock SGLang with two ranks, two stock servers behind SGLang's router, these with HiCache, HiCache alone and with a file
backend that both ranks share, LMCache, and Banyan: plain, with a store, and two servers behind `banyan route`. All run
on the same CPU engine, which one more row goes without (as_shipped). All have two ranks of one compute thread each, not
pinned, equal pools, and the same DRAM and disk where they have such a tier. One system is up at a time, in an order
that rotates with the repetition; each workload starts from empty caches. What has a disk is started anew and asked the
same once more. Leaves build/compare/report.json and report.html; every request is in results.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.alternatives import figures
from benchmark.alternatives.comparison import Comparison
from benchmark.alternatives.page import render_html
from benchmark.alternatives.start import ROUTER_PACKAGE
from benchmark.alternatives.systems import (
    DEFAULT_SYSTEMS,
    DTYPE_BYTES,
    GIB,
    USUAL_DRAM_TOKENS,
    Budget,
    systems_of,
    token_bytes_of,
)
from benchmark.alternatives.traces import NAMES, QUICK_REQUESTS, workloads_of
from benchmark.model import DEFAULT_TARGET, ModelUnavailable, ensure_model
from benchmark.processor import dtype_for, features_here
from benchmark.provenance import provenance
from benchmark.servers import Server, unwind_on_sigterm
from benchmark.warm import ForkedServer

METHOD = (
    "Two ranks of one compute thread each, not pinned, equal pools, equal DRAM and disk where a system has them; one "
    "system up at a time, every workload from empty caches, arrivals as recorded. All run on the same CPU engine "
    "(attention banyan_cpu, a dispatcher that sleeps), but for stock SGLang without it (torch_native), with whose "
    "times none compare."
)
QUICK_TRACES = ("tool_agents", "documents")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.alternatives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="a first look: two workloads, few requests, forked servers"
    )
    parser.add_argument("--data", type=Path, help="folder of recorded traces; without it they are generated")
    parser.add_argument("--trace", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--system", action="append", help=f"default: {', '.join(DEFAULT_SYSTEMS)}")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--max-minutes", type=float, default=float("inf"), help="start no system after so long")
    parser.add_argument("--num-requests", type=int, help="of each workload at most, the earliest")
    parser.add_argument(
        "--pool-tokens",
        type=int,
        action="append",
        metavar="N",
        help="KV pools of both ranks together; repeat it for several settings (default: 28000)",
    )
    parser.add_argument(
        "--dram-tokens", type=int, default=USUAL_DRAM_TOKENS, help="beside the pools, where a system has DRAM"
    )
    parser.add_argument("--disk-gb", type=float, default=8.0, help="where a system has a disk, in GiB")
    parser.add_argument("--stretch", type=float, default=1.0, metavar="F", help="play over F times the time")
    parser.add_argument("--dtype", choices=DTYPE_BYTES, help="default: float32 where the processor has no AVX-512")
    parser.add_argument("--model", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("build/compare"))
    return parser


def comparison_of(args: argparse.Namespace) -> Comparison:
    """What the options ask for. Raises ValueError, ModelUnavailable."""
    traces = args.trace or (QUICK_TRACES if args.quick else NAMES)
    num_requests = args.num_requests or (QUICK_REQUESTS if args.quick else None)
    model = ensure_model(args.model)
    dtype = args.dtype or dtype_for(features_here())
    token_bytes = token_bytes_of(json.loads((model / "config.json").read_text()), dtype)
    budgets = [
        Budget(pool_tokens, args.dram_tokens, round(args.disk_gb * GIB), token_bytes, dtype)
        for pool_tokens in args.pool_tokens or (28_000,)
    ]
    names = args.system or DEFAULT_SYSTEMS
    known = systems_of(budgets[0], args.out, "")
    for name in names:
        if name not in known:
            raise ValueError(f"--system {name}: one of {', '.join(known)}")
    workloads = workloads_of(traces, args.data, stretch=args.stretch, num_requests=num_requests)
    # Forked servers are up sooner. What is reported of these systems comes from servers started as users start them.
    return Comparison(workloads, budgets, names, model, args.out, ForkedServer if args.quick else Server)


def report_of(comparison: Comparison, args: argparse.Namespace, duration_s: float) -> dict[str, Any]:
    """Everything in one object."""
    found = provenance()
    try:
        found["versions"][ROUTER_PACKAGE] = importlib.metadata.version(ROUTER_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found["versions"][ROUTER_PACKAGE] = None
    titles = {name: system.title for name, system in systems_of(comparison.budgets[0], args.out, "").items()}
    config = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    config["max_minutes"] = None if args.max_minutes == float("inf") else args.max_minutes
    return {
        "rows": figures.rows_of(comparison.runs),
        "against": figures.against(comparison.runs),
        "alone": comparison.same_when_alone(),
        "not_run": comparison.not_run,
        "titles": titles,
        "workloads": {name: workload.description for name, workload in comparison.workloads.items()},
        "budgets": [dict(budget.__dict__) for budget in comparison.budgets],
        "start_up_s": comparison.start_up_s,
        "method": METHOD,
        "config": config,
        "provenance": found,
        "duration_s": round(duration_s, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    unwind_on_sigterm()
    start_s = time.monotonic()
    try:
        comparison = comparison_of(args)
    except (ValueError, ModelUnavailable) as error:
        print(f"alternatives: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.jsonl").unlink(missing_ok=True)
    try:
        comparison.measure(args.repetitions, 60 * args.max_minutes)
    finally:
        # What was measured before somebody ended it is worth a report, too.
        report = report_of(comparison, args, time.monotonic() - start_s)
        (args.out / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
        (args.out / "report.html").write_text(render_html(report))
        print(figures.table(report))
        print(f"report: {args.out / 'report.html'}  {args.out / 'report.json'}")
    return 1 if comparison.not_run or any(row["num_errors"] for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
