# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests when one of two servers behind `banyan route` is killed under load.

    python -m benchmark.router_failover

Starts two servers (`--dp 1`, KV events on) and a router, plays conversations of random tokens through it, a bounded
number at a time, and kills one server with SIGKILL when `--kill-after` of all requests have ended and the server is
answering some. Every request must complete, or end with an error that says that its server was lost; none may hang.
Also compares what the router expected in the caches with what the servers say they found there. Exits with 1 when a
request ended otherwise; writes build/router-failover/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmark.client import NativeClient, open_session
from benchmark.model import DEFAULT_TARGET, ensure_model
from benchmark.processes import ProcessSession
from benchmark.processor import CPU_ENGINE
from benchmark.results import write_report
from benchmark.servers import Server, ServerSpec, beside, cpu_env, free_port, unwind_on_sigterm, wait_ready
from benchmark.workload.generated import random_ids

REQUEST_TIMEOUT_S = 120.0
"""A request that takes longer counts as hanging."""

LOST = "server_lost"
SERVER_ARGS = (
    *(*CPU_ENGINE, "--page-size", "16", "--max-total-tokens", "20000", "--context-length", "8192"),
    "--sleep-on-idle",
)


def server_spec(label: str, core: int, args: tuple[str, ...] = SERVER_ARGS) -> ServerSpec:
    """One server on one core, whose events anyone on this machine can read; its load, anyone who can reach it."""
    events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "bind": True}
    events["replay_endpoint"] = f"tcp://127.0.0.1:{free_port()}"
    args = (*args, "--kv-events-config", json.dumps(events))
    # SGLang takes no other address.
    args = (*args, "--load-publish-endpoint", f"tcp://*:{free_port()}")
    return ServerSpec(label, 1, "off", args, cpu_env(dp=1, first_core=core))


@contextmanager
def router(urls: Sequence[str], policy: str, log: Path, more: Sequence[str] = ()) -> Iterator[str]:
    """A router in front of the servers at `urls`, with `more` arguments; its own URL."""
    port = free_port()
    command = [sys.executable, "-m", "banyan.cli", "route", "--policy", policy, "--port", str(port), *more]
    for server in urls:
        command += ["--server", server]
    url = f"http://127.0.0.1:{port}"
    with beside(command, log, f"{url}/health"):
        yield url


@dataclass
class Ended:
    """How one request ended. `start_s` and `end_s` count from the beginning of the load."""

    conversation: int
    turn: int
    start_s: float
    end_s: float
    kind: str
    error: str
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Load:
    """Conversations that grow from turn to turn; a failed one ends there."""

    url: str
    num_conversations: int
    num_turns: int
    turn_tokens: int
    output_len: int
    concurrency: int
    seed: int
    ended: list[Ended] = field(default_factory=list)
    draw: Callable[[random.Random, int], list[int]] = random_ids

    async def play(self) -> None:
        start_s = time.perf_counter()
        gate = asyncio.Semaphore(self.concurrency)
        async with open_session(REQUEST_TIMEOUT_S) as session:
            client = NativeClient(session, self.url)
            order = [(turn, one) for turn in range(self.num_turns) for one in range(self.num_conversations)]
            chats: list[list[int] | None] = [[] for _ in range(self.num_conversations)]
            locks = [asyncio.Lock() for _ in range(self.num_conversations)]
            await asyncio.gather(
                *(self._turn(client, gate, locks[one], chats, one, turn, start_s) for turn, one in order)
            )

    async def _turn(
        self,
        client: NativeClient,
        gate: asyncio.Semaphore,
        lock: asyncio.Lock,
        chats: list[list[int] | None],
        one: int,
        turn: int,
        start_s: float,
    ) -> None:
        """One turn, after the turns before it: locks are given in the order in which they were asked for."""
        async with lock, gate:
            tokens = chats[one]
            if tokens is None:
                return
            rng = random.Random(f"{self.seed}-{one}-{turn}")
            tokens += self.draw(rng, self.turn_tokens)
            sent_s = time.perf_counter()
            answer = await client.answer((), tokens, self.output_len)
            kind = self._kind(answer.error, len(answer.output_ids))
            times_s = (sent_s - start_s, time.perf_counter() - start_s)
            self.ended.append(
                Ended(one, turn, *times_s, kind, answer.error or "", len(tokens), answer.cached_tokens or 0)
            )
            chats[one] = [*tokens, *answer.output_ids] if kind == "complete" else None

    def _kind(self, error: str | None, num_tokens: int) -> str:
        if not error:
            return "complete" if num_tokens == self.output_len else "short"
        if LOST in error:
            return "told that its server was lost"
        return "hung" if "Timeout" in error else "unclear error"


