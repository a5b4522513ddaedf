# SPDX-License-Identifier: Apache-2.0
"""Streaming clients of the native `/generate` and of the OpenAI-compatible `/v1/chat/completions`.

Time to first token runs from just before the request is sent (connecting included) to the first piece of
content. It must not start at the response headers: SGLang's chat endpoint holds them back until the first
token is there, which would read as a time to first token of zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import aiohttp

from benchmark.records import CACHE_SOURCES, Answer
from benchmark.sse import DONE, EventStream, ServerSentEvent
from benchmark.workload.conversation import Message


class ServerError(RuntimeError):
    """The server answered, but with a refusal."""


class ChatClient(Protocol):
    """Sends one chat and measures its answer; a failure is in `Answer.error`, never raised."""

    async def answer(self, messages: Sequence[Message], token_ids: Sequence[int], output_len: int) -> Answer: ...


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """One session for a whole run, so that connections are reused and none of them waits for another."""
    return aiohttp.ClientSession(
        # uvicorn hangs up on connections that were idle for 5 s; one that is about to be cut must not be reused.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


class NativeClient:
    """SGLang's `/generate` with token ids in and out: the exact prompt, the exact answer, the rank that
    served it. `fields` go into every request as they are."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, fields: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._session = session
        self._url = f"{url}/generate"
        self._fields = fields

    async def answer(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        output_len: int,
        *,
        routing_key: str | None = None,
    ) -> Answer:
        payload = {
            **self._fields,
            "input_ids": list(token_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True},
            "stream": True,
        }
        if routing_key is not None:
            payload["routing_key"] = routing_key
        return await _stream(self._session, self._url, payload, _read_native)


class OpenAIClient:
    """`/v1/chat/completions`; `cached_tokens` needs a server started with `--enable-cache-report`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str = "default") -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model

    async def answer(self, messages: Sequence[Message], token_ids: Sequence[int], output_len: int) -> Answer:
        payload = {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "temperature": 0,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            # Extensions of SGLang; others ignore them.
            "ignore_eos": True,
            "return_cached_tokens_details": True,
        }
        return await _stream(self._session, self._url, payload, _read_openai)


class _Stopwatch:
    """Times the pieces of one answer from the moment it is made."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._start_s = time.perf_counter()
        self._last_s = self._start_s

    def tokens_arrived(self, num_tokens: int) -> None:
        now_s = time.perf_counter()
        answer = self._answer
        if answer.ttft_s is None:
            answer.ttft_s = now_s - self._start_s
        else:
            answer.itl_s.extend([(now_s - self._last_s) / num_tokens] * num_tokens)
        self._last_s = now_s

    def stop(self) -> None:
        self._answer.latency_s = time.perf_counter() - self._start_s


_ReadEvent = Callable[[dict[str, Any], Answer, _Stopwatch], None]


async def _stream(session: aiohttp.ClientSession, url: str, payload: dict[str, Any], read: _ReadEvent) -> Answer:
    answer = Answer()
    body = json.dumps(payload).encode()
    watch = _Stopwatch(answer)
    try:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise ServerError(f"HTTP {response.status}: {(await response.text())[:300]}")
            events = EventStream()
            async for chunk in response.content.iter_any():
                _read_events(events.feed(chunk), answer, watch, read)
            _read_events(events.close(), answer, watch, read)
    except (
        TimeoutError,
        aiohttp.ClientError,
        OSError,
        ServerError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:
        answer.error = f"{type(error).__name__}: {error}"
    watch.stop()
    if not answer.error and answer.ttft_s is None:
        answer.error = "the stream ended without any content"
    return answer


def _read_events(events: list[ServerSentEvent], answer: Answer, watch: _Stopwatch, read: _ReadEvent) -> None:
    for event in events:
        # Named events carry what an intermediary may want to see; the content comes in unnamed ones.
        if event.name or event.data == DONE:
            continue
        message = json.loads(event.data)
        if message.get("error"):
            raise ServerError(str(message["error"])[:300])
        read(message, answer, watch)


def _read_native(message: dict[str, Any], answer: Answer, watch: _Stopwatch) -> None:
    """Each event repeats the whole answer so far, unless the server streams increments; both are
    understood."""
    meta = message.get("meta_info") or {}
    ids = list(message.get("output_ids") or [])
    text = message.get("text") or ""
    num_before = len(answer.output_ids)
    if ids[:num_before] != answer.output_ids or (num_before and len(ids) < meta.get("completion_tokens", 0)):
        ids, text = answer.output_ids + ids, answer.text + text
    answer.output_ids = ids
    answer.text = text or answer.text
    if len(ids) > num_before:
        watch.tokens_arrived(len(ids) - num_before)
    _read_counts(meta, answer)
    _read_details(meta.get("cached_tokens_details"), answer)
    if meta.get("dp_rank") is not None:
        answer.dp_rank = int(meta["dp_rank"])
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise ServerError(f"aborted: {reason.get('message', 'no reason given')}")


def _read_openai(message: dict[str, Any], answer: Answer, watch: _Stopwatch) -> None:
    for choice in message.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = delta.get("content") or delta.get("reasoning_content") or ""
        if piece:
            answer.text += piece
            # The API does not say how many tokens a piece holds; it is nearly always one.
            watch.tokens_arrived(1)
    usage = message.get("usage")
    if usage:
        _read_counts(usage, answer)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = int(details.get("cached_tokens") or answer.cached_tokens)
    extension = message.get("sglext") or {}
    _read_details(extension.get("cached_tokens_details"), answer)


def _read_counts(counts: dict[str, Any], answer: Answer) -> None:
    answer.prompt_tokens = int(counts.get("prompt_tokens") or answer.prompt_tokens)
    answer.completion_tokens = int(counts.get("completion_tokens") or answer.completion_tokens)
    answer.cached_tokens = int(counts.get("cached_tokens") or answer.cached_tokens)


def _read_details(details: dict[str, Any] | None, answer: Answer) -> None:
    if details:
        answer.cached_tokens_details = {
            source: int(details[source]) for source in CACHE_SOURCES if details.get(source) is not None
        }
