# SPDX-License-Identifier: Apache-2.0
"""From a request to an answer: wait for a place, try a server, try another, or say why there is no answer.

Invariants
  1. Every request gets an answer: a server's, or an error that lists what was tried.
  2. After the first byte has been passed on there is no other attempt; a stream that breaks ends with an error event.
  3. A place is released exactly when its attempt is closed, whoever went away first.
  4. A request that was lost together with its server goes to another one only where ``Suspects`` lets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import aiohttp
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from banyan.router.answers import error
from banyan.router.asked_prompt import Asked
from banyan.router.bodies import Refused
from banyan.router.call import Call, owner_of
from banyan.router.fleet import Fleet, Place, Server
from banyan.router.forms import error_event
from banyan.router.held_responses import HeldResponses
from banyan.router.metrics import Metrics
from banyan.router.paths import RESPONSES, By, Form
from banyan.router.probes import nobody_listens
from banyan.router.prompt import opened_session, pin, renamed
from banyan.router.settings import Settings
from banyan.router.sources import source_of
from banyan.router.suspects import WHY_HELD, Held, Suspect, Suspects
from banyan.router.upstream import Attempt, Lost, Unreached, at
from banyan.router.verdict import (
    RETRYABLE_STATUSES,
    Outcome,
    Tried,
    account,
    may_retry,
    retry_after_s,
)
from banyan.router.waiting import Admission, QueueFull, Rate, WaitedTooLong
from banyan.routing.headers import SOURCE_HEADER

logger = logging.getLogger("banyan.router")


@dataclass(frozen=True)
class SentRequest:
    """A request as it is passed on. ``sent_to``: servers that may still know it."""

    call: Call
    asked: Asked
    body: bytes
    headers: Mapping[str, str]
    suspect: Suspect
    sent_to: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Sent:
    """A place, and the attempt that uses it. ``others`` are told when it ends: attempts that have a part in it."""

    place: Place
    attempt: Attempt
    suspect: Suspect
    form: Form = Form.OPENAI
    others: list[Callable[[Outcome], None]] = field(default_factory=list)


class Forwarder:
    """Brings requests to servers. ``session`` is the caller's, and open for as long as this is used."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        suspects: Suspects[Server],
        responses: HeldResponses,
    ) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self._settings = settings
        self._session = session
        self._metrics = metrics
        self._rate = Rate()
        self._responses = responses
        self.admission: Admission[Place] = Admission(settings.max_waiting, self._release)

    async def forward(self, call: Call, asked: Asked) -> Response:
        """The answer to one request. Cancel it when the client has gone."""
        suspect = self._suspects.enters(call.body, f"{call.method} {call.target}")
        if self._suspects.is_barred(suspect):
            return self._keep(Held.AGAIN, [], call.row.form)
        going = SentRequest(call, asked, call.body, call.onward(), suspect)
        start_s = time.monotonic()
        try:
            response = await self._bring(going)
        finally:
            self._suspects.left(suspect)
        self._metrics.first_byte.observe(time.monotonic() - start_s)
        return response

    async def _bring(self, going: SentRequest) -> Response:
        tried: list[Tried] = []
        while True:
            # Of a response that it goes on from no other server knows.
            avoid = {url for one in tried for url in (one.server, one.beside) if url} - {going.asked.held_at}
            take = partial(self._take, going.asked, avoid)
            try:
                place = await self.admission.enter(take, self._settings.queue_timeout_s, going.asked.held_at)
            except QueueFull:
                said = f"{self.admission.num_waiting} requests are waiting already"
                return self._refuse(429, said, tried, going.call.row.form)
            except WaitedTooLong:
                return self._refuse(503, self._no_room(), tried, going.call.row.form)
            sent = Sent(place, self._attempt(going.call), going.suspect, going.call.row.form)
            failure = await self._try(sent, going, tried)
            if failure is None:
                self._suspects.answered(going.suspect)
                is_kept = going.asked.request.is_kept and sent.attempt.status == 200
                if going.call.row.path == RESPONSES and is_kept:
                    self._responses.made(sent.attempt.first, place.target.server.url, owner_of(going.call.tenant))
                is_opened = going.call.row.by is By.SESSION and sent.attempt.status == 200
                if is_opened and (session := opened_session(sent.attempt.first)) is not None:
                    self._fleet.opened(session, place)
                return self._relay(sent)
            tried.append(failure)
            if (held := await self._held(sent, failure)) is not None:
                return self._keep(held, tried, going.call.row.form)
            if not self._may_retry(going.asked, tried):
                # A server that refuses has said so itself, and better.
                return (
                    self._relay(sent) if failure.outcome is Outcome.REFUSED else self._fail(tried, going.call.row.form)
                )
            self._metrics.retries.inc()

    async def _held(self, sent: Sent, failure: Tried) -> Held | None:
        """Why a request that failed may go to no other server."""
        if failure.outcome is not Outcome.LOST or failure.has_begun:
            return None
        return await self._suspects.may_go_on(sent.suspect, _servers_of(sent.place), self._settings.queue_timeout_s)

    @property
    def _servers(self) -> list[Server]:
        return self._fleet.servers

    def _take(self, asked: Asked, avoid: Collection[str]) -> Place | None:
        return self._fleet.take(asked, avoid)

    def _attempt(self, call: Call) -> Attempt:
        return Attempt(self._session, call.answers, idle_timeout_s=self._settings.idle_timeout_s)

    async def _try(self, sent: Sent, going: SentRequest, tried: Sequence[Tried]) -> Tried | None:
        """One attempt; None when it gave an answer, else why not. Without an answer the place is free again."""
        try:
            failure = await self._open(sent, going, tried)
        except BaseException:
            self._end(sent, Outcome.LEFT)
            raise
        if failure is not None:
            self._end(sent, failure.outcome)
        return failure

    async def _open(self, sent: Sent, going: SentRequest, tried: Sequence[Tried]) -> Tried | None:
        self._metrics.placed(sent.place, going.call.tenant)
        target = sent.place.target
        going = self._with_source(going, sent.place, tried)
        return await self._send(target.server, sent.attempt, going, rank=target.rank)

    def _with_source(self, going: SentRequest, place: Place, tried: Sequence[Tried]) -> SentRequest:
        """The request as it goes to ``place``: with whose arenas have more of its prompt, where that is known."""
        lost = {one.server for one in tried}
        others = [server for server in self._servers if server.url not in lost]
        server, held_tokens = place.target.server, self._fleet.known_tokens(place, going.asked)
        source = source_of(server, going.asked, others, held_tokens=held_tokens)
        if source is None:
            return going
        self._metrics.told(server, source)
        return replace(going, headers={**going.headers, SOURCE_HEADER: source.text()})

    async def _send(self, server: Server, attempt: Attempt, going: SentRequest, *, rank: int | None) -> Tried | None:
        """Send a request, until the first bytes of an answer are there; else why there are none."""
        body = renamed(going.body, going.call.row.path) if server.url in going.sent_to else going.body
        going.sent_to.add(server.url)
        server.in_flight[id(attempt)] = attempt.give_up
        self._suspects.sent(going.suspect)
        if rank is not None and len(server.targets) > 1 and going.asked.request.may_pin:
            body = pin(body, rank)
        try:
            await attempt.open(at(server.url, going.call.target), body, going.headers, going.call.method)
        except Unreached as why:
            if nobody_listens(why.__cause__):
                logger.warning("%s is down: %s", server.url, why)
                server.health.refused(str(why))
            return Tried(server.url, Outcome.UNREACHED, str(why))
        except Lost as why:
            # The beginning of a whole answer: the engine had done with it.
            return Tried(server.url, Outcome.LOST, str(why), has_begun=attempt.status == 200 and not attempt.is_stream)
        if attempt.status in RETRYABLE_STATUSES:
            return Tried(server.url, Outcome.REFUSED, f"HTTP {attempt.status}")
        return None

    def _may_retry(self, asked: Asked, tried: list[Tried]) -> bool:
        free = set() if asked.held_at is not None else {Outcome.UNREACHED}
        if asked.held_at is None and self._has_others({one.server for one in tried}):
            free.add(Outcome.REFUSED)
        elif tried[-1].outcome is Outcome.REFUSED and not self._asks_again(asked):
            return False
        return may_retry(tried, max_retries=self._settings.max_retries, num_servers=len(self._servers), free=free)

    def _has_others(self, tried: Collection[str]) -> bool:
        """Whether another server can be asked, which costs those that have refused nothing."""
        return any(server.takes_requests and server.url not in tried for server in self._servers)

    def _asks_again(self, asked: Asked) -> bool:
        """Whether who has refused is asked again where there is no other."""
        return asked.held_at is not None

    def _relay(self, sent: Sent) -> Response:
        attempt = sent.attempt
        if not attempt.is_stream:
            self._end(sent, Outcome.ANSWERED)
            response = Response(attempt.first, attempt.status)
        else:
            response = _Relay(self._relayed(sent), attempt.status, partial(self._end, sent, Outcome.LEFT))
        # Together with content-length, which the response has set.
        response.raw_headers.extend(attempt.headers)
        if attempt.status in RETRYABLE_STATUSES and "retry-after" not in response.headers:
            response.headers["retry-after"] = str(self._retry_after_s())
        return response

    async def _relayed(self, sent: Sent) -> AsyncIterator[bytes]:
        """The bytes of a stream as they come; its last event says so when it broke."""
        try:
            yield sent.attempt.take_first()
            while chunk := await sent.attempt.read():
                yield chunk
        except Lost as why:
            url = sent.place.target.server.url
            self._suspects.lost(sent.suspect, _servers_of(sent.place))
            self._end(sent, Outcome.BROKEN)
            logger.warning("a stream from %s broke: %s", url, why)
            said = f"the server was lost in the middle of its answer, which is not complete: {why}"
            yield error_event(said, sent.form)
        except Refused as why:
            self._end(sent, Outcome.BROKEN)
            yield error_event(f"the answer is not complete: {why.message}", sent.form)
        else:
            self._end(sent, Outcome.ANSWERED)

    def _end(self, sent: Sent, outcome: Outcome) -> None:
        place = sent.place
        if place.is_released:
            return
        for tell in sent.others:
            tell(outcome)
        sent.attempt.close()
        place.target.server.in_flight.pop(id(sent.attempt), None)
        self._rate.happened()
        self._metrics.ended(place.target.server.url, outcome)
        self._release(place)

    def _release(self, place: Place) -> None:
        self._fleet.release(place)
        self.admission.wake()

    # ---- refusals ----------------------------------------------------------------------------------------------

    def _no_room(self) -> str:
        states = ", ".join(
            f"{server.url} {'draining' if server.is_draining else server.health.state.value}"
            for server in self._servers
        )
        return f"no server had room within {self._settings.queue_timeout_s:g} s: {states}"

    def _retry_after_s(self) -> int:
        return retry_after_s(self.admission.num_waiting, self._rate.per_s())

    def _refuse(self, status: int, message: str, tried: list[Tried], form: Form) -> Response:
        """No server was asked, or none any more: 429 or 503."""
        self._metrics.refused.labels(str(status)).inc()
        message = f"{message}; tried before: {account(tried)}" if tried else message
        kind = "queue_full" if status == 429 else "no_server"
        return error(message, kind, status, {"retry-after": str(self._retry_after_s())}, form)

    def _keep(self, held: Held, tried: list[Tried], form: Form) -> Response:
        """It was lost with a server, and goes to no other."""
        self._metrics.not_retried.labels(held.value).inc()
        logger.warning("a request goes to no other server (%s): %s", held.value, account(tried))
        message = f"{account(tried)}; {WHY_HELD[held]}" if tried else WHY_HELD[held]
        # Clients that try again by themselves would bring it to the next server.
        return error(message, "server_lost", 502, {"x-should-retry": "false"}, form)

    def _fail(self, tried: list[Tried], form: Form) -> Response:
        """Every server that was tried failed."""
        logger.warning("a request failed: %s", account(tried))
        return error(f"no server answered: {account(tried)}", "server_lost", 502, form=form)


def _servers_of(place: Place) -> list[Server]:
    return [one.target.server for one in (place, place.beside) if one is not None]


class _Relay(StreamingResponse):
    """A stream that gives its place back also when it was never begun: ``end`` is called once nobody listens."""

    def __init__(self, events: AsyncIterator[bytes], status: int, end: Callable[[], None]) -> None:
        super().__init__(events, status)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
