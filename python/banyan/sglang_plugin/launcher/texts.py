# SPDX-License-Identifier: Apache-2.0
"""Texts of clients that SGLang's main process would run, or look at for years, while everybody waits."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.runtime_context import get_serving

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest

MOST_ARGUMENTS = 16
"""The pattern by which SGLang looks for calls takes twice as long for each more where it finds none."""


def before_template(serving: Any, asked: Any, *args: Any, **named: Any) -> None:
    """Of a chat, whichever route it came by, or the arguments of a decision's: SGLang asks on one route.

    Raises:
        BadRequest: for a template of the client's own where the server does not trust them.
    """
    if runtime.config() is None or get_serving().trust_request_chat_template:
        return
    if "chat_template" in (getattr(asked, "chat_template_kwargs", asked) or ()):
        raise BadRequest("chat_template: this server takes no templates of clients (--trust-request-chat-template)")


def around_search(original: Callable[..., Any], detector: Any, text: str, *tools: Any) -> Any:
    """Whether there are calls in a text, or what is left of it and the calls."""
    if runtime.config() is None or not _takes_years(text):
        return original(detector, text, *tools)
    return StreamingParseResult(normal_text=text, calls=[]) if tools else False


def _takes_years(text: str) -> bool:
    """Whether there is no list of calls in it, and much that looks like arguments. Where the list ends behind a call,
    SGLang's pattern is through at once."""
    if text.count("=") <= MOST_ARGUMENTS:
        return False
    calls = text[text.find("[") : text.rfind("]") + 1] if "[" in text else ""
    try:
        tree = ast.parse(calls)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    found = getattr(tree.body[0], "value", None) if len(tree.body) == 1 else None
    is_list = isinstance(found, ast.List) and all(isinstance(one, ast.Call) for one in found.elts)
    return not (is_list and calls[:-1].rstrip().endswith(")"))
