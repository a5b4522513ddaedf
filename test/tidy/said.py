# SPDX-License-Identifier: Apache-2.0
"""How pages say what kept runs found: from a part of a run to the words that stand in a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmark import cold_prompts, rates_page
from benchmark.alternatives.traces import NUM_OUTPUT_TOKENS
from benchmark.metrics import median, ranged
from benchmark.overhead import verdict
from benchmark.overhead.cases import CASES

Rows = Sequence[Mapping[str, Any]]
ByRanks = Mapping[str, Rows]


def part_of(kept: Any, path: str) -> Any:
    """A part of a kept run; of a list, the entry with these values."""
    for step in filter(None, path.split("/")):
        if isinstance(kept, list):
            wanted = dict(pair.split("=") for pair in step.split(","))
            (kept,) = (one for one in kept if all(str(one[name]) == value for name, value in wanted.items()))
        else:
            kept = kept[step]
    return kept


def middle(value: Mapping[str, float]) -> str:
    return f"{value['median']:.2f}"


def in_bold(value: Mapping[str, float]) -> str:
    return f"**{middle(value)}** ({value['min']:.2f}-{value['max']:.2f})"


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


def percent_of(value: float) -> str:
    return f"{100 * value:.1f} %"


def share(value: Mapping[str, float]) -> str:
    return percent_of(value["median"])


def rough_share(value: Mapping[str, float]) -> str:
    return percent(value["median"])


def equal(outputs: Mapping[str, int]) -> str:
    return f"{outputs['num_compared'] - outputs['num_differing']} of {outputs['num_compared']:,}"


def two_rounds(value: Mapping[str, Any]) -> str:
    """Both, since their median is a mean."""
    return " and ".join(f"{one:.2f}" for one in value["values"])


def ms_of_s(value: float) -> str:
    return f"{1000 * value:.1f}"


def harmful(answers: Mapping[str, int]) -> str:
    return count(sum(number for kind, number in answers.items() if kind.startswith("harmful")))


def least_to_most(found: Iterable[float]) -> str:
    values = list(found)
    return f"{min(values):.2f} to {max(values):.2f}"


def missed(by_ranks: ByRanks) -> list[list[str]]:
    """The aims that each row misses, as they are now: the kept run told its own."""
    cases = {case.name: case for case in CASES}
    return [verdict.above(cases[row["case"]], row) for rows in by_ranks.values() for row in rows]


def rows_that_miss(by_ranks: ByRanks) -> str:
    rows = missed(by_ranks)
    return f"{sum(map(bool, rows))} of {len(rows)} rows"


def rows_that_miss_with(word: str) -> Callable[[ByRanks], str]:
    """How many rows miss an aim whose line has this word."""
    return lambda by_ranks: f"in {sum(any(word in line for line in above) for above in missed(by_ranks))}"


def span(figure: str) -> Callable[[ByRanks], str]:
    """The least and the most of a figure's medians over all rows."""
    return lambda by_ranks: least_to_most(
        row[figure]["median"] for rows in by_ranks.values() for row in rows if row[figure] is not None
    )


def span_of_first_runs(figure: str) -> Callable[[Rows], str]:
    return lambda rows: least_to_most(row[figure]["1"]["median"] for row in rows)


def span_against(ours: str, other: str) -> Callable[[Rows], str]:
    """Of the times of one system over those of another, over all workloads."""
    return lambda pairs: least_to_most(
        pair["ttft_ratio"]["median"] for pair in pairs if (pair["ours"], pair["other"]) == (ours, other)
    )


def span_of(figure: str) -> Callable[[Rows], str]:
    return lambda cells: least_to_most(cell[figure]["median"] for cell in cells)


def span_of_arm(arm: str, figure: str) -> Callable[[Rows], str]:
    return lambda rows: least_to_most(row["arms"][arm][figure]["median"] for row in rows)


def unlike_stock(system: str) -> Callable[[Rows], str]:
    """How many answers to empty caches were not those of stock."""

    def words(rows: Rows) -> str:
        cold = [row for row in rows if (row["system"], row["phase"]) == (system, "cold")]
        return str(sum(row["num_compared"] - row["num_identical"] for row in cold))

    return words


