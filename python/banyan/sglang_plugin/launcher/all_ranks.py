# SPDX-License-Identifier: Apache-2.0
"""What SGLang answers to a command for all ranks (flush, profile, weights, adapters): the worst of their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from banyan.sglang_plugin import runtime


async def around_communicator_call(
    original: Callable[..., Awaitable[list[Any]]], communicator: Any, obj: Any
) -> list[Any]:
    """The ranks' answers, those that refuse first: of most commands SGLang looks at the first one alone."""
    answers = await original(communicator, obj)
    if runtime.is_sharing():
        answers.sort(key=lambda answer: bool(getattr(answer, "success", True)))
    return answers
