# SPDX-License-Identifier: Apache-2.0
"""Figures of the pages that a reader sees first are those of the kept runs, rounded, in the order in which they stand
there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test.tidy import said

from benchmark.metrics import ranged

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE, README, DEPLOYMENT = DOCS / "benchmarks.md", ROOT / "README.md", DOCS / "deployment.md"
SERVING, ALTERNATIVES = DOCS / "benchmarks" / "serving.md", DOCS / "benchmarks" / "alternatives.md"
PLACEMENT = DOCS / "benchmarks" / "placement.md"
RATES, CEILING = DOCS / "benchmarks" / "rates.md", DOCS / "benchmarks" / "ceiling.md"
CAPACITY = DOCS / "design" / "0014-one-capacity.md"


class Figure(NamedTuple):
    """A part of a kept run, and how it is said."""

    kept: str
    part: str
    words: Callable[[Any], str]


class Line(NamedTuple):
    """What stands, in this order, in the line of ``page`` that has ``mark`` in it."""

    page: Path
    mark: str
    figures: Sequence[Figure]


def line(page: Path, mark: str, *figures: Figure) -> Line:
    return Line(page, mark, figures)


def of(kept: str, words: Callable[[Any], str], *parts: str) -> list[Figure]:
    return [Figure(kept, part, words) for part in parts]


def both_passes(kept: str, system: str, mark: str) -> Line:
    """What a system found in both passes, and its mean TTFT in the second."""
    return line(CAPACITY, mark, *of(kept, ranged, *(f"rows/system={system}/runs/{part}" for part in PASSES)))


def on_the_xeon(ours: str) -> list[Figure]:
    """Times over those of the others, of both workloads."""
    return [
        Figure("alternatives_fit", f"against/trace={trace},ours={ours},other={other}/ttft_ratio", said.middle)
        for other in ("stock", "router", "hicache", "lmcache")
        for trace in ("conversations", "tool_agents")
    ]


def where_steps_take_milliseconds() -> list[Figure]:
    return [
        *(Figure("overhead", "by_ranks", said.span(name)) for name in ("throughput", "ttft", "step")),
        *of("overhead", said.rows_that_miss, "by_ranks"),
    ]


def at_both_commits(ranks: int, case: str) -> Line:
    rows = (
        f"rows/commit={commit},turn={turn},ranks={ranks},case={case}/throughput"
        for commit in ("815b567b", "145fa76f")
        for turn in (1, 2)
    )
    return line(SERVING, f"| {case}, {ranks} rank", *of("overhead_before", ranged, *rows))


def in_ray_serve(side: str) -> Line:
    """The line of one way to the servers: what was found, against `banyan route`, and whose tokens came out."""

    def words(rows: said.Rows) -> str:
        (row,) = (row for row in rows if row["side"] == side)
        return f"| {said.share(row['cached_share'])} | {row['to_banyan_route']:.2f} | {said.equal(row['outputs'])} |"

    return line(DOCS / "ray.md", f"| {side} |", Figure("ray_serve", "rows", words))


def in_a_burst(ranks: int, burst: str) -> Line:
    row = f"rows/ranks={ranks},burst={burst}"
    arms = [f"{row}/arms/{arm}" for arm in ("off", "off, lpm", "on")]
    return line(
        SERVING,
        f"| {ranks} | {burst} |",
        *of("bursts", said.percent_of, *(f"{arm}/cached_share" for arm in arms), f"{row}/best_cached_share"),
        *of("bursts", said.hundredths, *(f"{arm}/answered_s" for arm in arms)),
        *of("bursts", ranged, f"{arms[-1]}/answered_to_off", f"{arms[-1]}/ttft_to_off"),
    )


def of_all_bursts(*figures: str) -> list[Figure]:
    return [Figure("bursts", "rows", said.span_of_arm("on", figure)) for figure in figures]


def at_three(system: str) -> Figure:
    return Figure("rates", f"systems/{system}", said.found_at("3"))


def beside_warm_ones(title: str, arm: str, kept: str = "cold_prompts") -> Line:
    return line(PLACEMENT, f"| {title} | ", Figure(kept, "", said.cold_row(arm)))


FIRST, SECOND = (f"ttft_ratios/on_to_off_{run}_run" for run in ("first", "second"))
EIGHT_RANKS = "rows/dp=8,requests_per_rank=16"
NO_ARENA = "rows/system=banyan no arena"
SECOND_PASS = "rows/system={}/runs/2/cached_share"
PASSES = ("1/cached_share", "2/cached_share", "2/ttft_s_mean")
IN_AS_MUCH_DRAM = {
    "banyan": "| Banyan, with that much DRAM |",
    "router_hicache_back": "two servers with HiCache, `write_back` |",
    "router_hicache": "two servers with HiCache |",
    "router_lmcache": "two servers with LMCache |",
    "router": "two servers, no DRAM |",
    "lmcache": "| LMCache, ranks in turns |",
    "hicache_dram": "| HiCache, ranks in turns |",
}
WRITE_BACK = ("router_hicache_back", "banyan")
AGENTS = "rows/trace=coding_agents,phase=cold,system={}"
DOCUMENTS = "rows/trace=documents,phase=cold,system={}/cached_share"
STEPS = "by_ranks/{}/case={} streams/scheduler_step_us"
BEHIND_A_ROUTER, ON_RANKS_THAT_SHARE = (
    Figure("rates", f"systems/{system}", said.found_at_all_rates) for system in ("router", "banyan")
)
ON_A_GPU = of(
    "gpu",
    said.ms_of_s,
    *(f"server_graphs/{kind}/{run}/ttft_p50_s" for run in ("first", "second") for kind in ("off", "peer")),
)

LINES = [
    line(
        README,
        "They differ in sharing",
        *of("bench", ranged, SECOND, FIRST),
        *of("bench", said.equal, "outputs/on_against_stock"),
        *of("bench_500", said.middle, SECOND, FIRST),
        *of("bench_500", said.equal, "outputs/on_against_off"),
    ),
    line(
        README,
        "**[Other systems with equal means]",
        *of(
            "pressure_dram", said.middle, *map(SECOND_PASS.format, ("banyan", "router_hicache", "router_hicache_back"))
        ),
        *of("pressure_dram", said.middle, *(f"rows/system={name}/runs/{PASSES[0]}" for name in WRITE_BACK)),
        *of("alternatives", said.share, *map(DOCUMENTS.format, ("hicache", "banyan"))),
        BEHIND_A_ROUTER,
        ON_RANKS_THAT_SHARE,
        *of("alternatives", said.span_against("banyan", "router"), "against"),
        *of("alternatives", said.span_against("banyan", "lmcache"), "against"),
        *of("alternatives", said.span_against("banyan_store", "hicache"), "against"),
        *of("alternatives_fit", said.middle, "against/trace=tool_agents,ours=banyan,other=router/ttft_ratio"),
        *of("alternatives_fit", said.middle, "against/trace=conversations,ours=banyan,other=lmcache/ttft_ratio"),
        *of("alternatives_tiers", said.middle, "against/ours=banyan_even,other=hicache/ttft_ratio"),
    ),
    line(
        ALTERNATIVES,
        "**Placement is a part of that.**",
        *(
            Figure("alternatives_tiers", f"against/ours={ours},other={other}/ttft_ratio", said.middle)
            for ours in ("banyan", "banyan_even")
            for other in ("stock", "router", "lmcache", "hicache")
        ),
    ),
    line(
        README,
        "answers differ from stock's",
        *of("alternatives", said.unlike_stock("banyan"), "rows"),
        *of("alternatives", said.unlike_stock("stock_again"), "rows"),
    ),
    line(
        README,
        "With nothing to share",
        *of("ranks", said.span_of_first_runs("ttft_ratios"), "rows"),
        *of("ranks", said.span_of_first_runs("latency_ratios"), "rows"),
        *where_steps_take_milliseconds(),
    ),
    line(
        ALTERNATIVES,
        "first tokens come sooner with HiCache",
        *of("alternatives", said.whole_ms, *(f"{AGENTS.format(name)}/tpot_ms_mean" for name in ("hicache", "banyan"))),
        *of("alternatives", said.answer_s, *map(AGENTS.format, ("hicache", "lmcache", "banyan"))),
    ),
    line(ALTERNATIVES, "Times, on the Xeon", *on_the_xeon("banyan"), *on_the_xeon("banyan_store")),
    line(
        PAGE,
        "ShareGPT conversations that return",
        *of("bench", ranged, SECOND),
        BEHIND_A_ROUTER,
        ON_RANKS_THAT_SHARE,
    ),
    line(PAGE, "the same in the first run of `make bench`", *of("bench", ranged, FIRST)),
    line(
        PAGE,
        "eight ranks, sixteen requests",
        *of("ranks", ranged, f"{EIGHT_RANKS}/ttft_ratios/2"),
        *of("ranks", said.share, *(f"{EIGHT_RANKS}/kinds/{kind}/2/cached_share" for kind in ("on", "off"))),
    ),
    line(
        PAGE,
        "with DRAM for 0.6 of them",
        *of("pressure_dram", ranged, *map(SECOND_PASS.format, IN_AS_MUCH_DRAM)),
        *of("pressure_dram", ranged, *(f"rows/system={name}/runs/{PASSES[2]}" for name in reversed(WRITE_BACK))),
        *of("pressure_dram", ranged, *(f"rows/system={name}/runs/{PASSES[0]}" for name in reversed(WRITE_BACK))),
    ),
    line(
        CAPACITY,
        "In the second pass Banyan finds the most",
        *of("pressure_dram", ranged, "rows/system=banyan/ttft_to_router/2"),
        *of("pressure_dram", ranged, *(f"rows/system={name}/runs/1/ttft_s_mean" for name in reversed(WRITE_BACK))),
    ),
    line(
        PAGE,
        "with DRAM for 1.2 of them",
        *of(
            "pressure_dram_large",
            said.two_rounds,
            *map(SECOND_PASS.format, ("banyan", "router_hicache", "router_hicache_back", "lmcache")),
        ),
    ),
    *(both_passes("pressure_dram", name, mark) for name, mark in IN_AS_MUCH_DRAM.items()),
    line(
        PAGE,
        "the same without DRAM",
        *of("pressure_small", ranged, f"{NO_ARENA}/hits_to_router", f"{NO_ARENA}/hits_to_single"),
        *(
            Figure(kept, "rows", said.mean_hits_over(other))
            for kept in ("pressure_small", "pressure")
            for other in ("router", "single")
        ),
    ),
    line(PAGE, "prompts that begin alike and come at once", *of_all_bursts("ttft_to_off", "answered_to_off")),
    line(README, "and come at once, TTFT is", *of_all_bursts("ttft_to_off")),
    *(in_a_burst(ranks, burst) for ranks in (1, 2) for burst in ("4 x 1000 + 50", "16 x 500 + 30", "8 x 2000 + 100")),
    line(
        PAGE,
        "one prompt of 100,000 tokens",
        *of(
            "long_prompt",
            said.tenths,
            *(
                f"rows/prompt={prompt}/seconds"
                for prompt in ("from the other rank", "from the arena", "from the store", "computed")
            ),
        ),
    ),
    line(PAGE, "a prefix of 2,000 tokens that another node", *of("remote", ranged, "remote_ttft_ratio")),
    line(
        PAGE,
        "what the decode server generated",
        *of("pd", str, "num_answer_pages", "num_turns_identical", "num_turns_as_stock_pair"),
    ),
    line(
        PAGE,
        "32 agents at a pair",
        *of("pd_dual", said.two_rounds, "agents_jct_ratio", "tpot_ratio", "tpot_ratio_hurried"),
    ),
    line(
        PAGE,
        "prompts that no rank has seen |",
        *of("first_run", said.by_three, *(f"rows/prompt_tokens={size}/ttft_ratios/on" for size in (570, 1150))),
    ),
    line(
        PAGE,
        "a node that lends",
        *of(
            "remote_source",
            ranged,
            *(f"source_tpot_ratio{how}" for how in ("_one_core", "_computing_one_core", "", "_computing")),
        ),
    ),
    line(PAGE, "a source that is killed", *of("remote_faults", ranged, "kill/extra_s", "stop/extra_s")),
    line(
        PAGE,
        "where forwards take milliseconds",
        *where_steps_take_milliseconds(),
    ),
    line(
        PAGE,
        "requested at random times",
        *of(
            "rates",
            said.hundredths,
            *(
                f"verdicts/systems/{system}/within/{rate}/5/median"
                for system, rate in product(("banyan", "router", "banyan_route"), (1.5, 3))
            ),
        ),
        *(Figure("rates", "systems", said.mean_ttft_to_router("banyan", rate)) for rate in ("1.5", "3")),
    ),
    line(RATES, "The run did not record where", *(at_three(system) for system in ("router", "banyan"))),
    *(
        beside_warm_ones(title, arm)
        for title, arm in (
            ("ranks of stock's, round robin", "round robin"),
            ("ranks of stock's, `lpm`", "lpm"),
            ("ranks that share", "banyan"),
            ("ranks that share, `lpm`", "banyan, lpm"),
            ("servers behind `banyan route`", "router"),
            ("servers behind `banyan route`, `lpm`", "router, lpm"),
        )
    ),
    *(
        beside_warm_ones(f"{title}, at three a second", arm, "cold_prompts_router")
        for title, arm in (
            ("ranks of stock's, round robin", "round robin"),
            ("servers behind `banyan route`", "router"),
            ("servers behind `banyan route`, `lpm`", "router, lpm"),
        )
    ),
    line(
        PAGE,
        "two combined servers on the same two cores",
        *of("pd_combined", said.span_of("ttft_ratio"), "cells"),
        *of("pd_combined", said.span_of("tokens_per_s_ratio"), "cells"),
    ),
    line(PAGE, "small messages of the highest class", *of("pd_classes", said.hundredths, "high_class_p99_ratio")),
    line(
        PAGE,
        "A soak of an hour: 16 clients",
        *of("soak", said.count, "num_requests", "num_compared"),
        *of("soak", said.of_last_sample("fetches_failed"), "samples"),
        *of("soak", said.of_last_sample("read_failed_pages"), "samples"),
        *of("soak", said.harmful, "answers"),
    ),
    line(
        PAGE,
        "by NIXL instead of TCP",
        *of("remote_nixl", ranged, "over_tcp/nixl_rate_to_tcp", "over_tcp/nixl_cpu_to_tcp"),
    ),
    line(PAGE, "What sharing gains on a GPU", *ON_A_GPU),
    line(DOCS / "gpu.md", "| `server-graphs`: two ranks", *ON_A_GPU),
    line(
        SERVING,
        "| mean time to first token, s | 15",
        *of("bench_500", said.middle, "labels/off/run_1/ttft_s_mean", "labels/on/run_1/ttft_s_mean", FIRST),
        *of("bench_500", said.middle, "labels/off/run_2/ttft_s_mean", "labels/on/run_2/ttft_s_mean", SECOND),
    ),
    line(
        SERVING,
        "of 1,000 outputs equal those of sharing off",
        *of("bench_500", said.equal, "outputs/on_against_off"),
    ),
    *(at_both_commits(ranks, case) for ranks in (1, 2) for case in ("prompts of 64", "256 streams")),
    line(
        SERVING,
        "**The aims** of `make overhead`",
        *of("overhead", said.rows_that_miss, "by_ranks"),
        *(
            Figure("overhead", "by_ranks", said.rows_that_miss_with(word))
            for word in ("throughput", "ttft is", "step is", "us a call")
        ),
        *of("overhead", said.ms, *(STEPS.format(ranks, number) for ranks in (1, 2) for number in (64, 256))),
        *of("overhead", said.ms, *(f"by_ranks/{ranks}/case=prompts of 512/scheduler_us" for ranks in (1, 2))),
        *of("overhead", said.ms, "by_ranks/2/case=prompts of 512/dispatcher_us"),
    ),
    line(
        CEILING,
        "For half of the arena and for twice of it",
        *of("ceiling_runs", said.furthest_of(("half", "double")), "runs"),
        *of(
            "ceiling_runs", said.points, *(f"runs/trace=claude_code_a,arena={word}/off" for word in ("half", "double"))
        ),
    ),
    line(
        CEILING,
        "**Where answers are kept the rule changes nothing.**",
        *of("left_out_answers", said.most_added, "runs"),
        *of("left_out_answers", said.least_added, "runs"),
    ),
    line(
        CAPACITY,
        "| Banyan without its arena | banyan_cpu |",
        *of("pressure_small", said.in_bold, f"{NO_ARENA}/hits_to_single", f"{NO_ARENA}/hits_to_router"),
    ),
    *map(
        in_ray_serve,
        ("banyan route", "Banyan's router in Ray Serve", "Ray Serve, prefix-aware", "Ray Serve, power of two choices"),
    ),
    line(
        DEPLOYMENT,
        "a rolling upgrade under load",
        *of("upgrade", said.count, "refused at the end/num_during"),
        *of("upgrade", said.tenths, "refused at the end/longest_s/during"),
        *of("upgrade", said.percent, "refused at the end/cached_share/after"),
        *of("upgrade", said.tenths, "as SGLang ends/longest_s/during"),
    ),
    line(
        DEPLOYMENT,
        "a rank that is stopped",
        *of("upgrade", said.whole, "stopped_rank/unready_s", "stopped_rank/ready_again_s"),
    ),
]


@cache
def kept_run(name: str) -> Any:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())


@pytest.mark.parametrize("line", LINES, ids=lambda one: f"{one.page.stem}-{one.mark}")
def test_line_when_it_is_read_then_its_figures_are_those_of_the_kept_runs_in_their_order(line: Line) -> None:
    (block,) = [text for text in blocks(line.page) if line.mark in text]
    place = 0
    for kept, part, words in line.figures:
        told = words(said.part_of(kept_run(kept), part))
        # Not as a part of a longer number.
        found = re.compile(rf"(?<![\d.,]){re.escape(told)}(?!\d|[.,]\d)").search(block, place)
        assert found, f"{told} ({kept}.json, {part}) is not in: {block[place:]}"
        place = found.end()


def blocks(page: Path) -> list[str]:
    """Rows of tables, and paragraphs and items of lists without their line ends."""
    found = []
    for block in page.read_text().replace("\n- ", "\n\n- ").split("\n\n"):
        found += block.splitlines() if block.startswith("|") else [" ".join(block.split())]
    return found
