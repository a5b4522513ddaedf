# SPDX-License-Identifier: Apache-2.0
"""One client of a server under soak: sends, reads, and judges what every kind of request has in common."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp

from benchmark.soak.expected import Known, complaint
from benchmark.soak.tally import Tally
from benchmark.sse import DONE, EventStream

ABORTED = "abort"
"""SGLang's reason for an answer that somebody has ended."""

MEANWHILE = (400, 499, 503)
"""Statuses of a request that was ended by a command to all."""


class Client:
    """Sends requests, and counts what came of them in `tally`."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, tally: Tally, known: Sequence[Known], rng: random.Random
    ) -> None:
        self.http, self.url, self.tally, self.rng = http, url, tally, rng
        self.known = [one for one in known if one.adapter is None]
        self.adapted = [one for one in known if one.adapter is not None]
        self._since_s = time.monotonic()

    def at_s(self) -> float:
        return time.monotonic() - self._since_s

    def _num_aborts_of_all(self) -> int:
        return self.tally.disturbances["abort_all"]

    def failed(self, kind: str, reason: str) -> None:
        self.tally.failed(kind, reason, self.at_s())

    async def post(self, kind: str, path: str, body: Any, allowed: Sequence[int] = (200,), **request: Any) -> Any:
        """The answer; None for a refusal that is allowed, and for what is counted as an error."""
        before = self._num_aborts_of_all()
        with self._counting_broken_connections(kind):
            async with self.http.post(self.url + path, json=body, **request) as response:
                text = await response.text()
            self.tally.answered(kind, str(response.status))
            if response.status == 200:
                return json.loads(text) if text.startswith(("{", "[", '"')) else text
            ended = response.status in MEANWHILE and self._num_aborts_of_all() > before
            if response.status not in allowed and not ended:
                self.failed(kind, f"{path} {response.status}: {text[:300]}")
        return None

    async def stream(self, kind: str, body: Mapping[str, Any], *, num_events: int | None = None) -> Any:
        """The last event of a stream; closes the connection after `num_events`, where that is given."""
        before = self._num_aborts_of_all()
        events, last, seen = EventStream(), None, 0
        status: int | None = None
        with self._counting_broken_connections(kind):
            async with self.http.post(f"{self.url}/generate", json={**body, "stream": True}) as response:
                async for chunk in response.content.iter_any():
                    for event in events.feed(chunk):
                        seen += 1
                        last = last if event.data == DONE else json.loads(event.data)
                    if num_events is not None and seen >= num_events:
                        response.close()
                        self.tally.answered(kind, "closed")
                        return None
            status = response.status
        if status is None:
            return None  # Broken, and counted.
        self.tally.answered(kind, str(status))
        if self._num_aborts_of_all() == before:
            if status != 200:
                self.failed(kind, f"{status}")
            elif last is None or "error" in last:
                self.failed(kind, f"an error in the stream: {last}")
        return last if last is not None and "meta_info" in last else None

    def judge(self, kind: str, known: Known, answer: Any) -> bool:
        """Compare an answer of /generate; whether it came to its end."""
        if answer is None:
            return False
        is_whole = not is_aborted(answer)
        self.tally.compared(kind, complaint(known, answer["output_ids"], is_whole=is_whole), self.at_s())
        return is_whole

    @contextmanager
    def _counting_broken_connections(self, kind: str) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self.tally.answered(kind, "broken")
            self.failed(kind, f"{type(error).__name__}: {error}")


def is_aborted(answer: Mapping[str, Any]) -> bool:
    return (answer["meta_info"]["finish_reason"] or {}).get("type") == ABORTED
