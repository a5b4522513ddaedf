# SPDX-License-Identifier: Apache-2.0
"""The same question as `study`, asked of real servers: what is found again when the working set exceeds the pools.

    python -m benchmark.pressure.engine --data FOLDER --draws 5

A draw is a set of recorded prompts, asked once and asked again in another order, so many at a time; a scan is a hot set
that is asked over and over among prompts that never come back, and its last quarter is the second run. One system is up
at a time, from empty caches, in an order that rotates with the draw; all have the same tokens of pools together:

    single            one rank with all of them, sharing off
    stock             stock SGLang on the same CPU engine, `--dp N`
    router            N such servers of one rank behind SGLang's router, cache_aware
    index NAME        `--banyan-share index`: Banyan places requests by policy NAME, nothing is fetched
    banyan            `--enable-banyan` and no other flag, but for `--dram`
    banyan no arena   `--banyan-host-gb 0`: the pools alone
    hicache_dram      with `--dram`, two ranks: HiCache, its DRAM beside each rank's pool
    router_hicache    the same in two servers behind SGLang's router
    router_hicache_back  these with `--hicache-write-policy write_back`
    lmcache           the same DRAM in LMCache's server, for both ranks
    router_lmcache    the same for two servers behind SGLang's router

Recorded prompts say which pages they have in common and not what is in them, so tokens are drawn. Those of `documents`,
`scan` and `hot` (the hot set alone) are made: they are long and share nothing. Leaves build/pressure/engine.json, and
every request in engine.jsonl beside it. Exits with 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from banyan.config import POLICY_CHOICES, SGLANG_POLICY
from benchmark.alternatives.start import Running, hicache_path, running
from benchmark.alternatives.systems import NUM_RANKS, Budget, System, systems_of, token_bytes_of
from benchmark.compare import across_repetitions, mean_ratio, order_of_repetition
from benchmark.load import Arrivals
from benchmark.measure import RunResult, Workload, flush_cache, measure
from benchmark.metrics import paired_ratio
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.modes.models import WIDE, ensure, random_prompt
from benchmark.pressure.copies import most_distinct_share
from benchmark.pressure.workloads import SOURCES, Drawn, documents, hot, recorded, scan
from benchmark.processor import CPU_ENGINE, dtype_for, features_here
from benchmark.results import append_lines, write_report
from benchmark.servers import ServerSpec, Share, cpu_env, unwind_on_sigterm
from benchmark.warm import ForkedServer
from benchmark.workload.known import KnownPrompts

PAGE_TOKENS = 16
CONTEXT_TOKENS = 4096
OUTPUT_TOKENS = 8
DTYPE = dtype_for(features_here())
MADE = {"documents": documents, "scan": scan, "hot": hot}
INDEX_POLICIES = tuple(policy for policy in POLICY_CHOICES if policy != SGLANG_POLICY)
SYSTEMS = ("single", "stock", "router", *(f"index {policy}" for policy in INDEX_POLICIES), "banyan", "banyan no arena")
WITH_DRAM = ("hicache_dram", "router_hicache", "router_hicache_back", "lmcache", "router_lmcache")
"""Those of `benchmark.alternatives` that have no place here without `--dram`."""


def prompts_of(pages: Sequence[Sequence[int]], draw: str) -> KnownPrompts:
    """The prompts of a draw, or of a part of it. Equal pages have equal tokens."""
    ids = {
        f"draw-{draw}-{number}": [token for page in prompt for token in page_tokens(page)]
        for number, prompt in enumerate(pages)
    }
    return KnownPrompts(ids, OUTPUT_TOKENS)


def workloads_of(drawn: Drawn, draw: int, concurrency: int) -> tuple[Workload, ...]:
    """What is played, one after the other, the last of them in the second run: the same prompts twice, or what comes
    before those that are measured, and these."""

    def played(part: str, pages: Sequence[Sequence[int]], num_runs: int) -> Workload:
        prompts = prompts_of(pages, f"{draw}-{part}")
        return Workload(prompts.scripts, prompts, Arrivals(concurrency=concurrency), seed=draw, num_runs=num_runs)

    num_before = len(drawn.prompts) - drawn.num_measured
    before, measured = drawn.prompts[:num_before], drawn.prompts[num_before:]
    if drawn.is_twice:
        return (played("before", before, 2),)
    return played("before", before, 1), played("measured", measured, 1)


def page_tokens(page: int) -> list[int]:
    """What stands in a page; another page has other tokens."""
    return random_prompt(random.Random(f"page-{page}"), PAGE_TOKENS)


def system_of(name: str, num_ranks: int, total_tokens: int, num_cores: int) -> System:
    """How a system is started; all its ranks together hold `total_tokens`, rounded down to pages."""

    def one(dp: int, share: Share, *flags: str) -> tuple[ServerSpec, ...]:
        return (_spec(name, dp, share, total_tokens // dp, cpu_env(dp=dp, num_cores=num_cores), *flags),)

    if name == "single":
        return System(name, name, one(1, "off"))
    if name == "stock":
        return System(name, name, one(num_ranks, "engine"))
    if name == "banyan":
        return System(name, name, one(num_ranks, "on"))
    if name == "banyan no arena":
        return System(name, name, one(num_ranks, "on", "--banyan-host-gb", "0"))
    if name == "router":
        envs = [cpu_env(dp=1, first_core=rank % num_cores) for rank in range(num_ranks)]
        specs = (_spec(f"router-{rank}", 1, "engine", total_tokens // num_ranks, env) for rank, env in enumerate(envs))
        return System(name, name, tuple(specs), front="cache_aware")
    share, _, policy = name.partition(" ")
    if share == "index" and policy in INDEX_POLICIES:
        return System(name, name, one(num_ranks, "index", "--banyan-policy", policy))
    raise ValueError(f"--system {name}: one of {', '.join(SYSTEMS)}")


def _spec(
    label: str, dp: int, share: Share, pool_tokens: int, env: tuple[tuple[str, str], ...], *flags: str
) -> ServerSpec:
    pool_tokens = pool_tokens // PAGE_TOKENS * PAGE_TOKENS
    args = (
        *(*CPU_ENGINE, "--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(pool_tokens)),
        *("--context-length", str(CONTEXT_TOKENS), "--sleep-on-idle", *flags),
    )
    return ServerSpec(label.replace(" ", "_"), dp, share, args, env)


def systems_with_dram(total_tokens: int, num_dram_tokens: int, args: argparse.Namespace) -> dict[str, System]:
    """By name, those with a tier beside their pools, all of one size and started alike."""
    token_bytes = token_bytes_of(json.loads((args.model / "config.json").read_text()), DTYPE)
    whole_pages = total_tokens // (NUM_RANKS * PAGE_TOKENS) * NUM_RANKS * PAGE_TOKENS
    budget = Budget(whole_pages, num_dram_tokens, 0, token_bytes, DTYPE)
    made = systems_of(budget, args.out / "disk", hicache_path(args.out / "plugin"))
    return {name: made[name] for name in ("banyan", *WITH_DRAM)}


def measure_draw(
    draw: int, workloads: Sequence[Workload], total_tokens: int, num_dram_tokens: int, args: argparse.Namespace
) -> list[RunResult]:
    """Both runs on every system. `num_dram_tokens`: beside the pools; 0: what Banyan takes by itself."""
    results = []
    made = systems_with_dram(total_tokens, num_dram_tokens, args) if num_dram_tokens else {}
    for name in order_of_repetition(args.system, draw + 1):
        system = made.get(name) or system_of(name, args.ranks, total_tokens, args.num_cores)
        with running(system, args.model, args.out / "logs", ForkedServer) as up:
            for server in up.servers:
                asyncio.run(flush_cache(server.url))
            runs: list[RunResult] = []
            for workload in workloads:
                first_run = len(runs) + 1
                runs += asyncio.run(measure(name, up.url, workload, repetition=draw, first_run=first_run))
            runs[-1].summary["distinct_share"] = distinct_share(up)
        for run in runs:
            append_lines(args.out / "engine.jsonl", run.to_lines())
            say(run)
        results.extend(runs)
    return results


def distinct_share(up: Running) -> float | None:
    """Distinct pages over pages held, by the sample of each of Banyan's ranks; None where there is no Banyan."""
    with urllib.request.urlopen(f"{up.servers[0].url}/server_info", timeout=30.0) as response:
        states = json.loads(response.read())["internal_states"]
    copies = [state["banyan"] for state in states if state.get("banyan", {}).get("num_sampled_pages")]
    num_pages = sum(rank["num_sampled_pages"] for rank in copies)
    if not num_pages:
        return None
    return round(sum(rank["distinct_share"] * rank["num_sampled_pages"] for rank in copies) / num_pages, 4)


