# SPDX-License-Identifier: Apache-2.0
"""Plays workloads on a system that is up: from cold caches, and again after its servers were started anew."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from benchmark.alternatives.kept import kept_by, wait_until_still, written_by
from benchmark.alternatives.start import Running
from benchmark.alternatives.systems import PAGE_TOKENS, Budget
from benchmark.alternatives.traces import distinct_pages
from benchmark.client import NativeClient, open_session
from benchmark.measure import flush_cache
from benchmark.records import Record
from benchmark.replay import Workload, check_cold, play, summary
from benchmark.workload.generated import random_ids

TIMEOUT_S = 300.0
WRITE_S = 30.0
WARM_UP_TOKENS = 200


def play_cold(running: Running, workload: Workload, budget: Budget) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """One run from empty caches; its figures and answers. Waits until what goes to disk is there.

    Raises:
        WarmStart: when the first answer tells of cached tokens.
        RuntimeError: when a server does not empty its caches.
    """
    # What was asked before may still be on its way to the disk.
    wait_until_still(lambda: written_by(running), timeout_s=WRITE_S)
    before = kept_by(running, budget)
    asyncio.run(_flush(running))
    records, total_time_s = asyncio.run(_play(running, workload))
    check_cold(running.system.name, records)
    is_still = wait_until_still(lambda: written_by(running), timeout_s=WRITE_S)
    after = kept_by(running, budget)
    pages = distinct_pages(workload.prompts, PAGE_TOKENS)
    kept = {
        **after.to_json(),
        "distinct_pages": pages,
        "dram_bytes_per_page": round(after.dram_bytes / pages),
        "disk_bytes_per_page": round((after.disk_bytes - before.disk_bytes) / pages),
        "all_written": is_still,
        "memory_bytes": running.memory_bytes(),
    }
    return {**summary(workload, records, total_time_s=total_time_s), "kept": kept}, answers_of(records)


def play_again(running: Running, workload: Workload) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The same requests with whatever the system still has."""
    records, total_time_s = asyncio.run(_play(running, workload))
    return summary(workload, records, total_time_s=total_time_s), answers_of(records)


def fill(running: Running, workloads: Sequence[Workload]) -> None:
    """Ask them without emptying anything, for what it leaves on the disk.

    Raises:
        RuntimeError: when a request fails.
    """
    for workload in workloads:
        records, _ = asyncio.run(_play(running, workload))
        errors = [record.answer.error for record in records if record.answer.error]
        if errors:
            raise RuntimeError(f"{running.system.name}: {errors[0]}")
    wait_until_still(lambda: written_by(running), timeout_s=WRITE_S)


def ask_alone(running: Running, prompts: Sequence[list[int]], num_tokens: int, times: int) -> dict[str, list[int]]:
    """Prompts asked one at a time, all of them `times` times: no batch of several rounds otherwise than another."""
    return asyncio.run(_alone(running, prompts, num_tokens, times))


def warm_up(running: Running) -> None:
    """Have every rank compute something, for the first forward of a process takes longer than any other."""
    asyncio.run(_warm_up(running))


def answers_of(records: Sequence[Record]) -> dict[str, list[int]]:
    """Tokens by request, of those that were answered."""
    return {record.key: record.answer.output_ids for record in records if not record.answer.error}


async def _warm_up(running: Running) -> None:
    rng = random.Random(0)
    async with open_session(TIMEOUT_S) as session:
        await asyncio.gather(
            *(
                NativeClient(session, server.url).answer((), random_ids(rng, WARM_UP_TOKENS), 2)
                for server in running.servers
                # Two for each rank, all at once: whoever places them, no rank is left out.
                for _ in range(2 * server.spec.dp)
            )
        )


async def _flush(running: Running) -> None:
    for server in running.servers:
        await flush_cache(server.url)


async def _play(running: Running, workload: Workload) -> tuple[list[Record], float]:
    async with open_session(TIMEOUT_S) as session:
        return await play(workload, NativeClient(session, running.url), arrived=lambda record: None)


async def _alone(running: Running, prompts: Sequence[list[int]], num_tokens: int, times: int) -> dict[str, list[int]]:
    found = {}
    async with open_session(TIMEOUT_S) as session:
        client = NativeClient(session, running.url)
        for time in range(times):
            for number, prompt in enumerate(prompts):
                answer = await client.answer((), prompt, num_tokens)
                found[f"{number}#{time}"] = [] if answer.error else answer.output_ids
    return found
