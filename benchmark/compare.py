# SPDX-License-Identifier: Apache-2.0
"""Measures several running servers alternately, so that what drifts on the machine hits all of them alike.

Per repetition every server gets its turn, in an order that rotates: it is awake and all others sleep, its
caches are emptied, nothing is warmed up, and the workload is played twice in a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmark.load import Progress
from benchmark.measure import RunResult, Workload, flush_cache, measure
from benchmark.metrics import paired_ratio, spread


class Sleeper(Protocol):
    """A server that can be put to sleep: its processes stop running but keep their state."""

    def asleep(self) -> None: ...

    def awake(self) -> None: ...


@dataclass(frozen=True)
class Target:
    """One running server. `processes` is None when it is someone else's and must stay as it is."""

    label: str
    url: str
    processes: Sleeper | None = None


# Called with what is being measured (label, repetition, run); gives the progress callback of that run.
ProgressOf = Callable[[str, int, int], Progress]


def order_of_repetition(labels: Sequence[str], repetition: int) -> list[str]:
    """Labels in the order of repetition 1, 2, ...: each time the next one goes first."""
    shift = (repetition - 1) % len(labels) if labels else 0
    return [*labels[shift:], *labels[:shift]]


async def measure_alternately(
    targets: Sequence[Target],
    workload: Workload,
    num_repetitions: int,
    *,
    progress_of: ProgressOf | None = None,
    finished: Callable[[RunResult], None] | None = None,
) -> list[RunResult]:
    """All runs of all repetitions. Every summary names the server that was first in its repetition.

    All servers are left awake.
    """
    by_label = {target.label: target for target in targets}
    if len(by_label) != len(targets):
        raise ValueError(f"labels must differ: {[target.label for target in targets]}")
    results: list[RunResult] = []
    try:
        for repetition in range(1, num_repetitions + 1):
            order = order_of_repetition([target.label for target in targets], repetition)
            for place, label in enumerate(order, start=1):
                _only_awake(by_label[label], targets)
                runs = await _measure_one(by_label[label], workload, repetition, progress_of)
                for run in runs:
                    run.summary.update({"first_in_repetition": order[0], "place_in_repetition": place})
                    if finished is not None:
                        finished(run)
                results.extend(runs)
    finally:
        for target in targets:
            if target.processes is not None:
                target.processes.awake()
    return results


async def _measure_one(
    target: Target, workload: Workload, repetition: int, progress_of: ProgressOf | None
) -> list[RunResult]:
    # A server that slept has timers to catch up with; let it do so before the clock runs.
    await asyncio.sleep(0.5)
    await flush_cache(target.url)

    def progress_of_run(run: int) -> Progress:
        assert progress_of is not None
        return progress_of(target.label, repetition, run)

    return await measure(
        target.label,
        target.url,
        workload,
        repetition=repetition,
        progress=progress_of_run if progress_of else None,
    )


def _only_awake(target: Target, targets: Sequence[Target]) -> None:
    for other in targets:
        if other is not target and other.processes is not None:
            other.processes.asleep()
    if target.processes is not None:
        target.processes.awake()


TIMES = ("ttft_s", "latency_s", "latency_per_token_ms", "time_per_output_token_ms", "inter_token_latency_ms")
TOTALS = ("total_time_s", "completed_per_s", "served_tokens", "prompt_tokens", "cached_tokens", "cached_share")


def across_repetitions(results: Sequence[RunResult], label: str, run: int) -> dict[str, Any]:
    """Median and spread over repetitions of the figures that comparisons are made of."""
    summaries = [result.summary for result in results if result.label == label and result.run == run]
    figures: dict[str, Any] = {"num_repetitions": len(summaries)}
    for name in TIMES:
        for quantile in ("mean", "p50", "p90", "p99"):
            figures[f"{name}_{quantile}"] = spread([s[name][quantile] for s in summaries if s[name]])
    for name in TOTALS:
        figures[name] = spread([s[name] for s in summaries if s[name] is not None])
    figures["cached_by_source"] = {
        source: spread([s["cached_by_source"][source] for s in summaries])
        for source in (summaries[0]["cached_by_source"] if summaries else ())
    }
    figures["num_errors"] = sum(s["num_errors"] for s in summaries)
    return figures


def mean_ttft_ratio(results: Sequence[RunResult], label: str, baseline: str, run: int) -> dict[str, Any] | None:
    """Mean TTFT of `label` over that of `baseline`, within each repetition, then median and spread."""
    return mean_ratio("ttft_s", results, label, baseline, run)


def mean_ratio(figure: str, results: Sequence[RunResult], label: str, baseline: str, run: int) -> dict[str, Any] | None:
    """The same of any figure that summaries have a mean of."""

    def means(of: str) -> dict[int, float]:
        return {
            result.repetition: result.summary[figure]["mean"]
            for result in results
            if result.label == of and result.run == run and result.summary[figure]
        }

    top, bottom = means(label), means(baseline)
    shared = sorted(top.keys() & bottom.keys())
    return paired_ratio([top[repetition] for repetition in shared], [bottom[repetition] for repetition in shared])
