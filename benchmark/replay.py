# SPDX-License-Identifier: Apache-2.0
"""Plays a trace against one server: trace-driven arrivals, one turn of a session after the other.

A run begins cold or not at all: caches are emptied, and a first answer with cached tokens voids the run. Each record
is on the disk before the next request of its session is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from banyan_lab.replay import (
    Pace,
    RequestClass,
    Sharing,
    Synthesis,
    Trace,
    TraceRequest,
    Vocabulary,
    class_of,
    sharing_of,
)
from benchmark.measure import flush_cache
from benchmark.metrics import distribution, summarise
from benchmark.records import Answer, Record
from benchmark.workload.conversation import Message


class WarmStart(RuntimeError):
    """The server had cached tokens before the first request: what follows would measure the run before."""


class ReplayClient(Protocol):
    """Sends one prompt; a failure is in `Answer.error`, never raised."""

    async def answer(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        output_len: int,
        *,
        routing_key: str | None = None,
    ) -> Answer: ...


@dataclass(frozen=True)
class Workload:
    """A trace as it will be played, with what is known of it beforehand: prompts, sharing, classes."""

    trace: Trace
    pace: Pace
    token_scale: float
    prompts: tuple[list[int], ...]
    sharing: Sharing
    description: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trace: Trace,
        pace: Pace,
        vocabulary: Vocabulary,
        *,
        token_scale: float,
        seed: int,
        description: dict[str, Any] | None = None,
    ) -> Workload:
        synthesis = Synthesis(vocabulary, block_tokens=trace.block_tokens, seed=seed)
        prompts = tuple(synthesis.prompt(request) for request in trace.requests)
        return cls(trace, pace, token_scale, prompts, sharing_of(trace), description or {})

    def class_at(self, position: int) -> RequestClass:
        """The class of a request, by the tokens that no earlier prompt of the trace has."""
        return class_of(self.sharing.new_tokens[position], token_scale=self.token_scale)


async def play(
    workload: Workload, client: ReplayClient, *, arrived: Callable[[Record], None]
) -> tuple[list[Record], float]:
    """Play the trace; records in order of arrival, and the wall time in seconds.

    A failed request is recorded and its session goes on: the prompts of later turns do not depend on it.
    """
    limit = workload.pace.max_inflight_sessions or len(workload.prompts) or 1
    gate = asyncio.Semaphore(limit)
    positions: dict[str, list[int]] = {}
    for position, request in enumerate(workload.trace.requests):
        positions.setdefault(request.session, []).append(position)
    records: list[Record] = []
    start_s = time.perf_counter()

    def done(record: Record) -> None:
        records.append(record)
        arrived(record)

    async def session(turns: list[int]) -> None:
        answered_s = None
        first = workload.trace.requests[turns[0]]
        await _sleep_until(start_s + workload.pace.send_s(first, None))
        async with gate:
            for position in turns:
                send_s = workload.pace.send_s(workload.trace.requests[position], answered_s)
                await _sleep_until(start_s + send_s)
                done(await _ask(workload, position, client, start_s))
                answered_s = time.perf_counter() - start_s

    await asyncio.gather(*(session(turns) for turns in positions.values()))
    total_time_s = time.perf_counter() - start_s
    return sorted(records, key=lambda record: record.position), total_time_s


async def play_cold(
    url: str, workload: Workload, client: ReplayClient, *, arrived: Callable[[Record], None]
) -> tuple[list[Record], float]:
    """`play` from empty caches.

    Raises:
        WarmStart: when the first answer tells of cached tokens.
        RuntimeError: when the server does not empty its caches.
    """
    await flush_cache(url)
    records, total_time_s = await play(workload, client, arrived=arrived)
    check_cold(url, records)
    return records, total_time_s


def check_cold(name: str, records: Sequence[Record]) -> None:
    """Raises WarmStart when the first answer of what has this name tells of cached tokens."""
    first = min(records, key=lambda record: record.sent_s, default=None)
    if first is not None and first.answer.cached_tokens:
        raise WarmStart(f"{name}: {first.answer.cached_tokens} cached tokens in the first answer after a flush")


def summary(workload: Workload, records: Sequence[Record], *, total_time_s: float) -> dict[str, Any]:
    """The figures of one run: all requests, each class, each rank, and the imbalance between ranks."""
    figures = summarise(records, total_time_s=total_time_s)
    by_class: dict[str, list[Record]] = {name.value: [] for name in RequestClass}
    for record in records:
        by_class[workload.class_at(record.position)].append(record)
    figures["by_class"] = {name: _of_class(some, total_time_s) for name, some in by_class.items()}
    figures["imbalance"] = imbalance(figures["by_rank"])
    figures["ideal_cached_share"] = round(workload.sharing.shared_ratio, 5)
    figures["follow_ups"] = follow_ups(records)
    return figures


def follow_ups(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Later turns of sessions, by whether they ran on another rank than the turn before them; those whose rank, or the
    one before, nobody has told are left out."""
    ranks = {(record.script_id, record.turn): record.answer.dp_rank for record in records if not record.answer.error}
    by_place: dict[str, list[Record]] = {"moved": [], "stayed": []}
    for record in records:
        before, now = ranks.get((record.script_id, record.turn - 1)), record.answer.dp_rank
        if before is not None and now is not None and not record.answer.error:
            by_place["moved" if before != now else "stayed"].append(record)
    return {
        place: {
            "num_requests": len(some),
            "ttft_s": distribution(one.answer.ttft_s for one in some if one.answer.ttft_s is not None),
        }
        for place, some in by_place.items()
    }


def imbalance(by_rank: dict[str, dict[str, int]]) -> dict[str, float | None]:
    """Largest over mean, between ranks: of requests, of prompt tokens, and of tokens that were not cached."""
    ranks = list(by_rank.values())

    def ratio(values: list[int]) -> float | None:
        return round(max(values) * len(values) / sum(values), 4) if sum(values) else None

    return {
        "num_requests": ratio([rank["num_requests"] for rank in ranks]),
        "prompt_tokens": ratio([rank["prompt_tokens"] for rank in ranks]),
        "uncached_tokens": ratio([rank["prompt_tokens"] - rank["cached_tokens"] for rank in ranks]),
    }


def _of_class(records: Sequence[Record], total_time_s: float) -> dict[str, Any]:
    figures = summarise(records, total_time_s=total_time_s)
    names = ("num_requests", "num_errors", "cached_share", "ttft_s", "time_per_output_token_ms", "latency_s")
    return {name: figures[name] for name in names}


async def _ask(workload: Workload, position: int, client: ReplayClient, start_s: float) -> Record:
    request: TraceRequest = workload.trace.requests[position]
    sent_s = time.perf_counter() - start_s
    answer = await client.answer((), workload.prompts[position], request.num_output_tokens, routing_key=request.session)
    return Record(
        script_id=request.session,
        turn=request.turn,
        position=position,
        sent_s=sent_s,
        nominal_prompt_tokens=request.num_input_tokens,
        output_len=request.num_output_tokens,
        answer=answer,
    )


async def _sleep_until(moment_s: float) -> None:
    await asyncio.sleep(max(0.0, moment_s - time.perf_counter()))
