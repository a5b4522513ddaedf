# SPDX-License-Identifier: Apache-2.0
"""Commands for the cache on their way to all ranks, in the process that a client reaches.

They take the way of SGLang's own command with a free body, and every rank answers. What one rank refuses to keep is
taken back at the others.

Invariants
  1. One command is under way at a time, to its last answer, whether whoever asked still waits or not. SGLang knows
     answers by nothing but their order: those that nobody waited for would be taken for the next command's.
  2. Whoever waits for an answer waits no longer than he has said, whatever the ranks do, and for one wish of his
     tenant's at most.
  3. No more than ``MOST_WAITING`` commands wait, and of one tenant half as many. A tenant's go one by one before they
     ask for their turn: nobody waits for more than one of another's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from sglang.srt.managers.io_struct import DumperControlReqInput

from banyan.features.told.command import METHOD, Action, Command
from banyan.features.told.table import Refused
from banyan.routing.tenant_secret import SALT_CHARS
from banyan.sglang_plugin import prompt_refusals

TIMEOUT_S = 60.0
"""Whoever asks for an answer waits so long. A rank answers between two steps."""

MOST_WAITING = 256
"""Commands that somebody waits for in this process, each with its prompt."""

_waiting: Counter[str] = Counter()
"""Of each tenant that has one."""

_turns_of_tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
_turns_to_wish: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

_num_untold = 0
"""Wishes that were passed over since the last command that was told."""


def pass_over() -> None:
    """Count a wish that is not told, or that the ranks refuse; they hear of it with the next command."""
    global _num_untold
    _num_untold += 1


class Busy(Refused):
    """Too many commands wait: nothing was told."""


class Unanswered(Refused):
    """It was told, and what becomes of it is not known."""


def check(command: Command, manager: Any) -> None:
    """Whether a prompt of the served model could be meant.

    Raises:
        ValueError: naming the field.
    """
    if command.input_ids:
        prompt_refusals.check_ids(command.input_ids, manager.model_config.vocab_size)
    if len(command.input_ids) > manager.context_len:
        raise ValueError(f"input_ids: {len(command.input_ids)} tokens, the model takes {manager.context_len} at most")


def deadline_s(wait_s: float) -> float:
    """Until when somebody who waits so long from now on waits, by the clock of the event loop."""
    return asyncio.get_running_loop().time() + wait_s


def tenant_of(said: Any) -> str:
    """Whose a command is, or a request, as far as it says so."""
    return (said.cache_salt or said.extra_key or "")[:SALT_CHARS]


async def tell(manager: Any, command: Command, until_s: float) -> dict[str, Any]:
    """Tell all ranks. What the first of them answers, of those that have found most. ``until_s``: the ``deadline_s`` of
    whoever tells it.

    Raises:
        Busy: when too many commands wait already.
        Unanswered: when they have been told and do not answer.
        Refused: with the line of a rank that refuses, or when its turn does not come.
    """
    turn, tenant = _turn_at(manager), tenant_of(command)
    if _waiting.total() >= MOST_WAITING or _waiting[tenant] >= MOST_WAITING // 2:
        raise Busy(f"{_waiting.total()} commands wait for the ranks, {_waiting[tenant]} of this tenant's: try later")
    _waiting[tenant] += 1
    telling: asyncio.Future[dict[str, Any]] | None = None
    try:
        async with asyncio.timeout_at(until_s), _turns_of_tenants.setdefault(tenant, asyncio.Lock()):
            await turn.acquire()
            telling = asyncio.ensure_future(_tell(manager, command))
            telling.add_done_callback(lambda told: _is_over(told, turn))
            return await asyncio.shield(telling)
    except TimeoutError:
        line = f"the ranks have not answered within {TIMEOUT_S:g} s"
        if telling is None:
            raise Refused(f"{line} what came before: this was not told") from None
        raise Unanswered(f"{line}, and may still do it") from None
    finally:
        _waiting[tenant] -= 1
        if not _waiting[tenant]:
            del _waiting[tenant]


async def wish(manager: Any, command: Command) -> None:
    """As ``tell``, where nobody asks what becomes of it. A tenant's wishes go one by one, before they ask for their
    turn."""
    try:
        async with _turns_to_wish.setdefault(tenant_of(command), asyncio.Lock()):
            await tell(manager, command, deadline_s(TIMEOUT_S))
    except Unanswered:
        pass
    except Refused:
        pass_over()


def _turn_at(manager: Any) -> asyncio.Lock:
    turn: asyncio.Lock | None = getattr(manager, "banyan_turn_to_tell", None)
    if turn is None:
        turn = manager.banyan_turn_to_tell = asyncio.Lock()
    return turn


def _is_over(told: asyncio.Future[dict[str, Any]], turn: asyncio.Lock) -> None:
    turn.release()
    if not told.cancelled():
        # Read, so that a refusal which nobody waits for is no error in the log.
        told.exception()


async def _tell(manager: Any, command: Command) -> dict[str, Any]:
    global _num_untold
    command = msgspec.structs.replace(command, name=secrets.token_hex(8), num_untold=_num_untold)
    _num_untold = 0
    answers = await _ask(manager, command)
    refusals = [answer.error for answer in answers if not answer.success]
    # A rank that has stopped to share says nothing, and the others serve on without it.
    said: list[dict[str, Any]] = [answer.response[0] for answer in answers if answer.success and answer.response[0]]
    if not refusals and said:
        # What a rank has stored, others hear of a moment later: who knows least says nothing of what is there.
        return max(said, key=lambda one: one.get("num_pages_found", 0))
    if said and command.action in (Action.PIN, Action.RETAIN):
        released = msgspec.structs.replace(command, action=Action.RELEASE, takes_back=command.name, num_untold=0)
        await _ask(manager, released)
    raise Refused(refusals[0] if refusals else "no rank of this server shares any more: its log says why")


async def _ask(manager: Any, command: Command) -> list[Any]:
    manager.auto_create_handle_loop()
    answers: list[Any] = await manager.dumper_control(DumperControlReqInput(method=METHOD, body=command.body()))
    return answers