def say(run: RunResult) -> None:
    summary = run.summary
    ttft = summary["ttft_s"]
    print(
        f"[pressure] draw {run.repetition}, {run.label}, run {run.run}: {summary['cached_share'] or 0:.1%} cached, "
        f"TTFT {ttft['mean'] if ttft else 0:.2f} s, {summary['num_errors']} failed, "
        f"distinct {summary.get('distinct_share', '-')}",
        file=sys.stderr,
        flush=True,
    )


def row_of(name: str, results: Sequence[RunResult]) -> dict[str, Any]:
    """What a system came to over all draws; ratios are within a draw."""
    own = [result for result in results if result.label == name]
    shares = [result.summary.get("distinct_share") for result in own if result.run == 2]
    runs = {run: across_repetitions(results, name, run) for run in (1, 2)}
    kept = ("cached_share", "cached_by_source", "ttft_s_mean", "ttft_s_p90", "completed_per_s", "num_errors")
    return {
        "system": name,
        "runs": {run: {figure: found[figure] for figure in kept} for run, found in runs.items()},
        "hits_to_single": _hits_ratio(results, name, "single"),
        "hits_to_router": _hits_ratio(results, name, "router"),
        "ttft_to_router": {run: mean_ratio("ttft_s", results, name, "router", run) for run in (1, 2)},
        "distinct_share": [share for share in shares if share is not None],
    }


