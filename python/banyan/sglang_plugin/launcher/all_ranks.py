# SPDX-License-Identifier: Apache-2.0
"""What SGLang answers to a command for all ranks (flush, profile, weights, adapters, memory): the worst of their
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import HTTPException
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

from banyan import faults
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest

T = TypeVar("T")
faults.let_pass(HTTPException)
_under_way: set[asyncio.Future[Any]] = set()


def let_go() -> None:
    """The ranks have ended: who waits for their answers waits no longer."""
    for asked in list(_under_way):
        asked.cancel()


async def around_communicator_call(
    original: Callable[..., Awaitable[list[Any]]], communicator: Any, obj: Any
) -> list[Any]:
    """The ranks' answers, those that refuse first: of most commands SGLang looks at the first one alone.

    A command goes on to its last answer also when who asked has gone: SGLang would take what comes late for answers to
    the next command.

    Raises:
        BadRequest: where a rank has refused to give its memory away, with its line.
        HTTPException: where the ranks have ended.
    """
    if runtime.config() is None:
        return await original(communicator, obj)
    answers = await _while_they_live(original(communicator, obj))
    for answer in answers:
        if isinstance(answer, ReleaseMemoryOccupationReqOutput) and answer.rid is not None:
            raise BadRequest(answer.rid)
    if runtime.is_sharing():
        answers.sort(key=lambda answer: bool(getattr(answer, "success", True)))
    return answers


async def around_awaited(original: Callable[..., Awaitable[T]], manager: Any, *args: Any, **named: Any) -> T:
    """A command whose answers SGLang awaits by itself, without a communicator.

    Raises:
        HTTPException: where the ranks have ended.
    """
    answer = original(manager, *args, **named)
    return await (answer if runtime.config() is None else _while_they_live(answer))


async def _while_they_live(answer: Awaitable[T]) -> T:
    asked = asyncio.ensure_future(answer)
    _under_way.add(asked)
    asked.add_done_callback(_under_way.discard)
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:
        if not asked.cancelled():
            raise
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "this server has ended") from None
