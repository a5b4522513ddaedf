# SPDX-License-Identifier: Apache-2.0
"""What pairs are asked beside conversations: how much is handed over, what stays locked, what a killed server costs."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmark.client import NativeClient, open_session
from benchmark.engine import Engine
from benchmark.pd_servers import PAGE_TOKENS, SERVER_ARGS, START_TIMEOUT_S, Pair
from benchmark.servers import ServerSpec, cpu_env, wait_ready
from benchmark.store_server import prompts
from benchmark.warm import ForkedServer
from benchmark.workload.generated import random_ids

DECODE_POOL_TOKENS = 12_000
RESERVED_TOKENS = 512
"""SGLang keeps so many slots of a decode server for each running request."""

MAX_CONTEXT_TOKENS = 4096
IDLE_TIMEOUT_S = 30.0
KILL_AFTER_S = 1.0
"""A prompt of this benchmark takes some four seconds to compute."""


def compare_with_alone(rows: Sequence[dict[str, Any]], model: Path, logs: Path, num_shards: int) -> None:
    """Ask a server that shares nothing what the rows say, in their order; note in each whether it answers alike. Where
    shards leave room for that it has two ranks, each of which has one request at a time."""
    num_ranks = 2 if num_shards == 1 else 1
    args = (*SERVER_ARGS, "--tp", str(num_shards), "--max-total-tokens", "40000")
    spec = ServerSpec("alone", num_ranks, "off", args, cpu_env(dp=num_ranks * num_shards))
    with ForkedServer(spec, model, logs) as server, ThreadPoolExecutor(num_ranks) as pool:
        wait_ready([server], timeout_s=START_TIMEOUT_S)
        parts = [[row for row in rows if row["conversation"] % num_ranks == rank] for rank in range(num_ranks)]
        for _ in pool.map(lambda rank: _compare(parts[rank], server.url, rank), range(num_ranks)):
            pass


def _compare(rows: Sequence[dict[str, Any]], url: str, rank: int) -> None:
    for row in rows:
        answer = Engine(url).generate(row.pop("asked"), num_tokens=len(row["answer"]), rank=rank)
        row["is_as_alone"] = answer["output_ids"] == row.pop("answer")


def ttft_s(url: str, ids: Sequence[int]) -> float:
    """The time to the first token of this prompt, streamed."""
    return asyncio.run(_ttft_s(url, ids))


async def _ttft_s(url: str, ids: Sequence[int]) -> float:
    async with open_session(600.0) as session:
        answer = await NativeClient(session, url).answer((), ids, 1)
    if answer.error or answer.ttft_s is None:
        raise RuntimeError(f"{url}: {answer.error}")
    return answer.ttft_s


def hand_over_ratio(pair: Pair, url: str, model: Path, num_tokens: int, seed: int) -> float:
    """Of the prompt's pages of a next turn, the share that is sent to the decode server."""
    first, question = prompts(model, [num_tokens, num_tokens // 40], seed=seed + 1)
    output = Engine(url).generate(first, num_tokens=PAGE_TOKENS)["output_ids"]
    prompt = [*first, *output, *question]
    before = pair.total(pair.prefills[0], "handed_over_pages")
    Engine(url).generate(prompt, num_tokens=2)
    num_sent = pair.total(pair.prefills[0], "handed_over_pages") - before
    return round(num_sent / math.ceil(len(prompt) / PAGE_TOKENS), 4)


def killed_decode(pair: Pair, url: str, model: Path, num_tokens: int, seed: int) -> dict[str, Any]:
    """A request whose decode server is killed while its prompt is computed, and comes back. Another one was sent after
    it: the last that a lost server was sent is tried nowhere else."""
    prompt, last = prompts(model, [num_tokens, num_tokens], seed=seed + 2)
    right = Engine(url).generate(prompt, num_tokens=8, cache_salt="right")["output_ids"]
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(Engine(url).generate, prompt, num_tokens=8)
        time.sleep(KILL_AFTER_S / 2)
        pool.submit(Engine(url).generate, last, num_tokens=8)
        time.sleep(KILL_AFTER_S / 2)
        was_answered = asked.done()
        pair.decode.kill()
        start_s = time.monotonic()
        pair.start_decode_again()
        wait_ready([pair.decode], timeout_s=START_TIMEOUT_S)
        output = asked.result()["output_ids"]
    return {
        "killed_decode_right": output == right and not was_answered,
        "killed_decode_s": round(time.monotonic() - start_s, 1),
        "killed_decode_start_s": pair.decode.start_up_s,
    }


def locked_when_idle(pair: Pair) -> int:
    """Tokens that the decode server's tree keeps from eviction once nothing runs."""
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    locked = 1
    while locked and time.monotonic() < deadline_s:
        time.sleep(1.0)
        locked = pair.total(pair.decode, "num_locked_tokens")
    return int(locked)


def gets_whole_pool(url: str, seed: int) -> bool:
    """Whether requests that together fill the decode server's pool are all answered, one after the other."""
    rng = random.Random(f"whole-{seed}")
    num_tokens = MAX_CONTEXT_TOKENS - RESERVED_TOKENS - PAGE_TOKENS
    answers = [
        Engine(url).generate(random_ids(rng, num_tokens), num_tokens=2)
        for _ in range(DECODE_POOL_TOKENS // num_tokens + 1)
    ]
    return all(len(answer["output_ids"]) == 2 for answer in answers)
