# SPDX-License-Identifier: Apache-2.0
"""A request for a pair of servers: both get it, the decode server's answer is the answer.

Invariants
  1. Every attempt has a room of its own.
  2. When one half ends without an answer the other is ended at once: nobody waits for somebody who is gone.
  3. A place at a prefill server is released when that server has answered, or the attempt has ended.

States of an attempt: both halves are sent -> the prefill half has handed over (its answer is dropped) -> the decode
half answers, to its end; or one half has failed -> both are closed. The prefill half's reason counts, if it gave one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import aiohttp

from banyan.core import LOAD_FAILED
from banyan.features.pairs.rendezvous import ROOM_BITS, Rendezvous, address, broken_with, choose_room
from banyan.planner import Action
from banyan.router.asked_prompt import Asked
from banyan.router.bodies import Refused
from banyan.router.fleet import Fleet, Place, Server
from banyan.router.forward import Forwarder, Sent, SentRequest
from banyan.router.held_responses import HeldResponses
from banyan.router.metrics import Metrics
from banyan.router.read_path import ReadPath, read_path
from banyan.router.settings import Settings
from banyan.router.suspects import Suspects
from banyan.router.upstream import Attempt, Lost
from banyan.router.verdict import RETRYABLE_STATUSES, Outcome, Tried
from banyan.routing.headers import PLAN_HEADER, READ_HEADER

VERDICT_S = 1.0
"""A decode server may hear that its prefill failed before the router does: how long to wait for the reason."""

LEFT_S = 5.0
"""A prefill server that has handed over says so soon after."""

MAX_ERROR_BYTES = 300


@dataclass(eq=False)
class _Half:
    """A prefill server's part in an attempt. ``is_refusal``: its answer is meant for the client.
    ``no_room``: the router has none for its answer."""

    place: Place
    attempt: Attempt
    path: ReadPath | None = None
    task: asyncio.Task[None] | None = None
    failure: Tried | None = None
    is_refusal: bool = False
    no_room: Refused | None = None


class PairForwarder(Forwarder):
    """Brings requests to pairs. A place is one at a decode server, with one at a prefill server beside it."""

    def __init__(
        self,
        prefills: Fleet,
        decodes: Fleet,
        settings: Settings,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        suspects: Suspects[Server],
        responses: HeldResponses,
    ) -> None:
        super().__init__(decodes, settings, session, metrics, suspects, responses)
        self._prefills = prefills
        self._halves: set[asyncio.Task[None]] = set()

    @property
    def _servers(self) -> list[Server]:
        return [*self._prefills.servers, *self._fleet.servers]

    def _take(self, asked: Asked, avoid: Collection[str]) -> Place | None:
        if not self._fleet.active(avoid, asked.held_at):
            return None
        seen_tokens = self._prefills.seen_tokens(asked)
        prefill = self._prefills.take(asked, avoid)
        if prefill is None:
            return None
        try:
            place = self._fleet.take(asked, avoid)
            assert place is not None
        except Exception:
            self._prefills.release(prefill)
            raise
        place.beside, place.seen_tokens = prefill, seen_tokens
        return place

    def _has_others(self, tried: Collection[str]) -> bool:
        # When one server of a pair refuses, the other has begun.
        return False

    def _asks_again(self, asked: Asked) -> bool:
        return True

    def _release(self, place: Place) -> None:
        if place.beside is not None:
            self._prefills.release(place.beside)
        super()._release(place)

    async def _open(self, sent: Sent, going: SentRequest, tried: Sequence[Tried]) -> Tried | None:
        assert sent.place.beside is not None
        half = _Half(sent.place.beside, self._attempt(going.call), self._read_path(sent, going, tried))
        self._metrics.placed(half.place, going.call.tenant)
        self._metrics.chosen(sent.place)
        going = _in_a_room(self._with_source(going, half.place, tried), half, tried)
        self._begin(half, sent, going)
        target = sent.place.target
        failure = await self._send(target.server, sent.attempt, going, rank=target.rank)
        if failure is not None and half.no_room is not None:
            raise half.no_room
        broken = _broken_with(sent.attempt)
        if failure is None and broken:
            failure = _failed(sent.place, sent.attempt)
            if broken in RETRYABLE_STATUSES or LOAD_FAILED in failure.error:
                # The decode server speaks for itself, and its prefill server would wait for it.
                return failure
            if not await _settle(half):
                return replace(failure, beside=half.place.target.server.url)
            if half.failure is not None:
                half.failure = replace(half.failure, beside=target.server.url)
        elif failure is None or failure.outcome is not Outcome.LOST:
            return failure
        if half.failure is None and not half.is_refusal:
            return failure
        # What the prefill server says is the reason; the decode server only heard of it.
        sent.attempt.close()
        sent.place.target.server.in_flight.pop(id(sent.attempt), None)
        sent.attempt = half.attempt
        return half.failure

    def _read_path(self, sent: Sent, going: SentRequest, tried: Sequence[Tried]) -> ReadPath | None:
        """Who reads what of the prompt. A further attempt is not made to depend on more servers than it needs."""
        prefill, seen_tokens = sent.place.beside, sent.place.seen_tokens
        if not self._settings.dual_path or tried or prefill is None:
            return None
        start = self._prefills.tokens_in_memory(prefill, going.asked)
        path = read_path(prefill.target.server, sent.place.target.server, start=start, end=seen_tokens)
        self._metrics.reads(path)
        return path

    # ---- the prefill half --------------------------------------------------------------------------------------

    def _begin(self, half: _Half, sent: Sent, going: SentRequest) -> None:
        decode = sent.attempt

        def fail(why: str) -> None:
            # Later, the decode server has all that it needs.
            if not decode.has_begun:
                decode.give_up(why)

        def ended(outcome: Outcome) -> None:
            if half.path is not None:
                half.path.release()
            assert half.task is not None
            if outcome is not Outcome.ANSWERED or decode.status >= 400:
                half.task.cancel()
            else:
                # It only has to say that it has handed over. If the answer was a refusal, it waits for nobody.
                asyncio.get_running_loop().call_later(LEFT_S, half.task.cancel)

        half.task = asyncio.get_running_loop().create_task(self._run(half, going, fail))
        self._halves.add(half.task)
        half.task.add_done_callback(self._halves.discard)
        sent.others.append(ended)

    async def _run(self, half: _Half, going: SentRequest, fail: Callable[[str], None]) -> None:
        server, attempt = half.place.target.server, half.attempt
        outcome = Outcome.LEFT
        try:
            # The room says which rank it is to be.
            failure = await self._send(server, attempt, going, rank=None)
            if failure is not None and failure.outcome is Outcome.REFUSED:
                failure = _failed(half.place, attempt)
            half.failure = failure or await _rest(half)
            outcome = half.failure.outcome if half.failure is not None else Outcome.ANSWERED
            half.is_refusal = half.failure is None and attempt.status >= 400
            if half.failure is not None:
                fail(f"its prefill server failed: {half.failure.error}")
            elif half.is_refusal:
                fail(f"its prefill server refuses: HTTP {attempt.status}")
        except Refused as why:
            half.no_room = why
            fail(why.message)
        finally:
            attempt.close()
            server.in_flight.pop(id(attempt), None)
            self._metrics.ended(server.url, outcome)
            self._prefills.release(half.place)
            if half.path is not None:
                half.path.release()
            self.admission.wake()


def _in_a_room(going: SentRequest, half: _Half, tried: Sequence[Tried]) -> SentRequest:
    """The request as both servers get it."""
    target = half.place.target
    description = target.server.description
    room = choose_room(secrets.randbits(ROOM_BITS), num_ranks=description.num_ranks, rank=target.rank)
    host = urlsplit(target.server.url).hostname or ""
    rendezvous = Rendezvous(f"[{host}]" if ":" in host else host, description.bootstrap_port, room)
    headers = dict(going.headers)
    if half.path is not None and half.path.hint is not None:
        headers[READ_HEADER] = half.path.hint.text()
    if any(LOAD_FAILED in one.error for one in tried):
        headers = {**headers, PLAN_HEADER: Action.COMPUTE.value}
    return replace(going, body=address(going.body, rendezvous), headers=headers)


async def _rest(half: _Half) -> Tried | None:
    """Read a prefill server's answer to its end; why it is none."""
    attempt, url = half.attempt, half.place.target.server.url
    if _broken_with(attempt):
        return _failed(half.place, attempt)
    try:
        while attempt.is_stream and await attempt.read():
            pass
    except Lost as error:
        return Tried(url, Outcome.LOST, str(error))
    return None


async def _settle(half: _Half) -> bool:
    """Wait a little for the prefill half to end by itself; whether it has."""
    assert half.task is not None
    ended, _ = await asyncio.wait((half.task,), timeout=VERDICT_S)
    return bool(ended)


def _broken_with(attempt: Attempt) -> int:
    return broken_with(attempt.status, attempt.first, is_stream=attempt.is_stream)


def _failed(place: Place, attempt: Attempt) -> Tried:
    """An answer that says that there is none. Of a stream nothing can be passed on: its first event is the end."""
    outcome = Outcome.LOST if attempt.is_stream else Outcome.REFUSED
    # A client's words may stand before the reason.
    start = max(0, attempt.first.find(LOAD_FAILED.encode()))
    said = attempt.first[start : start + MAX_ERROR_BYTES].decode(errors="replace")
    return Tried(place.target.server.url, outcome, f"HTTP {attempt.status}: {said}")
