# SPDX-License-Identifier: Apache-2.0
"""Do servers in Ray Serve find as much in their caches behind Banyan's router there as behind `banyan route`?

    python -m benchmark.ray_serve

Hits, not speed: two servers of one rank, with a tiny model, as deployments of `examples/ray_serve.py`. Conversations of
random tokens are played through that application, through `banyan route` in front of the same servers, and through two
of Ray Serve's own routers, in alternating order, each time from empty caches; then some prompts one at a time, whose
tokens must be those that a server gives that is asked directly. Writes build/ray-serve/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.compare import order_of_repetition
from benchmark.measure import flush_cache
from benchmark.metrics import spread
from benchmark.modes import asking, models
from benchmark.pd_agents import drawn
from benchmark.processor import CPU_ENGINE
from benchmark.results import write_report
from benchmark.router_failover import Load, router
from benchmark.servers import beside, cpu_env, free_port, unwind_on_sigterm, wait_answers

START_S = 600.0
NUM_SERVERS = 2
OUTSIDE, INSIDE = "banyan route", "Banyan's router in Ray Serve"
OF_RAY = {"Ray Serve, prefix-aware": "prefix", "Ray Serve, power of two choices": "pow2"}
SERVER_FLAGS = ("--page-size", "16", "--max-total-tokens", "20000", "--context-length", "4096", "--sleep-on-idle")
SERVE = "from ray.serve.scripts import cli; cli()"
CLUSTER = (
    ("RAY_ADDRESS", "local"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
    # Each replica asks for a core, and most of them wait for another one.
    ("RAY_OVERRIDE_RESOURCES", '{"CPU":16}'),
    # What others have of the machine's memory is no reason to end a replica.
    ("RAY_memory_monitor_refresh_ms", "0"),
    # Ray lets everything else on the machine go first.
    ("RAY_worker_niceness", "0"),
)
"""One of its own, which tells nobody."""


@dataclass(frozen=True)
class Served:
    """Two servers in Ray Serve, and its address."""

    url: str
    servers: tuple[str, ...]

    def of(self, path: str) -> str:
        """Of another application there."""
        return f"{self.url}/{path}"


@contextmanager
def served(
    arguments: Sequence[str], out: Path, *, routers: Sequence[str] = (), env: Sequence[tuple[str, str]] = ()
) -> Iterator[Served]:
    """The example's application, with servers of these ``arguments``; besides, for each of Ray's ``routers``, an
    application by its name."""
    port, first = free_port(), free_port()
    servers = [f"http://127.0.0.1:{first + 300 * number}" for number in range(NUM_SERVERS)]
    asked = {"servers": str(NUM_SERVERS), "gpus": "0", "port": str(first), "arguments": " ".join(arguments)}
    applications = [{"name": "banyan", "route_prefix": "/", "import_path": "examples.ray_serve:app", "args": asked}]
    applications += [
        {
            **{"name": name, "route_prefix": f"/{name}", "import_path": "benchmark.ray_routed:app"},
            "args": {"router": name, "servers": ",".join(servers)},
        }
        for name in routers
    ]
    out.mkdir(parents=True, exist_ok=True)
    config = out / "serve.yaml"
    config.write_text(json.dumps({"http_options": {"port": port}, "applications": applications}))
    variables = [f"{name}={value}" for name, value in (*CLUSTER, *cpu_env(dp=1), *env)]
    command = ["env", *variables, sys.executable, "-c", SERVE, "run", "--app-dir", os.getcwd(), str(config)]
    url = f"http://127.0.0.1:{port}"
    with beside(command, out / "serve.log", f"{url}/health", timeout_s=START_S):
        for server in servers:
            wait_answers(f"{server}/health_generate", lambda: True, f"{server} does not answer", timeout_s=START_S)
        yield Served(url, tuple(servers))


async def play(url: str, servers: Sequence[str], args: argparse.Namespace, repetition: int) -> dict[str, Any]:
    """One run from empty caches."""
    for server in servers:
        await flush_cache(server)
    shape = (args.conversations, args.turns, args.turn_tokens, args.output_len, args.concurrency)
    load = Load(url, *shape, repetition, draw=drawn)
    await load.play()
    complete = [one for one in load.ended if one.kind == "complete"]
    return {
        "cached_share": sum(one.cached_tokens for one in complete) / sum(one.prompt_tokens for one in complete),
        "median_s": statistics.median(one.end_s - one.start_s for one in complete),
        "num_requests": len(load.ended),
        "num_errors": len(load.ended) - len(complete),
    }


def said(url: str) -> list[tuple[float, ...]]:
    """Greedy tokens of some prompts, one at a time."""
    ask = asking.tokens(url)
    return [ask(ids, None).said for ids in asking.prompts()]


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per side: the cached share (median, least, most), over that of `banyan route`; errors."""
    rows = []
    for side in dict.fromkeys(run["side"] for run in runs):
        own = [run for run in runs if run["side"] == side]
        shares = [run["cached_share"] for run in own]
        rows.append(
            {
                "side": side,
                "cached_share": spread(shares),
                "median_s": statistics.median(run["median_s"] for run in own),
                "num_requests": sum(run["num_requests"] for run in own),
                "num_errors": sum(run["num_errors"] for run in own),
                "outputs": {
                    "num_compared": sum(run["num_compared"] for run in own),
                    "num_differing": sum(run["num_differing"] for run in own),
                },
            }
        )
    (outside,) = (row["cached_share"]["median"] for row in rows if row["side"] == OUTSIDE)
    return [{**row, "to_banyan_route": row["cached_share"]["median"] / outside} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.ray_serve", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="lmetric")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=160)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/ray-serve"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    arguments = ("--model-path", str(models.ensure(models.LLAMA).resolve()), *CPU_ENGINE, *SERVER_FLAGS)
    runs = []
    with ExitStack() as stack:
        ray = stack.enter_context(served(arguments, args.out, routers=tuple(OF_RAY.values())))
        outside = stack.enter_context(router(ray.servers, args.policy, args.out / "router.log"))
        sides = {OUTSIDE: outside, INSIDE: ray.url, **{side: ray.of(name) for side, name in OF_RAY.items()}}
        expected = said(ray.servers[0])
        for repetition in range(1, args.repetitions + 1):
            for side in order_of_repetition(list(sides), repetition):
                run = asyncio.run(play(sides[side], ray.servers, args, repetition))
                answers = said(sides[side])
                run["num_compared"] = len(answers)
                run["num_differing"] = sum(one != other for one, other in zip(answers, expected, strict=True))
                runs.append({"side": side, "repetition": repetition, **run})
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    rows = summarise(runs)
    write_report(args.out / "report.json", {"rows": rows, "runs": runs}, args)
    print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