def mean_hits_over(other: str) -> Callable[[Rows], str]:
    """Of Banyan without its arena, in the second run."""

    def said(rows: Rows) -> str:
        ours, theirs = (
            statistics.fmean(part_of(rows, f"system={name}/runs/2/cached_share/values"))
            for name in ("banyan no arena", other)
        )
        return f"{ours / theirs:.2f}"

    return said


def of_last_sample(name: str) -> Callable[[Rows], str]:
    """What the ranks have counted under this name when a soak ends."""
    return lambda samples: str(sum(rank[name] for rank in samples[-1]["ranks"].values()))


def found_at_all_rates(repetitions: Rows) -> str:
    """The least and the most of what a system found in its caches, at any rate of requests."""
    found = [100 * rate["cached_share"] for one in repetitions for rate in one["rates"]]
    least, most = (f"{share:.0f}" for share in (min(found), max(found)))
    return f"{most} %" if least == most else f"{least} to {most} %"


def found_at(per_s: str) -> Callable[[Rows], str]:
    """The middle of what a system found in its caches at that rate of requests."""

    def words(repetitions: Rows) -> str:
        played = rates_page.played_at({"systems": {"": repetitions}}, "", per_s)
        return percent_of(median([rate["cached_share"] for rate in played]))

    return words


def cold_row(arm: str) -> Callable[[Mapping[str, Any]], str]:
    """How one way to serve cold prompts beside warm ones went: medians, of ratios with their spread."""

    def words(kept: Mapping[str, Any]) -> str:
        runs = [one for one in kept["runs"] if one["arm"] == arm]
        found = cold_prompts.verdicts(kept["runs"])[arm]

        def of(*path: str) -> float:
            return statistics.median(part_of(run, "/".join(path)) for run in runs)

        def ratio(name: str) -> str:
            return ranged(found[name]) if len(runs) > 1 else f"{found[name]['median']:.2f}"

        cells = (
            f"{of('cold_ttft_s', 'p50'):.2f}, {of('cold_ttft_s', 'p99'):.1f} s",
            ratio("cold_p99_to_round_robin"),
            f"{of('warm_ttft_s', 'p50'):.2f}, {of('warm_ttft_s', 'p99'):.1f} s",
            ratio("warm_p50_to_plain"),
            percent(of("cold_share_of_ttft")),
            percent_of(of("cached_share")),
        )
        return f"| {' | '.join(cells)} |"

    return words


def mean_ttft_to_router(system: str, per_s: str) -> Callable[[Mapping[str, Rows]], str]:
    def words(systems: Mapping[str, Rows]) -> str:
        ratio = rates_page.mean_ttft_to_router({"systems": systems}, system, per_s)
        assert ratio is not None
        return ranged(ratio)

    return words


def whole_ms(value: Mapping[str, float]) -> str:
    return f"{value['median']:.0f} ms"


def answer_s(row: Mapping[str, Any]) -> str:
    """A whole answer of as many tokens as the comparison asks for, in the mean."""
    num_behind = NUM_OUTPUT_TOKENS - 1
    return f"{row['ttft_s_mean']['median'] + num_behind * row['tpot_ms_mean']['median'] / 1e3:.2f} s"


def points(share: float) -> str:
    return tenths(100 * share)


def furthest_of(arenas: Sequence[str]) -> Callable[[Rows], str]:
    """Within how many whole points all reports of these arenas were."""
    return lambda runs: (
        f"within {math.ceil(100 * max(abs(run['off']) for run in runs if run['arena'] in arenas))} points"
    )


def _added(runs: Rows, answers: str) -> list[float]:
    """What a rule adds to what is found, in points."""
    return [100 * (run["found"] - run["found_without"]) for run in runs if run["answers"] == answers]


def most_added(runs: Rows) -> str:
    assert set(_added(runs, "kept")) == {0.0}
    return f"up to {max(_added(runs, 'left out')):.1f} points"


def least_added(runs: Rows) -> str:
    added = _added(runs, "left out")
    return f"the worst of {len(added)} such runs lost {-min(added):.1f}"
