# SPDX-License-Identifier: Apache-2.0
"""``torch.cuda``'s streams and events. Computing happens where it is called, so a stream is a number; it is in order
with the driver's queues by the events that ``device`` knows.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from cuda_stand_in.device import Device


class Streams:
    """Of one process: which stream is current on which thread, and the classes that torch is given."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._current = threading.local()
        self._num_streams = 0
        self.Event, self.Stream, self.ExternalStream, self.StreamContext = (
            type(kind.__name__, (kind,), {"process": self}) for kind in (Event, Stream, ExternalStream, StreamContext)
        )
        self._default = self.ExternalStream(0)

    def next_number(self) -> int:
        self._num_streams += 1
        return self._num_streams

    def entered(self) -> list[Any]:
        """Those that this thread is in, the current one last."""
        if not hasattr(self._current, "streams"):
            self._current.streams = [self._default]
        return self._current.streams

    def current(self, device: Any = None) -> Any:
        return self.entered()[-1]

    def default(self, device: Any = None) -> Any:
        return self._default

    def make_current(self, stream: Any) -> None:
        self.entered()[-1] = stream


class Event:
    process: Streams

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_rest: Any) -> None:
        device = self.process.device
        self.cuda_event = device.create_timing_event() if enable_timing else device.create_event()

    def record(self, stream: Any = None) -> None:
        self.process.device.record(self.cuda_event, (stream or self.process.current()).cuda_stream)

    def wait(self, stream: Any = None) -> None:
        self.process.device.wait((stream or self.process.current()).cuda_stream, self.cuda_event)

    def query(self) -> bool:
        return self.process.device.is_done(self.cuda_event)

    def synchronize(self) -> None:
        self.process.device.synchronize(self.cuda_event)

    def elapsed_time(self, last: Any) -> float:
        return self.process.device.elapsed_s(self.cuda_event, last.cuda_event) * 1000


class Stream:
    process: Streams
    device_type, device_index, priority = 1, 0, 0
    device = torch.device("cpu")

    def __init__(self, device: Any = None, priority: int = 0, **_rest: Any) -> None:
        self.cuda_stream = self.stream_id = self.process.next_number()

    def record_event(self, event: Any = None) -> Any:
        event = event or self.process.Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def __enter__(self) -> Any:
        self.process.entered().append(self)
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.entered().pop()

    def __eq__(self, other: object) -> bool:
        return getattr(other, "cuda_stream", None) == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream


class ExternalStream(Stream):
    def __init__(self, number: int, device: Any = None, **_rest: Any) -> None:
        self.cuda_stream = self.stream_id = number


class StreamContext:
    process: Streams

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self.process.entered().append(self._stream or self.process.current())

    def __exit__(self, *_error: object) -> None:
        self.process.entered().pop()