def _hits_ratio(results: Sequence[RunResult], name: str, baseline: str) -> dict[str, Any] | None:
    shares = {
        label: [
            result.summary["cached_share"] or 0.0
            for result in sorted(results, key=lambda result: result.repetition)
            if result.label == label and result.run == 2
        ]
        for label in (name, baseline)
    }
    return paired_ratio(shares[name], shares[baseline]) if all(shares[baseline]) and shares[baseline] else None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.pressure.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder of recorded workloads")
    parser.add_argument("--workload", choices=(*SOURCES, *MADE), default="agents")
    parser.add_argument(
        "--system", nargs="+", choices=(*SYSTEMS, *WITH_DRAM), help="only these (default: those without --dram)"
    )
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--ratio", type=float, default=1.75, help="of the working set to all pools")
    parser.add_argument(
        "--dram",
        type=float,
        default=0.0,
        metavar="R",
        help="beside the pools, in working sets, for all that have a tier there (default: what Banyan takes by itself)",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--first-draw", type=int, default=0, help="go on from there: the seed of the first draw")
    parser.add_argument("--num-cores", type=int, default=2, help="that the ranks are spread over")
    parser.add_argument(
        "--small", action="store_true", help="a small model with random weights: more draws and ranks in the same time"
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_TARGET, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("build/pressure"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.data is None and args.workload not in MADE:
        parser.error(f"--workload {args.workload} is recorded: --data names the folder")
    args.system = args.system or list(SYSTEMS)
    if args.dram and args.ranks != NUM_RANKS:
        parser.error(f"--dram: measured with --ranks {NUM_RANKS} alone")
    if not args.dram and (lacking := sorted(set(args.system) & set(WITH_DRAM))):
        parser.error(f"--system {' '.join(lacking)}: how much DRAM, --dram says")
    unwind_on_sigterm()
    (args.out / "engine.jsonl").unlink(missing_ok=True)
    args.model = ensure(WIDE) if args.small else ensure_model(args.model)
    draw_from = MADE.get(args.workload) or recorded(args.data / SOURCES[args.workload])
    results: list[RunResult] = []
    sizes = []
    for draw in range(args.first_draw, args.first_draw + args.draws):
        drawn = draw_from(args.prompts, draw)
        working_tokens = drawn.num_distinct * PAGE_TOKENS
        total_tokens = int(working_tokens / args.ratio)
        num_dram_tokens = int(working_tokens * args.dram)
        most_distinct = most_distinct_share(drawn.prompts, args.ranks, total_tokens // PAGE_TOKENS)
        sizes.append(
            {
                "draw": draw,
                "working_set_tokens": working_tokens,
                "pool_tokens_of_all_ranks": total_tokens,
                "dram_tokens": num_dram_tokens,
                "most_distinct_share": round(most_distinct, 4),
            }
        )
        results += measure_draw(draw, workloads_of(drawn, draw, args.concurrency), total_tokens, num_dram_tokens, args)
        # Each draw is written down when it is over: a run of hours that is cut short has lost nothing.
        rows = [row_of(name, results) for name in args.system]
        write_report(args.out / "engine.json", {"rows": rows, "draws": sizes}, args)
    num_errors = sum(result.summary["num_errors"] for result in results)
    print(json.dumps({"num_errors": num_errors}))
    return 1 if num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
