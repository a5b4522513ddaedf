# SPDX-License-Identifier: Apache-2.0
"""Figures of the pages that a reader sees first are those of the kept runs, rounded as they stand there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmark.metrics import ranged
from benchmark.overhead import verdict
from benchmark.overhead.cases import CASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE, README, DEPLOYMENT = DOCS / "benchmarks.md", ROOT / "README.md", DOCS / "deployment.md"
SERVING = DOCS / "benchmarks" / "serving.md"
CAPACITY = DOCS / "design" / "0014-one-capacity.md"
UPGRADE, AIMS = "a rolling upgrade under load", "**The aims** of `make overhead`"


class Figure(NamedTuple):
    """What stands in the line of ``page`` that has ``line`` in it: a part of a kept run, as ``said``."""

    page: Path
    line: str
    kept: str
    part: str
    said: Callable[[Any], str]


def middle(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f}"


def by_three(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3f} ({value['min']:.2f}-{value['max']:.2f})"


def count(value: float) -> str:
    return f"{value:,}"


def ms(value: float) -> str:
    return f"{value / 1000:.2f}"


def hundredths(value: float) -> str:
    return f"{value:.2f}"


def tenths(value: float) -> str:
    return f"{value:.1f}"


def whole(value: float) -> str:
    return f"{value:.0f} s"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def equal(outputs: Mapping[str, int]) -> str:
    return f"{outputs['num_compared'] - outputs['num_differing']} of {outputs['num_compared']:,}"


def plain(value: Any) -> str:
    return str(value)


def two_rounds(value: Mapping[str, Any]) -> str:
    """Both, since their median is a mean."""
    return " and ".join(f"{one:.2f}" for one in value["values"])


def ms_of_s(value: float) -> str:
    return f"{1000 * value:.1f}"


def harmful(answers: Mapping[str, int]) -> str:
    return count(sum(number for kind, number in answers.items() if kind.startswith("harmful")))


def second_run(published: Sequence[float]) -> str:
    """On over off in the second run of the published figures."""
    return f"{published[3] / published[2]:.2f}"


def missed(by_ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """The aims that each row misses, as they are now: the kept run told its own."""
    cases = {case.name: case for case in CASES}
    return [verdict.above(cases[row["case"]], row) for rows in by_ranks.values() for row in rows]


def rows_that_miss(by_ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = missed(by_ranks)
    return f"{sum(map(bool, rows))} of {len(rows)} rows"


def rows_that_miss_with(word: str) -> Callable[[Any], str]:
    """How many rows miss an aim whose line has this word."""

    def said(by_ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        return f"in {sum(any(word in line for line in above) for above in missed(by_ranks))}"

    return said


def span(figure: str, *, without: tuple[str, str] | None = None) -> Callable[[Any], str]:
    """The least and the most of a figure's medians over all rows, but for the one of these ranks and this case."""

    def said(by_ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        found = [
            row[figure]["median"]
            for ranks, rows in by_ranks.items()
            for row in rows
            if row[figure] is not None and (ranks, row["case"]) != without
        ]
        return f"{min(found):.2f} to {max(found):.2f}"

    return said


def of_overhead(figure: str, said: Callable[[Any], str], *cases: str, ranks: str) -> list[Figure]:
    """In what the page of servers says of the aims."""
    return [Figure(SERVING, AIMS, "overhead", f"by_ranks/{ranks}/case={case}/{figure}", said) for case in cases]


def where_steps_take_milliseconds(page: Path, line: str) -> list[Figure]:
    return [
        *(Figure(page, line, "overhead", "by_ranks", said) for said in (span("throughput"), span("ttft"))),
        Figure(page, line, "overhead", "by_ranks/2/case=1 stream/step", ranged),
        Figure(page, line, "overhead", "by_ranks", rows_that_miss),
    ]


def of_last_sample(name: str) -> Callable[[Any], str]:
    """What the ranks have counted under this name when a soak ends."""
    return lambda samples: str(sum(rank[name] for rank in samples[-1]["ranks"].values()))


ON_THE_XEON = (
    *(("conversations", other) for other in ("stock", "router", "hicache", "lmcache")),
    *(("tool_agents", other) for other in ("stock", "router", "hicache", "lmcache")),
)


def on_the_xeon(page: Path, line: str) -> list[Figure]:
    """Banyan's times over those of the others."""
    return [
        Figure(page, line, "alternatives_fit", f"against/trace={trace},ours=banyan,other={other}/ttft_ratio", middle)
        for trace, other in ON_THE_XEON
    ]


def with_a_store_on_the_xeon(page: Path, line: str) -> list[Figure]:
    """The worst of them."""
    part = "against/trace=tool_agents,ours=banyan_store,other={}/ttft_ratio"
    return [Figure(page, line, "alternatives_fit", part.format(other), middle) for other in ("router", "hicache")]


def found_at_all_rates(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """The least and the most of what a system found in its caches, at any rate of requests."""
    found = [rate["cached_share"] for one in repetitions for rate in one["rates"]]
    return f"{100 * min(found):.0f} to {100 * max(found):.0f} %"


def of_ray_serve(side: str) -> Figure:
    """The line of one way to the servers: what was found, against `banyan route`, and whose tokens came out."""

    def said(rows: Sequence[Mapping[str, Any]]) -> str:
        (row,) = (row for row in rows if row["side"] == side)
        share, outputs = row["cached_share"], equal(row["outputs"])
        return f"| {100 * share['median']:.1f} % | {row['to_banyan_route']:.2f} | {outputs} |"

    return Figure(DOCS / "ray.md", f"| {side} |", "ray_serve", "rows", said)


NO_ARENA = "rows/system=banyan no arena"


def of_both_commits(line: str, ranks: int, case: str) -> list[Figure]:
    return [
        Figure(
            SERVING,
            line,
            "overhead_before",
            f"rows/commit={commit},turn={turn},ranks={ranks},case={case}/throughput",
            ranged,
        )
        for commit in ("815b567b", "145fa76f")
        for turn in (1, 2)
    ]


FIGURES = [
    *(
        figure
        for ranks in (1, 2)
        for case in ("prompts of 64", "256 streams")
        for figure in of_both_commits(f"| {case}, {ranks} rank", ranks, case)
    ),
    Figure(PAGE, "ShareGPT conversations that come back", "bench", "ttft_ratios/on_to_off_second_run", ranged),
    Figure(PAGE, "the same in the first run of `make bench`", "bench", "ttft_ratios/on_to_off_first_run", ranged),
    *(
        Figure(SERVING, "| mean time to first token, s | 15", "bench_500", part, said)
        for part, said in (
            ("labels/off/run_1/ttft_s_mean", middle),
            ("labels/on/run_1/ttft_s_mean", middle),
            ("labels/off/run_2/ttft_s_mean", middle),
            ("labels/on/run_2/ttft_s_mean", middle),
            ("ttft_ratios/on_to_off_first_run", middle),
            ("ttft_ratios/on_to_off_second_run", middle),
        )
    ),
    Figure(SERVING, "of 1,000 outputs equal those of sharing off", "bench_500", "outputs/on_against_off", equal),
    Figure(README, "All 500 conversations", "bench_500", "ttft_ratios/on_to_off_first_run", middle),
    Figure(README, "All 500 conversations", "bench_500", "ttft_ratios/on_to_off_second_run", middle),
    Figure(README, "All 500 conversations", "bench_500", "outputs/on_against_off", equal),
    Figure(README, "They differ in sharing alone", "bench", "ttft_ratios/on_to_off_second_run", ranged),
    Figure(README, "first run, where nothing can be shared", "bench", "ttft_ratios/on_to_off_first_run", middle),
    Figure(README, "They differ in sharing alone", "rates", "systems/router", found_at_all_rates),
    Figure(PAGE, "ShareGPT conversations that come back", "rates", "systems/router", found_at_all_rates),
    Figure(
        README,
        "They differ in sharing alone",
        "bench",
        "beside_the_source",
        lambda rows: second_run(rows[4]["published"]),
    ),
    Figure(
        README,
        "They differ in sharing alone",
        "bench",
        "beside_the_source/metric=requests a second/published",
        second_run,
    ),
    *on_the_xeon(README, "**Others, with [equal means]"),
    *with_a_store_on_the_xeon(README, "**Others, with [equal means]"),
    *on_the_xeon(DOCS / "benchmarks" / "alternatives.md", "Times, on the Xeon"),
    *(
        Figure(page, line, "gpu", f"server_graphs/{kind}/{run}/ttft_p50_s", ms_of_s)
        for page, line in ((PAGE, "What sharing gains on a GPU"), (DOCS / "gpu.md", "| `server-graphs`: two ranks"))
        for kind in ("off", "peer")
        for run in ("first", "second")
    ),
    *(
        Figure(
            PAGE, "prompts that nobody has seen |", "first_run", f"rows/prompt_tokens={size}/ttft_ratios/on", by_three
        )
        for size in (570, 1150)
    ),
    Figure(PAGE, "eight ranks, sixteen requests", "ranks", "rows/dp=8,requests_per_rank=16/ttft_ratios/2", ranged),
    *(
        Figure(
            PAGE, "asked for at random times", "rates", f"verdicts/systems/{system}/within/{rate}/5/median", hundredths
        )
        for system, rate in (("banyan", "1"), ("banyan", "1.5"), ("router", "1"), ("router", "1.5"), ("stock", "1"))
    ),
    Figure(PAGE, "a prefix of 2,000 tokens that another node", "remote", "remote_ttft_ratio", ranged),
    Figure(PAGE, "a node that lends", "remote_source", "source_tpot_ratio_one_core", ranged),
    Figure(PAGE, "a node that lends", "remote_source", "source_tpot_ratio_computing_one_core", ranged),
    Figure(PAGE, "a node that lends", "remote_source", "source_tpot_ratio", ranged),
    Figure(PAGE, "a node that lends", "remote_source", "source_tpot_ratio_computing", ranged),
    Figure(PAGE, "a source that is killed", "remote_faults", "kill/extra_s", ranged),
    Figure(PAGE, "a source that is killed", "remote_faults", "stop/extra_s", ranged),
    Figure(PAGE, "32 agents at a pair", "pd_dual", "agents_jct_ratio", two_rounds),
    Figure(PAGE, "32 agents at a pair", "pd_dual", "tpot_ratio", two_rounds),
    Figure(PAGE, "32 agents at a pair", "pd_dual", "tpot_ratio_hurried", two_rounds),
    Figure(README, "hurried agents", "pd_dual", "tpot_ratio_hurried", two_rounds),
    Figure(PAGE, "what the decode server generated", "pd", "num_answer_pages", plain),
    Figure(PAGE, "what the decode server generated", "pd", "num_turns_identical", plain),
    Figure(PAGE, "what the decode server generated", "pd", "num_turns_as_stock_pair", plain),
    Figure(PAGE, "told to keep, to bring", "soak", "num_requests", count),
    Figure(PAGE, "told to keep, to bring", "soak", "num_compared", count),
    Figure(PAGE, "told to keep, to bring", "soak", "answers", harmful),
    *(
        Figure(PAGE, "told to keep, to bring", "soak", "samples", of_last_sample(name))
        for name in ("fetches_failed", "read_failed_pages")
    ),
    *(
        Figure(PAGE, "one prompt of 100,000 tokens", "long_prompt", f"rows/prompt={prompt}/seconds", tenths)
        for prompt in ("computed", "from the other rank", "from the arena", "from the store")
    ),
    *where_steps_take_milliseconds(PAGE, "where forwards take milliseconds"),
    Figure(
        PAGE, "where forwards take milliseconds", "overhead", "by_ranks", span("step", without=("2", "1 stream"))
    ),
    *where_steps_take_milliseconds(README, "With nothing to share"),
    Figure(PAGE, "with the host arena switched off", "pressure_small", f"{NO_ARENA}/hits_to_router", ranged),
    Figure(PAGE, "with the host arena switched off", "pressure_small", f"{NO_ARENA}/hits_to_single", ranged),
    Figure(PAGE, "with the host arena switched off", "pressure", f"{NO_ARENA}/hits_to_single", middle),
    Figure(
        CAPACITY, "| Banyan without its arena | banyan_cpu |", "pressure_small", f"{NO_ARENA}/hits_to_single", middle
    ),
    Figure(
        CAPACITY, "| Banyan without its arena | banyan_cpu |", "pressure_small", f"{NO_ARENA}/hits_to_router", middle
    ),
    *of_overhead("scheduler_us", ms, "prompts of 512", ranks="1"),
    *of_overhead("dispatcher_us", ms, "prompts of 512", ranks="2"),
    *(
        figure
        for ranks in ("1", "2")
        for figure in of_overhead("scheduler_step_us", ms, "64 streams", "256 streams", ranks=ranks)
    ),
    *(
        Figure(SERVING, AIMS, "overhead", "by_ranks", said)
        for said in (
            rows_that_miss,
            rows_that_miss_with("throughput"),
            rows_that_miss_with("ttft is"),
            rows_that_miss_with("step is"),
            rows_that_miss_with("us a call"),
        )
    ),
    *map(
        of_ray_serve,
        ("banyan route", "Banyan's router in Ray Serve", "Ray Serve, prefix-aware", "Ray Serve, power of two choices"),
    ),
    Figure(DEPLOYMENT, UPGRADE, "upgrade", "refused at the end/num_during", count),
    Figure(DEPLOYMENT, UPGRADE, "upgrade", "refused at the end/longest_s/during", tenths),
    Figure(DEPLOYMENT, UPGRADE, "upgrade", "as SGLang ends/longest_s/during", tenths),
    Figure(DEPLOYMENT, UPGRADE, "upgrade", "refused at the end/cached_share/after", percent),
    Figure(DEPLOYMENT, "a rank that is stopped", "upgrade", "stopped_rank/unready_s", whole),
    Figure(DEPLOYMENT, "a rank that is stopped", "upgrade", "stopped_rank/ready_again_s", whole),
]


def part_of(kept: Any, path: str) -> Any:
    """A part of a kept run; of a list, the entry with these values."""
    for step in path.split("/"):
        if isinstance(kept, list):
            wanted = dict(pair.split("=") for pair in step.split(","))
            (kept,) = (one for one in kept if all(str(one[name]) == value for name, value in wanted.items()))
        else:
            kept = kept[step]
    return kept


@pytest.mark.parametrize("figure", FIGURES, ids=lambda one: f"{one.kept}-{one.part}")
def test_figure_when_it_is_read_then_it_is_that_of_the_kept_run(figure: Figure) -> None:
    kept = json.loads((DOCS / "benchmarks" / f"{figure.kept}.json").read_text())
    said = figure.said(part_of(kept, figure.part))
    (block,) = [text for text in blocks(figure.page) if figure.line in text]
    assert said in block


def blocks(page: Path) -> list[str]:
    """Rows of tables, and paragraphs and items of lists without their line ends."""
    found = []
    for block in page.read_text().replace("\n- ", "\n\n- ").split("\n\n"):
        found += block.splitlines() if block.startswith("|") else [" ".join(block.split())]
    return found
