# SPDX-License-Identifier: Apache-2.0
"""One attempt to get an answer from one server.

States: *opening* until ``open`` returns with the first bytes (of a stream) or all of them (of anything else), then
*relaying* until ``read`` gives ``b""``, then closed. It can be told to give up, because the server is silent:
whoever waits gets ``Lost`` at once, also when the server's socket is still open and merely silent.

Owned by the request that made it; ``close`` ends the connection, with which the server aborts what it was doing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

import aiohttp
from yarl import URL

from banyan.router.bodies import Answers
from banyan.router.call import HOP_BY_HOP
from banyan.router.verdict import LINE_MARKS, MARKS, TooLong, WholeEvents
from banyan.whole_answer import next_piece, whole

T = TypeVar("T")

STREAMS: Mapping[str, Sequence[bytes]] = {"text/event-stream": MARKS, "application/x-ndjson": LINE_MARKS}
"""Answers that are passed on as they come: their type, and what ends an event."""

NOT_SENT_BACK = HOP_BY_HOP | {"content-length", "date", "server"}


def sent_back(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Headers of a server's answer as a client gets them: the bytes that came, of which aiohttp makes text."""
    return [
        (name.lower().encode(errors="surrogateescape"), value.encode(errors="surrogateescape"))
        for name, value in headers
        if name.lower() not in NOT_SENT_BACK
    ]


class Unreached(Exception):
    """No connection: the server has seen nothing of the request."""


class Lost(Exception):
    """The server had the request, and there is no (whole) answer."""


async def once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Middleware for requests to servers. When a connection breaks, aiohttp sends by itself what is idempotent (GET,
    PUT, DELETE) a second time: but the server may have died of it, and the next would seem to have seen nothing of it.

    Raises:
        Lost: which aiohttp leaves alone.
    """
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise Lost(_said(error)) from error


def at(server: str, target: str) -> URL:
    """Where a server is asked for a client's ``target``: the one place where the two come together.

    Raises:
        ValueError: when it is no path, and would lead to somebody else.
    """
    url = URL(server + target, encoded=True)
    if not target.startswith("/") or url.origin() != URL(server).origin():
        raise ValueError(f"{target!r} is no path of {server}")
    return url


class Attempt:
    """One request at one server. ``streams``: types of answers that are no whole ones; ``answers``: of whole ones."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        answers: Answers,
        *,
        idle_timeout_s: float,
        streams: Mapping[str, Sequence[bytes]] = STREAMS,
    ) -> None:
        self._session = session
        self._answers = answers
        self._idle_timeout_s = idle_timeout_s
        self._streams = streams
        self._response: aiohttp.ClientResponse | None = None
        self._events: WholeEvents | None = None
        self._waiting: asyncio.Timeout | None = None
        self._why_lost: str | None = None
        self._came_s = -math.inf
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.first = b""
        self.has_begun = False

    @property
    def is_stream(self) -> bool:
        return self._events is not None

    async def open(self, url: URL, body: bytes, headers: Mapping[str, str], method: str = "POST") -> None:
        """Send the request; return when ``status``, ``headers`` and ``first`` hold the beginning of an answer.

        Raises:
            Unreached, Lost: as their names say; the attempt is closed.
            Refused: there is no room for its answer; so it is.
        """
        try:
            data = body if body or method == "POST" else None
            request = self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False, middlewares=[once]
            )
            response = await self._wait(request)
            self._response = response
            self.status = response.status
            self.headers = sent_back(response.headers.items())
            if response.content_type in self._streams and response.status == 200:
                self._events = WholeEvents(marks=self._streams[response.content_type])
                self.first = await self.read()
            else:
                self.first = await self._wait(whole(response, coming=self._answers.come))
            self.has_begun = True
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.close()
            raise Unreached(str(error)) from error
        except aiohttp.ClientError as error:
            self.close()
            raise Lost(_said(error)) from error
        except BaseException:
            self.close()
            raise

    async def read(self) -> bytes:
        """The next whole events of a stream, ``b""`` at its end.

        Raises:
            Lost: the stream broke off.
            Refused: there is no room for an event of megabytes.
        """
        assert self._response is not None and self._events is not None
        while True:
            try:
                chunk = await self._wait(next_piece(self._response))
            except aiohttp.ClientError as error:
                raise Lost(_said(error)) from error
            if not chunk:
                return self._events.close()
            self._came_s = time.monotonic()
            try:
                events = self._events.feed(chunk)
            except TooLong as error:
                raise Lost(str(error)) from error
            if events:
                return events
            self._answers.come(len(chunk))

    def take_first(self) -> bytes:
        """What ``open`` has read, once: it may be megabytes, and the stream lasts."""
        first, self.first = self.first, b""
        return first

    def give_up(self, why: str, silent_s: float = 0.0) -> None:
        """Whoever waits for this attempt gets ``Lost``, now or when they next ask; unless more of its stream has come
        within ``silent_s``."""
        if time.monotonic() - self._came_s < silent_s:
            return
        self._why_lost = why
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Let go of the connection. After a whole answer it is used again."""
        if self._response is not None:
            if self._response.content.at_eof():
                self._response.release()
            else:
                self._response.close()

    async def _wait(self, step: Awaitable[T]) -> T:
        """``step``, unless the attempt is given up or nothing moves for too long."""
        if self._why_lost is not None:
            if asyncio.iscoroutine(step):
                step.close()
            raise Lost(self._why_lost)
        try:
            async with asyncio.timeout(self._idle_timeout_s) as self._waiting:
                return await step
        except aiohttp.ClientError:
            # Some of them are TimeoutErrors too.
            raise
        except TimeoutError as error:
            raise Lost(self._why_lost or f"nothing came for {self._idle_timeout_s:g} s") from error
        finally:
            self._waiting = None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