async def kill_when_due(load: Load, url: str, victim: Server, num_ended: int) -> float:
    """Kill `victim` once `num_ended` requests have ended and it is answering some; seconds since the call."""
    start_s = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        while True:
            await asyncio.sleep(0.1)
            async with session.get(f"{url}/router/servers") as response:
                states = {state["server"]: state for state in await response.json()}
            if len(load.ended) >= num_ended and states[victim.url]["num_in_flight"] >= 2:
                ProcessSession(victim.pid).kill()
                return time.perf_counter() - start_s


async def run(load: Load, url: str, victim: Server, num_ended: int) -> tuple[float, str]:
    """Load and kill together; when the kill was, and the router's metrics after everything has ended."""
    killing = asyncio.create_task(kill_when_due(load, url, victim, num_ended))
    await load.play()
    if not killing.done():
        killing.cancel()
        raise RuntimeError("the load ended before a server could be killed: ask for more conversations")
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        return killing.result(), await response.text()


def metric(text: str, name: str) -> float:
    """Sum over the labels of one metric."""
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def cached_share_expected(text: str) -> float:
    """Of all prompt tokens that the router has placed, those that it expected in a cache; `text` is its /metrics."""
    return metric(text, "banyan_router_cached_tokens_total") / metric(text, "banyan_router_prompt_tokens_total")


def report(load: Load, killed_s: float, text: str) -> dict[str, Any]:
    around = [one.end_s - one.start_s for one in load.ended if one.start_s <= killed_s <= one.end_s]
    complete = [one for one in load.ended if one.kind == "complete"]
    prompt_tokens = sum(one.prompt_tokens for one in complete)
    return {
        "outcomes": dict(Counter(one.kind for one in load.ended)),
        "requests_ended": len(load.ended),
        "killed_s": killed_s,
        "num_running_at_the_kill": len(around),
        "longest_running_at_the_kill_s": max(around, default=0.0),
        "median_s": statistics.median(one.end_s - one.start_s for one in complete),
        "longest_s": max(one.end_s - one.start_s for one in load.ended),
        "retries": metric(text, "banyan_router_retries_total"),
        "cached_share_found": sum(one.cached_tokens for one in complete) / prompt_tokens,
        "cached_share_expected": cached_share_expected(text),
        "event_batches": metric(text, "banyan_router_event_batches_total"),
        "errors": sorted({one.error for one in load.ended if one.error}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.router_failover", description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="lmetric")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=160)
    parser.add_argument("--output-len", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--kill-after", type=float, default=0.4, metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/router-failover"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    model = ensure_model(DEFAULT_TARGET)
    with (
        Server(server_spec("first", 0), model, args.out) as first,
        Server(server_spec("second", 1), model, args.out) as second,
    ):
        wait_ready([first, second])
        with router([first.url, second.url], args.policy, args.out / "router.log") as url:
            load = Load(
                url, args.conversations, args.turns, args.turn_tokens, args.output_len, args.concurrency, args.seed
            )
            num_ended = round(args.kill_after * args.conversations * args.turns)
            found = report(load, *asyncio.run(run(load, url, first, num_ended)))
    write_report(args.out / "report.json", found, args)
    print(json.dumps(found, indent=2))
    good = {"complete", "told that its server was lost"}
    return 0 if set(found["outcomes"]) <= good else 1


if __name__ == "__main__":
    sys.exit(main())
