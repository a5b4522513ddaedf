# SPDX-License-Identifier: Apache-2.0
"""A graph that is being captured, in the mode "global": which streams are part of it, and what breaks it.

As with CUDA: a stream that waits for an event of the capture becomes part of it; no stream of it waits for another
event; nobody asks whether an event has passed that was last recorded on such a stream, not even afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .refused import Refused


class Capture:
    """Of one device."""

    def __init__(self) -> None:
        self._streams: set[int] = set()
        self._events: set[int] = set()
        self._is_broken = False

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self._streams, self._is_broken = {stream}, False
        try:
            yield
        finally:
            self._streams = set()
        if self._is_broken:
            raise Refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")

    @property
    def is_active(self) -> bool:
        return bool(self._streams)

    def includes(self, stream: int) -> bool:
        return stream in self._streams

    def refuse(self, code: str) -> NoReturn:
        """And the graph is lost."""
        self._is_broken = True
        raise Refused(code)

    def note_record(self, event: int, stream: int) -> None:
        if stream in self._streams:
            self._events.add(event)
        else:
            self._events.discard(event)

    def note_wait(self, stream: int, event: int) -> None:
        if event in self._events:
            if self.is_active:
                self._streams.add(stream)
        elif stream in self._streams:
            self.refuse("CUDA_ERROR_STREAM_CAPTURE_ISOLATION")

    def check_asked(self, event: int) -> None:
        if event in self._events:
            self.refuse("CUDA_ERROR_CAPTURED_EVENT")
