# SPDX-License-Identifier: Apache-2.0
"""Does `banyan route` find as much in the caches as the dispatcher inside an engine?

    python -m benchmark.router_hits --data FOLDER --repetitions 3

Two servers of one rank behind a router, and one server of two ranks that places requests itself and copies nothing, on
the same cores: same traces, same policy, same pools, in alternating order, each time from empty caches. What is
compared is the share of prompt tokens that the servers found in their caches. Writes build/router-hits/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark import trace_replay
from benchmark.client import NativeClient, open_session
from benchmark.compare import order_of_repetition
from benchmark.measure import flush_cache
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.policy_table import TRACES, add_stretch_option, server_spec, trace_options
from benchmark.provenance import provenance
from benchmark.replay import Workload, play, summary
from benchmark.replay_options import workload_of
from benchmark.router_failover import router
from benchmark.router_failover import server_spec as routed_spec
from benchmark.servers import Server, ServerSpec, unwind_on_sigterm, wait_ready

REAL_TRACES = ("mooncake", "claude_code")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Side:
    """One way to place requests: where they are sent, and the servers that answer them."""

    url: str
    servers: tuple[Server, ...]


async def measure(side: Side, workload: Workload) -> dict[str, Any]:
    """One run from empty caches."""
    for server in side.servers:
        await flush_cache(server.url)
    async with open_session(TIMEOUT_S) as session:
        records, total_time_s = await play(workload, NativeClient(session, side.url), arrived=lambda record: None)
    return summary(workload, records, total_time_s=total_time_s)


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per trace: both cached shares (median, least, most), and the router's over the engine's."""
    rows = []
    for trace in dict.fromkeys(run["trace"] for run in runs):
        shares = {
            side: sorted(run["cached_share"] for run in runs if (run["trace"], run["side"]) == (trace, side))
            for side in ("router", "engine")
        }
        medians = {side: statistics.median(values) for side, values in shares.items()}
        rows.append(
            {
                "trace": trace,
                "cached_share": {
                    side: {"median": medians[side], "min": values[0], "max": values[-1]}
                    for side, values in shares.items()
                },
                "router_to_engine": medians["router"] / medians["engine"] if medians["engine"] else None,
                "num_errors": sum(run["num_errors"] for run in runs if run["trace"] == trace),
            }
        )
    return rows


def measure_all(
    sides: dict[str, Side], workloads: dict[str, Workload], repetitions: int, said: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every workload on both sides, the other side asleep."""
    runs = []
    for repetition in range(1, repetitions + 1):
        for name in order_of_repetition(list(sides), repetition):
            for other, side in sides.items():
                for server in side.servers:
                    server.awake() if other == name else server.asleep()
            for trace, workload in workloads.items():
                run = {"trace": trace, "side": name, "repetition": repetition}
                run |= asyncio.run(measure(sides[name], workload))
                said(f"{trace} {name} #{repetition}: cached {run['cached_share']}, {run['num_errors']} failed")
                runs.append(run)
    for side in sides.values():
        for server in side.servers:
            server.awake()
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.router_hits", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--trace", action="append", choices=list(TRACES))
    parser.add_argument("--policy", default="lmetric")
    parser.add_argument("--repetitions", type=int, default=3)
    add_stretch_option(parser)
    parser.add_argument("--out", type=Path, default=Path("build/router-hits"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    replay = trace_replay.build_parser()
    workloads = {
        name: workload_of(replay.parse_args([*trace_options(name, args.data, args.stretch), "describe"]))
        for name in args.trace or REAL_TRACES
    }
    alone = server_spec("index", args.out)
    inside = replace(alone, args=(*alone.args, "--banyan-policy", args.policy))
    with ExitStack() as stack:

        def start(spec: ServerSpec) -> Server:
            return stack.enter_context(Server(spec, model, args.out / "logs"))

        apart = tuple(start(routed_spec(f"routed-{core}", core, alone.args)) for core in (0, 1))
        wait_ready(apart)
        for server in apart:
            server.asleep()
        engine = start(inside)
        wait_ready([engine])
        for server in apart:
            server.awake()
        url = stack.enter_context(router([server.url for server in apart], args.policy, args.out / "router.log"))
        sides = {"router": Side(url, apart), "engine": Side(engine.url, (engine,))}
        runs = measure_all(sides, workloads, args.repetitions, lambda text: print(text, file=sys.stderr, flush=True))
    rows = summarise(runs)
    report = {"rows": rows, "runs": runs, "policy": args.policy, "provenance": provenance()}
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
