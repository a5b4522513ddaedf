# SPDX-License-Identifier: Apache-2.0
"""Whether a soak was passed: what grew, what was left over, what was wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmark.soak.samples import LEFT_OVER, ProcessSample, Sample
from benchmark.soak.tally import Tally

WARM_UP_S = 600.0
"""Caches of all sorts fill meanwhile. A soak that is shorter than twice that warms up for half of it."""

MAX_MEMORY_GROWTH = 0.03
MAX_MORE_FDS, MAX_MORE_THREADS = 16, 2
WINDOW = 0.2
"""The share of the samples behind the warm-up whose median is the beginning, and the end."""


def failures(tally: Tally, samples: Sequence[Sample], left_over: Sequence[str]) -> list[str]:
    """What is wrong, a line each; nothing where the soak was passed."""
    lines = []
    if not tally.num_compared:
        lines.append("no answer was compared")
    if tally.num_differing:
        lines.append(f"{tally.num_differing} of {tally.num_compared} answers differ; the first: {tally.differing[0]}")
    if tally.num_errors:
        lines.append(f"{tally.num_errors} errors that stock would not give; the first: {tally.errors[0]}")
    lines += hook_failures(samples)
    lines += growth(samples)
    return [*lines, *left_over]


def hook_failures(samples: Sequence[Sample]) -> list[str]:
    """Faults that a rank has caught, at the last sample that has ranks."""
    answered = [sample for sample in samples if sample.ranks]
    if not answered:
        return ["the ranks have never said how they are"]
    last = answered[-1]
    num_failures = max(rank["num_failures"] for rank in last.ranks.values())
    return [f"num_failures is {num_failures}: {last.failures}"] if num_failures or last.failures else []


def growth(samples: Sequence[Sample]) -> list[str]:
    """Processes that have more of something at the end than when they were warm, and those that have ended."""
    warm = behind_warm_up(samples)
    if len(warm) < 2:
        return ["too few samples to see anything grow"]
    names = set(samples[0].processes) | set(warm[0].processes)
    lines = [f"{name} has ended" for name in sorted(names - set(warm[-1].processes))]
    for name in sorted(set(warm[0].processes) & set(warm[-1].processes)):
        of_one = [sample.processes[name] for sample in warm if name in sample.processes]
        for what, memory_kb in (
            ("of its own", lambda one: one.anonymous_kb),
            ("shared and mapped", lambda one: one.resident_kb - one.anonymous_kb),
        ):
            before, after = begin_and_end(of_one, memory_kb)
            if after > before * (1 + MAX_MEMORY_GROWTH):
                lines.append(f"{name}: {before} kB {what} became {after} ({after / before - 1:+.1%})")
        for what, most, count in (
            ("descriptors", MAX_MORE_FDS, lambda one: one.num_fds),
            ("threads", MAX_MORE_THREADS, lambda one: one.num_threads),
        ):
            before, after = begin_and_end(of_one, count)
            if after > before + most:
                lines.append(f"{name}: {before} {what} became {after}")
    return lines


def behind_warm_up(samples: Sequence[Sample]) -> list[Sample]:
    if not samples:
        return []
    warm_up_s = min(WARM_UP_S, samples[-1].at_s / 2)
    return [sample for sample in samples if sample.at_s >= warm_up_s]


def begin_and_end(samples: Sequence[ProcessSample], count: Callable[[ProcessSample], int]) -> tuple[int, int]:
    """Medians of the first and of the last WINDOW of the samples: what comes and goes is no growth."""
    size = max(1, int(len(samples) * WINDOW))
    first, last = samples[:size], samples[-size:]
    return round(statistics.median(map(count, first))), round(statistics.median(map(count, last)))


def unsettled(ranks: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What ranks that nobody asks anything any more still hold."""
    return [
        f"left over at rank {rank}: {name} is {figures[name]}"
        for rank, figures in sorted(ranks.items())
        for name in LEFT_OVER
        if figures[name]
    ]


def unreturned(ranks: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Pages that ranks still have after everything was flushed."""
    lines = []
    for rank, figures in sorted(ranks.items()):
        if figures["num_published_pages"]:
            lines.append(f"rank {rank} publishes {figures['num_published_pages']} pages behind a flush")
        lost = figures["num_pool_pages"] - figures["num_free_pages"]
        if lost:
            lines.append(f"rank {rank} lacks {lost} pages of its pool behind a flush")
    return lines
