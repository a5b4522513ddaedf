# SPDX-License-Identifier: Apache-2.0
"""Plays scripts against one server, with bounded concurrency or Poisson arrivals, and records every
request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.client import ChatClient
from benchmark.records import Answer, Record
from benchmark.workload.conversation import ChatTokenizer, Message, Script

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Arrivals:
    """When scripts start: at most `concurrency` at a time, or `request_rate_per_s` on average, or all at
    once."""

    concurrency: int | None = None
    request_rate_per_s: float = float("inf")
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.request_rate_per_s != float("inf"):
            raise ValueError("--concurrency and --request-rate exclude each other: give one of them")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"--concurrency must be at least 1, not {self.concurrency}")
        if self.request_rate_per_s <= 0:
            raise ValueError(f"--request-rate must be above 0, not {self.request_rate_per_s}")

    def starts_s(self, num_scripts: int) -> list[float]:
        """Earliest start of each script, in seconds from the start of the run."""
        if self.request_rate_per_s == float("inf"):
            return [0.0] * num_scripts
        rng = random.Random(self.seed)
        starts, now_s = [], 0.0
        for _ in range(num_scripts):
            starts.append(now_s)
            now_s += rng.expovariate(self.request_rate_per_s)
        return starts


async def send_at(
    client: ChatClient, prompts: Sequence[Sequence[int]], at_s: Sequence[float], output_len: int
) -> list[Answer]:
    """Send each prompt at its time, in seconds from now, whoever has not been answered; the answers in their order."""
    start_s = time.monotonic()

    async def one(prompt: Sequence[int], due_s: float) -> Answer:
        await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
        return await client.answer((), prompt, output_len)

    return list(await asyncio.gather(*map(one, prompts, at_s)))


async def send_all(
    client: ChatClient, prompts: Sequence[Sequence[int]], in_flight: int, output_len: int
) -> list[Answer]:
    """Send each prompt as soon as fewer than ``in_flight`` are under way; the answers in their order."""
    gate = asyncio.Semaphore(in_flight)

    async def one(prompt: Sequence[int]) -> Answer:
        async with gate:
            return await client.answer((), prompt, output_len)

    return list(await asyncio.gather(*map(one, prompts)))


async def play(
    scripts: Sequence[Script],
    order: Sequence[int],
    client: ChatClient,
    tokenizer: ChatTokenizer,
    arrivals: Arrivals,
    *,
    progress: Progress | None = None,
) -> tuple[list[Record], float]:
    """Play `scripts` in `order`; return their records in order of position, and the wall time in seconds.

    A failed request ends its own script (the next turn would carry no answer) and nothing else.
    """
    gate = asyncio.Semaphore(arrivals.concurrency or len(order) or 1)
    records: list[Record] = []
    num_total = sum(len(script.steps) for script in scripts)
    start_s = time.perf_counter()

    def arrived(record: Record) -> None:
        records.append(record)
        if progress is not None:
            progress(len(records), num_total)

    async def one(position: int, start_after_s: float) -> None:
        await asyncio.sleep(start_after_s)
        async with gate:
            await _play_script(scripts[order[position]], position, client, tokenizer, start_s, arrived)

    starts_s = arrivals.starts_s(len(order))
    # The semaphore serves waiters in order of arrival, so scripts start in the given order.
    await asyncio.gather(*(one(position, starts_s[position]) for position in range(len(order))))
    total_time_s = time.perf_counter() - start_s
    return sorted(records, key=lambda record: (record.position, record.turn)), total_time_s


async def _play_script(
    script: Script,
    position: int,
    client: ChatClient,
    tokenizer: ChatTokenizer,
    start_s: float,
    arrived: Callable[[Record], None],
) -> None:
    messages: list[Message] = []
    for turn, step in enumerate(script.steps):
        messages.extend(step.messages)
        token_ids = tokenizer.chat_ids(messages)
        sent_s = time.perf_counter() - start_s
        answer = await client.answer(messages, token_ids, step.output_len)
        arrived(
            Record(
                script_id=script.id,
                turn=turn,
                position=position,
                sent_s=sent_s,
                nominal_prompt_tokens=len(token_ids),
                output_len=step.output_len,
                answer=answer,
            )
        )
        if answer.error:
            return
        messages.append(Message("assistant", answer.text))
