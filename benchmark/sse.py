# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, fed in whatever pieces the network delivers.

Invariant: `_pending` never holds a complete line and `_data` only lines of the one event that is still open.
An event is given out when its blank line has arrived, never earlier, so a JSON text is never seen in part.
"""

from __future__ import annotations

from dataclasses import dataclass

DONE = "[DONE]"


@dataclass(frozen=True)
class ServerSentEvent:
    """One event: `name` is empty unless the server named it; `data` is its data lines, joined."""

    name: str
    data: str


class EventStream:
    """Incremental parser: `feed` bytes, get the events they completed."""

    def __init__(self) -> None:
        self._pending = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Events that `chunk` completes, in order. Splits within a line or a UTF-8 sequence are fine."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        events = []
        for line in lines:
            event = self._line(line.rstrip(b"\r").decode("utf-8", errors="replace"))
            if event is not None:
                events.append(event)
        return events

    def close(self) -> list[ServerSentEvent]:
        """The event that the end of the stream completes: some servers leave out the last blank line."""
        return self.feed(b"\n\n")

    def _line(self, line: str) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        # Anything else is a comment (an empty field), an id or a retry hint: of no use here.
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        name, data = self._name, self._data
        self._name, self._data = "", []
        return ServerSentEvent(name, "\n".join(data)) if data else None
