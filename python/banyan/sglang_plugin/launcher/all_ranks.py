# SPDX-License-Identifier: Apache-2.0
"""What SGLang answers to a command for all ranks (flush, profile, weights, adapters, memory): the worst of their
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest


async def around_communicator_call(
    original: Callable[..., Awaitable[list[Any]]], communicator: Any, obj: Any
) -> list[Any]:
    """The ranks' answers, those that refuse first: of most commands SGLang looks at the first one alone.

    A command goes on to its last answer also when who asked has gone: SGLang would take what comes late for answers to
    the next command.

    Raises:
        BadRequest: where a rank has refused to give its memory away, with its line.
    """
    answers = await asyncio.shield(asyncio.ensure_future(original(communicator, obj)))
    for answer in answers:
        if isinstance(answer, ReleaseMemoryOccupationReqOutput) and answer.rid is not None:
            raise BadRequest(answer.rid)
    if runtime.is_sharing():
        answers.sort(key=lambda answer: bool(getattr(answer, "success", True)))
    return answers
