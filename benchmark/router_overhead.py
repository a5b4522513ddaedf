# SPDX-License-Identifier: Apache-2.0
"""What does `banyan route` add to a request's time?

    python -m benchmark.router_overhead --repetitions 200

Two servers without an engine answer at once, with eight events each; one of them tells by KV events that it holds the
prompts. The same requests, one at a time, go to that server straight and through the router, in turns. What is told is
the time to the first byte and to the last, and the difference of the medians. Writes build/router-overhead/report.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvicorn
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from banyan.router.blocks import block_ids
from banyan.router.events import BlockStored, EventBatch
from benchmark.client import open_session
from benchmark.metrics import distribution
from benchmark.results import write_report
from benchmark.router_failover import cached_share_expected, router
from benchmark.servers import free_port, unwind_on_sigterm, wait_answers

PAGE_TOKENS = 16
LENGTHS = (100, 2_000, 32_000)
NUM_EVENTS = 8
TIMEOUT_S = 30.0
START_S = 60.0


class Standin:
    """A server without an engine answers what a router asks, and prompts at once. It tells of no pages on port 0."""

    def __init__(self, events_port: int) -> None:
        self._events_port = events_port

    def app(self) -> Starlette:
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/health", self.health),
            Route("/server_info", self.server_info),
            Route("/v1/loads", self.loads),
        ]
        return Starlette(routes=routes, lifespan=self._telling if self._events_port else None)

    @asynccontextmanager
    async def _telling(self, app: Starlette) -> AsyncIterator[None]:
        """Tell of all pages again and again: a router that subscribes late must hear of them, too."""
        with zmq.asyncio.Context.instance().socket(zmq.PUB) as socket:
            socket.bind(f"tcp://127.0.0.1:{self._events_port}")
            telling = asyncio.create_task(self._tell(socket))
            yield
            telling.cancel()

    async def _tell(self, socket: zmq.asyncio.Socket) -> None:
        ids = [one for length in LENGTHS for one in block_ids(array("I", prompt(length)), PAGE_TOKENS)]
        number = 0
        while True:
            payload = msgspec.msgpack.encode(EventBatch(time.time(), [BlockStored(ids)], 0))
            await socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
            number += 1
            await asyncio.sleep(1.0)

    async def generate(self, request: Request) -> Response:
        await request.body()
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        for number in range(NUM_EVENTS):
            yield b'data: {"number": %d}\n\n' % number
        yield b"data: [DONE]\n\n"

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def server_info(self, request: Request) -> Response:
        events = None
        if self._events_port:
            events = {"publisher": "zmq", "endpoint_host": "127.0.0.1", "endpoint_port_base": self._events_port}
            events |= {"block_size": PAGE_TOKENS, "dp_size": 1}
        return JSONResponse({"dp_size": 1, "startup_time": 0, "kv_events": events, "internal_states": []})

    async def loads(self, request: Request) -> Response:
        names = ("num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_total_tokens")
        load = dict.fromkeys(names, 0) | {"dp_rank": 0, "timestamp": time.time()}
        load |= {"num_used_tokens": 0, "max_total_num_tokens": 1 << 20}
        return JSONResponse({"timestamp": datetime.now(UTC).isoformat(), "loads": [load]})


def prompt(num_tokens: int) -> list[int]:
    return [num_tokens + number for number in range(num_tokens)]


def serve(port: int, events_port: int) -> None:
    uvicorn.run(Standin(events_port).app(), host="127.0.0.1", port=port, log_level="error")


@contextmanager
def standin(events_port: int) -> Iterator[str]:
    """One, in a process of its own; its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port, events_port), daemon=True)
    process.start()
    try:
        failure = "a server without an engine did not come up"
        wait_answers(f"{url}/health", process.is_alive, failure, timeout_s=START_S)
        yield url
    finally:
        process.terminate()
        process.join(10)


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[float, float]:
    """Milliseconds to the first and to the last byte of one answer."""
    start_s = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/generate", data=body, headers=headers) as response:
        response.raise_for_status()
        await response.content.readany()
        first_s = time.perf_counter() - start_s
        await response.read()
    return first_s * 1e3, (time.perf_counter() - start_s) * 1e3


async def measure(urls: dict[str, str], num_tokens: int, repetitions: int) -> dict[str, Any]:
    """One prompt, straight and routed in turns."""
    body = json.dumps({"input_ids": prompt(num_tokens), "stream": True}).encode()
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in urls}
    async with open_session(TIMEOUT_S) as session:
        for number in range(repetitions + 10):
            for way in sorted(urls, reverse=bool(number % 2)):
                times = await ask(session, urls[way], body)
                # The first ones open connections and fill caches.
                if number >= 10:
                    taken[way].append(times)
    told = {way: _told(times) for way, times in taken.items()}
    return {"prompt_tokens": num_tokens} | told | _added(told)


def _told(times: Sequence[tuple[float, float]]) -> dict[str, dict[str, float]]:
    columns = dict(zip(("first_byte_ms", "last_byte_ms"), zip(*times, strict=True), strict=True))
    return {name: told for name, values in columns.items() if (told := distribution(values)) is not None}


def _added(told: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """What the router adds to the medians."""
    routed, straight = told["routed"], told["straight"]
    return {f"added_{name}": routed[name]["p50"] - straight[name]["p50"] for name in routed}


async def run(urls: dict[str, str], repetitions: int) -> dict[str, Any]:
    # One interval of what the server tells, so that the router knows its pages.
    await asyncio.sleep(2.0)
    rows = [await measure(urls, num_tokens, repetitions) for num_tokens in LENGTHS]
    async with open_session(TIMEOUT_S) as session, session.get(f"{urls['routed']}/metrics") as response:
        return {"rows": rows, "expected_cached_share": cached_share_expected(await response.text())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.router_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--policy", default="lmetric")
    parser.add_argument("--out", type=Path, default=Path("build/router-overhead"))
    args = parser.parse_args(argv)
    unwind_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        holder, other = (stack.enter_context(standin(port)) for port in (free_port(), 0))
        url = stack.enter_context(router((holder, other), args.policy, args.out / "router.log"))
        found = asyncio.run(run({"straight": holder, "routed": url}, args.repetitions))
    write_report(args.out / "report.json", found, args)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
