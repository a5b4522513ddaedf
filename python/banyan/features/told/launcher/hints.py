# SPDX-License-Identifier: Apache-2.0
"""What requests tell the cache: actions of SGLang's ``kv_hints``, and ``cache_control`` of Messages.

An action is about the request's own prompt, or about the one whose tokens it names; in either case it is of the
request's tenant. It is done before the request goes to a rank. A pin that is refused fails its request. The other
actions are wishes: what of them cannot be done, or not soon, is passed over and counted. ``cache_control`` is a wish
that nobody waits for, and what is over the budget is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from banyan.features.told.cache_control import ttl_s_of
from banyan.features.told.command import ACTION_VERSION, MAX_TEXT, Action, Command
from banyan.features.told.launcher import telling_ranks
from banyan.features.told.launcher.telling_ranks import Unanswered, check, deadline_s, pass_over, tell, tenant_of, wish
from banyan.features.told.table import Refused
from banyan.routing.conversation import name_of
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.launcher.prompt_tokens import is_only_asked_about
from banyan.sglang_plugin.launcher.rerun import UNDER_WAY
from banyan.sglang_plugin.prompt_refusals import BadRequest

ACTIONS = frozenset(Action) - {Action.LIST}
WISHES_WAIT_S = 1.0
"""A request waits no longer for all that it says of its prompts but pins. Ranks answer between two steps, and a step
that computes a long prompt takes seconds: what they were told is done all the same, what waits for its turn is passed
over."""
ABORT_LOOK_PERIOD_S = 0.01
MOST_WISHES = 64
"""Of ``cache_control``, on their way to the ranks at once, and of one tenant half as many. What comes on top is not
told, but counted."""

_deadlines: ContextVar[tuple[object, float, float] | None] = ContextVar("banyan_told_deadlines", default=None)
"""A request, and until when it waits with all its prompts: for pins, and for wishes."""
_ttl_s: ContextVar[float | None] = ContextVar("banyan_cache_control_ttl", default=None)
_wishes: dict[asyncio.Task[None], str] = {}
"""With the tenant of each."""
_telling: set[str] = set()
"""Ids of requests that wait while ranks are told what they say."""


async def around_handle_messages(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any, *args: Any, **named: Any
) -> Any:
    """SGLang drops ``cache_control`` when it reads a request: note what it says."""
    if runtime.is_sharing():
        # It has read the body, and keeps it.
        fields = await raw_request.json()
        _ttl_s.set(ttl_s_of(fields) if isinstance(fields, dict) else None)
    return await original(serving, request, raw_request, *args, **named)


async def around_tokenize_one_request(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    """A request's tokens are known: tell the ranks what it says of them.

    Raises:
        BadRequest: for a malformed action, and where a rank refuses a pin.
    """
    tokenized = await original(manager, obj)
    if not runtime.is_sharing() or is_only_asked_about():
        return tokenized
    said = list(_said(obj))
    if said:
        _telling.add(obj.rid)
        try:
            await _tell_in_turn(said, tokenized, manager)
        finally:
            _telling.discard(obj.rid)
        _heed_abort(obj.rid, manager)
    ttl_s = _ttl_s.get()
    if ttl_s is not None and _is_known_by_tokens(tokenized):
        _wish(ttl_s, tokenized, manager)
    return tokenized


def before_abort_request(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """An abort of all means those that wait here, too. SGLang marks none, and no rank knows them yet."""
    if abort_all:
        for state in map(manager.rid_to_state.get, _telling):
            if state is not None:
                state.abort_sent = True


async def _tell_in_turn(said: Sequence[tuple[str, dict[str, Any]]], tokenized: Any, manager: Any) -> None:
    known = _deadlines.get()
    if known is None or known[0] is not UNDER_WAY.get():
        known = UNDER_WAY.get(), deadline_s(telling_ranks.TIMEOUT_S), deadline_s(WISHES_WAIT_S)
        _deadlines.set(known)
    _, pins_until_s, wishes_until_s = known
    for action, payload in said:
        is_pin = action == Action.PIN
        try:
            command = _command(action, payload, tokenized, manager)
            await tell(manager, command, pins_until_s if is_pin else wishes_until_s)
        except ValueError as error:
            if is_pin or not isinstance(error, Refused):
                raise BadRequest(f"kv_hints: {action}: {error}") from error
            if not isinstance(error, Unanswered):
                pass_over()


def _heed_abort(rid: str, manager: Any) -> None:
    """An abort that came meanwhile has gone to ranks that did not know the request, and SGLang sends no second one:
    have it sent behind the request, so that its rank ends it."""
    state = manager.rid_to_state.get(rid)
    if state is not None and state.abort_sent:
        _abort_once_sent(rid, state, manager)


def _abort_once_sent(rid: str, state: Any, manager: Any) -> None:
    if manager.rid_to_state.get(rid) is not state:
        return
    if not state.dispatched:
        asyncio.get_running_loop().call_later(ABORT_LOOK_PERIOD_S, _abort_once_sent, rid, state, manager)
        return
    state.abort_sent = False
    manager.abort_request(rid)


def _wish(ttl_s: float, tokenized: Any, manager: Any) -> None:
    tenant = tenant_of(tokenized)
    num_of_tenant = list(_wishes.values()).count(tenant)
    if len(_wishes) >= MOST_WISHES or num_of_tenant >= MOST_WISHES // 2:
        pass_over()
        return
    try:
        command = _command(Action.RETAIN, {"ttl_s": ttl_s}, tokenized, manager)
    except ValueError:
        pass_over()
        return
    task = asyncio.ensure_future(wish(manager, command))
    _wishes[task] = tenant
    task.add_done_callback(_wishes.pop)


def _said(obj: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    hints = getattr(obj, "kv_hints", None)
    # Those of several prompts are taken apart by SGLang before.
    for action in getattr(hints, "actions", ()):
        if action.action_type in ACTIONS and action.action_version == ACTION_VERSION:
            yield action.action_type, action.payload


def _command(action: str, payload: dict[str, Any], tokenized: Any, manager: Any) -> Command:
    if not set(payload) <= {"ttl_s", "input_ids"}:
        raise ValueError("what it may say is ttl_s and input_ids")
    is_own = payload.get("input_ids") is None
    if is_own and not _is_known_by_tokens(tokenized):
        raise ValueError(
            "a prompt for a LoRA adapter, of session_params, or with images and the like is not known by its tokens"
        )
    if max(len(tokenized.cache_salt or ""), len(tokenized.extra_key or "")) > MAX_TEXT:
        # Requests may have longer ones, and are served.
        raise Refused(f"cache_salt, extra_key: the cache is told of those with {MAX_TEXT} characters at most")
    command = Command.of(
        {
            **payload,
            "action": action,
            "input_ids": list(tokenized.input_ids) if is_own else payload["input_ids"],
            "cache_salt": tokenized.cache_salt,
            "extra_key": tokenized.extra_key,
            "session": _session_of(tokenized),
        }
    )
    check(command, manager)
    return command


def _session_of(tokenized: Any) -> str | None:
    """The name of the session that SGLang is to close, of a request for it; None where it has none."""
    params = getattr(tokenized, "session_params", None)
    of_params = params.get("id") if isinstance(params, dict) else getattr(params, "id", None)
    said = getattr(tokenized, "session_id", None) or of_params
    return name_of(said) if isinstance(said, str) and said else None


def _is_known_by_tokens(tokenized: Any) -> bool:
    """Whether tokens, salt and extra key name the prompt's pages. What a session's turn continues, its rank knows."""
    beside = ("mm_inputs", "lora_id", "session_params", "positional_embed_overrides")
    has_more = any(getattr(tokenized, field, None) is not None for field in beside)
    return not has_more and tokenized.input_ids is not None
