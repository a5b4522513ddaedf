# SPDX-License-Identifier: Apache-2.0
"""Every hook on a server that was started without ``--enable-banyan``: SGLang is asked as ever, what it says is what is
answered, and nothing of its own is changed."""

import asyncio
import inspect
import pkgutil
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server

from banyan import patches
from banyan.features.told.rank import told_rank
from banyan.sglang_plugin import hook_queue, runtime
from banyan.sglang_plugin.launcher import all_ranks, ending

DECIDE = {"10-add-flags", "11-take-flags", "12-resolve-flags"}
"""By these a server is started with Banyan, or without: ``launcher/test_flags.py``."""
OF_BANYANS = {"52-openai-cached-tokens", "56-arena-events"}
"""They add what a server without Banyan has none of."""

HOOKS = {
    patch.name: patch
    for patch in patches.load_queue()
    if patch.kind in hook_queue.HOOK_TYPES and patch.name not in DECIDE | OF_BANYANS
}


class Theirs:
    """What SGLang gives a hook: it may be looked at."""

    def __getattr__(self, name):
        if name.startswith(("__", "banyan_", runtime.BOOKKEEPING)):
            raise AttributeError(name)
        return Theirs()

    def get(self, name):
        """As of a table with nothing in it."""
        return None

    def __setattr__(self, name, value):
        raise AssertionError(f"{name} was changed")

    def __call__(self, *args, **named):
        raise AssertionError("it was called")


@pytest.fixture(autouse=True)
def app(monkeypatch):
    """SGLang's own, of a stock server."""
    monkeypatch.setattr(runtime, "get_server_args", lambda: SimpleNamespace())
    # A rank of another test may have been here.
    monkeypatch.setattr(told_rank, "installed", lambda: None)
    monkeypatch.setattr(http_server, "app", FastAPI())
    return http_server.app


def arguments_of(hook):
    parameters = list(inspect.signature(hook).parameters.values())
    given = [Theirs() for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    return given, {one.name: Theirs() for one in parameters if one.kind is one.KEYWORD_ONLY}


def asked_and_answered(hook, given, named):
    """What an ``around`` hook asks SGLang, as often as it does, and what it answers."""
    asked, answer = [], Theirs()

    def original(*args, **kwargs):
        asked.append((args, kwargs))
        return answer

    async def awaited(*args, **kwargs):
        return original(*args, **kwargs)

    async def streamed(*args, **kwargs):
        yield original(*args, **kwargs)

    async def first(stream):
        return [one async for one in stream]

    if inspect.isasyncgenfunction(hook):
        (answered,) = asyncio.run(first(hook(streamed, *given, **named)))
    elif inspect.iscoroutinefunction(hook):
        answered = asyncio.run(hook(awaited, *given, **named))
    else:
        answered = hook(original, *given, **named)
    return asked, answered, answer


@pytest.mark.parametrize("name", HOOKS)
def test_hook_when_the_server_is_stock_then_it_passes_through(name, app):
    hook = pkgutil.resolve_name(HOOKS[name].hook)
    given, named = arguments_of(hook)
    if HOOKS[name].kind == "around":
        asked, answered, answer = asked_and_answered(hook, given[1:], named)
        assert asked == [(tuple(given[1:]), named)]
        # Of functions without an answer there is none to pass on.
        assert answered in (answer, None)
    else:
        assert hook(*given, **named) in (None, given[0] if HOOKS[name].kind == "after" else None)
    assert not app.user_middleware and len(app.routes) == len(FastAPI().routes)


def test_prompt_when_a_stock_server_was_told_to_end_then_sglang_decides():
    ending.refuse_beside_http(None, SimpleNamespace(gracefully_exit=True))


def test_command_when_a_stock_server_is_asked_then_it_is_awaited_by_nobody_else():
    async def original(manager):
        return len(all_ranks._under_way)

    assert asyncio.run(all_ranks.around_awaited(original, None)) == 0
