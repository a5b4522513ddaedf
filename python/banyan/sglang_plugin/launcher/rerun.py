# SPDX-License-Identifier: Apache-2.0
"""A request whose pages turn out to be damaged on the way in is run again, without the cache.

Checksums are verified while the forward pass runs, layer by layer, so that nothing waits for them. When one fails
SGLang throws away the output of all requests of the batch that had pages loaded and ends them with 503, before a client
has seen a token. Here, in the process that talks to clients, such an end is not passed on: the same request is sent
once more, marked so that its rank computes the whole prompt. Where a client has named several prompts, their ids are
free once the ranks have ended what SGLang has given up with the first run.

Servers of a pair do not: the room in which the two meet has failed with the first run. The router makes another attempt
in another room, and says in a header that it is to be computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import EmbeddingReqInput
from sglang.srt.managers.kv_hints import KvHintsEnvelope, decode_kv_hints_envelope

from banyan.core import LOAD_FAILED
from banyan.planner import Action, asked
from banyan.routing.conversation import conversation_of
from banyan.routing.headers import PLAN_HEADER, READ_HEADER, SOURCE_HEADER
from banyan.routing.hint import READ_ACTION, SESSION_ACTION, SOURCE_ACTION, TEXT, ReadHint, SourceHint
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.kv_hints import with_action
from banyan.sglang_plugin.launcher import clients, ending, prompt_tokens, taken_ids, tenant_salts

logger = logging.getLogger("banyan")

LOOK_PERIOD_S, MOST_LOOKS = 0.05, 100

UNDER_WAY: ContextVar[object] = ContextVar("banyan_request_under_way", default=None)
"""Another one for each run of a request, with all its prompts."""


async def around_generate_request(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """SGLang's answers; those of a second run when the first one ended before its first token for damaged pages."""
    ending.refuse_beside_http(request, manager)
    UNDER_WAY.set(object())
    if prompt_tokens.is_only_asked_about():
        await prompt_tokens.tell(obj, manager)
        return
    try:
        async for answer in _answers(original, manager, obj, request):
            yield answer
    finally:
        # The others of a request with several samples go at the next look.
        taken_ids.let_go(obj.rid, manager)


async def _answers(
    original: Callable[..., AsyncIterator[Any]], manager: Any, obj: Any, request: Any
) -> AsyncIterator[Any]:
    if runtime.config() is not None:
        # The salt first: where anything of Banyan's fails, SGLang serves the request as it is by then.
        tenant_salts.admit(obj, request, manager)
        clients.admit(obj, request, manager)
        obj = await _with_session(obj, request)
    if not runtime.is_sharing():
        async for answer in original(manager, obj, request):
            yield answer
        return
    if runtime.is_of_a_pair():
        async for answer in original(manager, _as_asked(obj, request), request):
            yield answer
        return
    # SGLang fills the request in as it goes.
    fresh = copy.copy(obj)
    has_answered = False
    try:
        async for answer in original(manager, _with_source(obj, request), request):
            if not has_answered and _is_load_failure(answer):
                break
            has_answered = True
            yield answer
        else:
            return
    except HTTPException as error:
        is_ours = not has_answered and error.detail == LOAD_FAILED
        if not is_ours or not await _are_over(obj.rid if fresh.rid else [], manager):
            raise
    # A client's text, of any length and with any line ends.
    logger.warning("banyan: pages of request %.128r were damaged: it is run again without the cache", obj.rid)
    UNDER_WAY.set(object())
    async for answer in original(manager, _computed(fresh), request):
        yield answer


async def _are_over(rids: str | list[str], manager: Any) -> bool:
    """Whether SGLang knows these ids no more, by and by."""
    for _ in range(MOST_LOOKS):
        if manager.rid_to_state.keys().isdisjoint([rids] if isinstance(rids, str) else rids):
            return True
        await asyncio.sleep(LOOK_PERIOD_S)
    return False


def _as_asked(obj: Any, request: Any) -> Any:
    """The request, marked as its headers say."""
    if request is None:
        return obj
    if request.headers.get(PLAN_HEADER) == Action.COMPUTE.value:
        return _computed(obj)
    reads = ReadHint.read(request.headers.get(READ_HEADER))
    obj = obj if reads is None else _marked(obj, READ_ACTION, {TEXT: reads.text()})
    return _with_source(obj, request)


def _with_source(obj: Any, request: Any) -> Any:
    """The request, marked with whose arenas have more of its prompt, as a router says."""
    source = SourceHint.read(request.headers.get(SOURCE_HEADER)) if request is not None else None
    return obj if source is None else _marked(obj, SOURCE_ACTION, {TEXT: source.text()})


async def _with_session(obj: Any, request: Any) -> Any:
    """The request, marked with the name of its conversation where its client says one by the way: its dispatcher sees
    neither headers nor bodies."""
    headers = getattr(request, "headers", None)
    if headers is None:
        return obj
    fields = None
    # SGLang has read a JSON body, and keeps it; of any other there is nothing to read any more.
    if headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        # A GET may say so of no body.
        with contextlib.suppress(ValueError):
            fields = await request.json()
    name = conversation_of(fields if isinstance(fields, dict) else {}, headers)
    return obj if name is None else _marked(obj, SESSION_ACTION, {"name": name})


def _is_load_failure(answer: Any) -> bool:
    """Whether a stream ends before its first token, for this reason. Several prompts in one stream, or several samples
    of one, are not run again: the answers of the others are under way."""
    if not isinstance(answer, dict) or "index" in answer:
        return False
    reason = answer.get("meta_info", {}).get("finish_reason")
    return isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("message") == LOAD_FAILED


def _computed(obj: Any) -> Any:
    """The request, marked so that nothing is loaded for it. One for a vector carries no marks: it finds as much of its
    prefix as is good, for the record of a damaged page is dropped when it is met."""
    return _marked(obj, asked.ACTION_TYPE, asked.payload(Action.COMPUTE))


def _marked(obj: Any, action_type: str, payload: Mapping[str, Any]) -> Any:
    """The request with one more hint, of each of its prompts; as it is where its own are no envelope, which SGLang
    refuses."""
    if isinstance(obj, EmbeddingReqInput):
        return obj

    def mark(hints: Any) -> KvHintsEnvelope:
        return with_action(decode_kv_hints_envelope(hints) if hints else None, action_type, payload)

    hints = obj.kv_hints
    with contextlib.suppress(ValueError):
        obj.kv_hints = [mark(one) for one in hints] if isinstance(hints, list) else mark(hints)
    return obj
