# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode servers that meet in rooms, as SGLang's do."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict

from starlette.responses import JSONResponse, Response, StreamingResponse
from test.unit.router.fake_server import FakeServer

TRANSFER_FAILED = "Decode transfer failed"
REFUSED = "not here"


class Rooms:
    """What has been handed over, by room: True, or False where the prefill was given up."""

    def __init__(self):
        self._outcomes = defaultdict(lambda: asyncio.get_running_loop().create_future())

    def conclude(self, room, outcome):
        if not self._outcomes[room].done():
            self._outcomes[room].set_result(outcome)

    async def outcome(self, room):
        return await asyncio.shield(self._outcomes[room])


async def unless_gone(request, step):
    """The result of ``step``, or None when the client went away first: as SGLang, which aborts then."""
    work, gone = asyncio.ensure_future(step), asyncio.ensure_future(request.receive())
    await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    result = work.result() if work.done() else None
    work.cancel()
    gone.cancel()
    await asyncio.gather(work, gone, return_exceptions=True)
    return result


class FakePrefill(FakeServer):
    """Hands over at once while ``hands_over``; a status of 400 and more is its answer instead. ``tells`` decode servers
    of that, as Banyan does."""

    def __init__(self, name, rooms, *, tells=True, **more):
        super().__init__(name, mode="prefill", **more)
        self.rooms, self.tells = rooms, tells
        self.hands_over = asyncio.Event()
        self.hands_over.set()
        self.answers = []

    async def generate(self, request):
        body = json.loads(await request.body())
        self.seen.append((body, dict(request.headers)))
        await self.awake.wait()
        status, detail = self.answers.pop(0) if self.answers else (self.status, "refused")
        if status != 200:
            if self.tells:
                self.rooms.conclude(body["bootstrap_room"], False)
            return JSONResponse({"detail": detail}, status)
        if not await unless_gone(request, self.hands_over.wait()):
            return Response(status_code=499)
        self.rooms.conclude(body["bootstrap_room"], True)
        if body.get("stream"):
            return StreamingResponse(self.pieces(), media_type="text/event-stream")
        return JSONResponse({"text": "first"})


class FakeDecode(FakeServer):
    """Answers when its room was handed over; says that it failed when it was not. ``refuses``: a status that it answers
    at once instead, in a stream by its first event. ``failures``: its words, with status 500, at the next."""

    refuses = 0

    def __init__(self, name, rooms, **more):
        super().__init__(name, mode="decode", **more)
        self.rooms, self.failures = rooms, []

    async def generate(self, request):
        body = json.loads(await request.body())
        if body.get("stream"):
            self.seen.append((body, dict(request.headers)))
            return StreamingResponse(self.stream(body), media_type="text/event-stream")
        if self.refuses or self.failures:
            self.seen.append((body, dict(request.headers)))
            return JSONResponse({"detail": self.failures.pop(0) if self.failures else REFUSED}, self.refuses or 500)
        self.num_running += 1
        try:
            outcome = await unless_gone(request, self.rooms.outcome(body["bootstrap_room"]))
            if outcome is None:
                return Response(status_code=499)
            if not outcome:
                self.seen.append((body, dict(request.headers)))
                return JSONResponse({"detail": TRANSFER_FAILED}, 500)
        finally:
            self.num_running -= 1
        return await super().generate(request)

    async def stream(self, body):
        if self.refuses:
            yield aborted(REFUSED, self.refuses)
        elif self.failures:
            yield aborted(self.failures.pop(0), 500)
        elif await self.rooms.outcome(body["bootstrap_room"]):
            async for piece in self.pieces():
                yield piece
            return
        else:
            yield aborted(TRANSFER_FAILED, 500)
        yield b"data: [DONE]\n\n"


def aborted(message, status):
    """An event of a stream."""
    reason = {"type": "abort", "message": message, "status_code": status}
    return f"data: {json.dumps({'text': '', 'meta_info': {'finish_reason': reason}})}\n\n".encode()
