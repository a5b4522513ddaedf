# SPDX-License-Identifier: Apache-2.0
"""Texts of clients that SGLang's main process would run, or look at for years, while everybody waits."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.runtime_context import get_serving

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.prompt_refusals import BadRequest

MOST_ARGUMENTS = 16
"""The pattern by which SGLang looks for calls takes twice as long for each more, whether it finds one or none."""

EVERYTHING = re.compile(".+", re.DOTALL)
"""In its place, for a text that is a list of calls."""

MOST_BRACKETS, MOST_CHARACTERS = 8, 1 << 16
"""Of a text with more arguments: each of the first that open is tried with each of the last that close."""


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
    if runtime.config() is None or text.count("=") <= MOST_ARGUMENTS:
        return original(detector, text, *tools)
    # As SGLang cleans it.
    text = text.strip().replace("<|python_start|>", "").replace("<|python_end|>", "")
    found = _calls_in(text)
    if found is None:
        return StreamingParseResult(normal_text=text, calls=[]) if tools else False
    if not tools:
        return True
    detector = copy.copy(detector)
    detector.tool_call_regex = EVERYTHING
    result = original(detector, text[found], *tools)
    result.normal_text = text[: found.start] + result.normal_text + text[found.stop :]
    return result


def _calls_in(text: str) -> slice | None:
    """Where a list of calls stands, the longest that begins first."""
    begins = [place.start() for place in re.finditer(r"\[", text)][:MOST_BRACKETS]
    ends = [place.end() for place in re.finditer(r"\)\s*\]", text)][-MOST_BRACKETS:]
    for begin in begins if len(text) <= MOST_CHARACTERS else ():
        for end in reversed(ends):
            if end > begin and _is_list_of_calls(text[begin:end]):
                return slice(begin, end)
    return None


def _is_list_of_calls(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found = getattr(tree.body[0], "value", None) if len(tree.body) == 1 else None
    # As in SGLang's pattern, where each argument has a name.
    return isinstance(found, ast.List) and all(isinstance(one, ast.Call) and not one.args for one in found.elts)
