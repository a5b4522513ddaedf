# SPDX-License-Identifier: Apache-2.0
"""The clients against a tiny real HTTP server that answers as SGLang does, byte for byte where it matters."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from bench_fakes import WordTokenizer, chat

from benchmark.client import NativeClient, OpenAIClient
from benchmark.load import Arrivals, play
from benchmark.measure import Workload, measure
from benchmark.workload.conversation import Message
from benchmark.workload.scripts import ScriptLimits, history_scripts, session_scripts

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]
HELD_BACK_S = 0.15
TEN = "one two three four five six seven eight nine ten"


def serve(handle: Handle, use: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, Any]]) -> Any:
    """Run `use` with a client session and the URL of a server on which `handle` answers everything."""

    async def main() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as session:
                port = runner.addresses[0][1]
                return await use(session, f"http://127.0.0.1:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def native_event(ids: list[int], text: str | None, **meta: Any) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"completion_tokens": len(ids), **meta}}


async def stream(request: web.Request, pieces: list[bytes], *, gap_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(gap_s)
    return response


def events(*messages: dict[str, Any]) -> bytes:
    lines = [*(json.dumps(message) for message in messages), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def ask(client: NativeClient | OpenAIClient) -> Coroutine[Any, Any, Any]:
    return client.answer([Message("user", "hi")], [1, 2, 3], 3)


def test_native_when_headers_are_held_back_then_ttft_counts_from_before_sending() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["input_ids"] == [1, 2, 3]
        await asyncio.sleep(HELD_BACK_S)
        first = native_event([5], "a", prompt_tokens=3, cached_tokens=2, dp_rank=1)
        details = {"device": 1, "peer": 1, "storage_backend": "x"}
        last = native_event([5, 6, 7], "abc", prompt_tokens=3, cached_tokens=2, cached_tokens_details=details)
        data = events(first, last)
        # Cut in the middle of an event: a piece of the network is not a piece of the answer.
        return await stream(request, [data[:20], data[20:90], data[90:]], gap_s=0.01)

    answer = serve(handle, lambda session, url: ask(NativeClient(session, url)))
    assert answer.error == ""
    assert answer.ttft_s >= HELD_BACK_S
    assert answer.latency_s >= answer.ttft_s
    assert (answer.output_ids, answer.text, answer.dp_rank) == ([5, 6, 7], "abc", 1)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 3, 2)
    assert answer.cached_tokens_details == {"device": 1, "peer": 1}
    assert len(answer.itl_s) == 2 and answer.itl_s[0] == answer.itl_s[1]


def test_native_when_the_server_streams_increments_then_put_together() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        pieces = [([5], "a", 1), ([5], "a", 2), ([6, 7], "bc", 4)]
        messages = [
            {"text": text, "output_ids": ids, "meta_info": {"completion_tokens": total}} for ids, text, total in pieces
        ]
        return await stream(request, [events(*messages)])

    answer = serve(handle, lambda session, url: ask(NativeClient(session, url)))
    assert (answer.output_ids, answer.text) == ([5, 5, 6, 7], "aabc")


def test_openai_when_role_empty_choices_and_done_arrive_then_ttft_is_of_the_first_content() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        assert asked["stream_options"] == {"include_usage": True} and asked["ignore_eos"]
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        role = events({"choices": [{"delta": {"role": "assistant", "content": ""}}]}).removesuffix(b"data: [DONE]\n\n")
        rest = events(
            {"choices": [{"delta": {"content": "he"}}]},
            {"choices": [{"delta": {"content": "y"}}]},
            {"choices": [], "usage": usage, "sglext": {"cached_tokens_details": {"device": 4, "host": 0}}},
        )
        return await stream(request, [role, rest], gap_s=HELD_BACK_S)

    answer = serve(handle, lambda session, url: ask(OpenAIClient(session, url)))
    assert answer.error == "" and answer.text == "hey"
    assert answer.ttft_s >= HELD_BACK_S * 0.9
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert answer.cached_tokens_details == {"device": 4, "host": 0}


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (503, b"busy", "HTTP 503: busy"),
        (200, events({"error": {"message": "too long"}}), "too long"),
        (200, events(native_event([], "", finish_reason={"type": "abort", "message": "gone"})), "gone"),
        (200, b"data: {broken\n\n", "JSONDecodeError"),
        (200, b"data: [DONE]\n\n", "without any content"),
        (200, b"", "without any content"),
    ],
)
def test_native_when_the_server_fails_then_the_answer_says_so(status: int, body: bytes, told: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body)

    answer = serve(handle, lambda session, url: ask(NativeClient(session, url)))
    assert told in answer.error and answer.latency_s > 0


def test_native_when_nobody_listens_then_the_answer_says_so() -> None:
    async def main() -> Any:
        async with aiohttp.ClientSession() as session:
            return await ask(NativeClient(session, "http://127.0.0.1:9"))

    assert "Connect" in asyncio.run(main()).error


def test_run_when_one_request_fails_then_the_others_are_measured() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if len(asked["input_ids"]) == 14:
            return web.Response(status=500, text="unlucky")
        return await stream(request, [events(native_event([1, 2, 3], "a b c", prompt_tokens=12))])

    chats = [chat("a", TEN, TEN), chat("unlucky", TEN + " and two", TEN), chat("c", TEN, TEN)]
    scripts = history_scripts(chats, WordTokenizer(), ScriptLimits(3))
    workload = Workload(tuple(scripts), WordTokenizer(), Arrivals(concurrency=1), seed=3)
    results = serve(handle, lambda session, url: measure("x", url, workload))
    assert [result.run for result in results] == [1, 2]
    for result in results:
        assert (result.summary["num_completed"], result.summary["num_errors"]) == (2, 1)
        assert sorted(result.order) == ["a", "c", "unlucky"]
    assert results[0].order != results[1].order


def test_session_when_played_then_every_turn_carries_the_servers_own_answers() -> None:
    lengths: list[int] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        lengths.append(len((await request.json())["input_ids"]))
        return await stream(request, [events(native_event([1], "my own answer", prompt_tokens=lengths[-1]))])

    scripts = session_scripts([chat("a", TEN, TEN, TEN, TEN)], WordTokenizer(), ScriptLimits(1))

    async def use(session: aiohttp.ClientSession, url: str) -> Any:
        return await play(scripts, [0], NativeClient(session, url), WordTokenizer(), Arrivals())

    records, total_time_s = serve(handle, use)
    # Ten words and the marks of two messages; then three words of answer, ten more, two more marks.
    assert lengths == [12, 12 + 3 + 1 + 10 + 1]
    assert [record.key for record in records] == ["a#0", "a#1"] and total_time_s > 0


def test_arrivals_when_rate_and_concurrency_then_refused() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        Arrivals(concurrency=2, request_rate_per_s=3.0)
    starts = Arrivals(request_rate_per_s=10.0, seed=1).starts_s(2000)
    assert starts[0] == 0.0 and starts == sorted(starts)
    assert starts[-1] == pytest.approx(200, rel=0.1)
