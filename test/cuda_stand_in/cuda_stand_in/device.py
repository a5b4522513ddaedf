# SPDX-License-Identifier: Apache-2.0
"""The order of things on a device that is not there: streams of the driver run when they must, or by chance.

Torch's own streams run at once, in the order in which they are called: torch computes so on a processor. Streams that
the driver's calls make are queues. What waits for one of their events, a torch stream or the host, has them run so far
and no further. So a wait for a queue that is missing is seen: what it would have waited for has not happened.

The other way round no byte tells: when a queue runs, torch's streams have computed all that they were given, waited for
or not. So what was recorded on them is counted, and ``lag`` says for which of them a queue has not waited.

Orders, named by ``order``
  late     nothing runs before it is waited for or asked about
  soon     everything runs as soon as the waits allow it
  a number the seed of a chance that runs queues now and then, beside what is waited for
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from .capture import Capture
from .refused import Refused

PATIENCE_S = 60.0
POLL_S = 0.0001
FIRST_QUEUE = 1 << 20
"""Numbers of queues; those of torch's streams are smaller."""

HOST = -1
"""Waits for streams, too: with ``synchronize``."""

Order = str


@dataclass(frozen=True, slots=True)
class _Op:
    run: Callable[[], None]
    awaits: tuple[int, int] | None = None
    """An event and the number of its record that must have been reached."""
    is_ready: Callable[[], bool] | None = None
    """What only the host can bring about."""


class Device:
    """All queues of one process. Any thread may call."""

    def __init__(self, order: Order) -> None:
        self.obey(order)
        self._lock = threading.RLock()
        self._queues: dict[int, deque[_Op]] = {}
        self._recorded: dict[int, int] = defaultdict(int)
        self._recorded_on: dict[tuple[int, int], int] = {}
        self._reached: dict[int, int] = defaultdict(int)
        self._reached_at_s: dict[int, float] = {}
        self._next_queue, self._next_event = FIRST_QUEUE, 1
        self._timing_events: set[int] = set()
        self._num_recorded_on: dict[int, int] = defaultdict(int)
        """Of each of torch's streams, events that were recorded there."""
        self._last_recorded: dict[int, tuple[int, int]] = {}
        """Of each event that was last recorded on one of them: on which, and as which of its events."""
        self._behind: dict[int, dict[int, int]] = defaultdict(dict)
        """Of each queue, how many events of which of torch's streams are before what it gets next."""
        self.capture = Capture()
        self.num_deferred = 0
        """Operations that ran later than they were enqueued."""

    def obey(self, order: Order) -> None:
        """From now on another order; before anything is enqueued."""
        self._runs_soon = order == "soon"
        self._chance = random.Random(int(order)) if order.isdigit() else None

    def create_queue(self) -> int:
        with self._lock:
            self._next_queue += 1
            self._queues[self._next_queue] = deque()
            return self._next_queue

    def is_queue(self, stream: int) -> bool:
        return stream in self._queues

    def create_event(self) -> int:
        with self._lock:
            self._next_event += 1
            return self._next_event

    def create_timing_event(self) -> int:
        with self._lock:
            event = self.create_event()
            self._timing_events.add(event)
            return event

    # ---- what is enqueued

    def enqueue(self, stream: int, run: Callable[[], None]) -> None:
        self._put(stream, _Op(run))

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self.capture.note_record(event, stream)
            self._recorded[event] += 1
            number = self._recorded[event]
            self._recorded_on[event, number] = stream
            self._last_recorded.pop(event, None)
            if stream not in self._queues:
                self._num_recorded_on[stream] += 1
                self._last_recorded[event] = stream, self._num_recorded_on[stream]

            def reach() -> None:
                self._reached[event], self._reached_at_s[event] = number, time.perf_counter()
                self._recorded_on.pop((event, number), None)

            self._put(stream, _Op(reach))

    def wait(self, stream: int, event: int) -> None:
        """For the record that the event holds now."""
        with self._lock:
            self.capture.note_wait(stream, event)
            self._note_behind(stream, event)
            self._put(stream, _Op(lambda: None, awaits=(event, self._recorded[event])))

    def _note_behind(self, waiting: int, event: int) -> None:
        if event in self._last_recorded:
            stream, number = self._last_recorded[event]
            self._behind[waiting][stream] = max(number, self._behind[waiting].get(stream, 0))

    def lag(self, queue: int) -> set[int]:
        """Torch's streams whose newest event neither the queue nor the host has waited for."""
        with self._lock:
            return {
                stream
                for stream, newest in self._num_recorded_on.items()
                if all(self._behind[waiting].get(stream, 0) < newest for waiting in (queue, HOST))
            }

    def awaited_streams(self) -> set[int]:
        """Torch's streams that some queue has waited for."""
        with self._lock:
            return {stream for queue in self._queues for stream in self._behind[queue]}

    def wait_until(self, stream: int, is_ready: Callable[[], bool]) -> None:
        self._put(stream, _Op(lambda: None, is_ready=is_ready))

    def _put(self, stream: int, op: _Op) -> None:
        with self._lock:
            queue = self._queues.get(stream)
            if queue is None:
                self._make_ready(op)
                op.run()
                return
            queue.append(op)
            self.num_deferred += 1
            if self._runs_soon:
                while any([self._try_next(other) for other in self._queues]):
                    pass
            elif self._chance is not None:
                self._run_by_chance(self._chance)

    def _run_by_chance(self, chance: random.Random) -> None:
        for _ in range(chance.choice((0, 0, 0, 1, 2, 5, 20))):
            self._try_next(chance.choice(list(self._queues)))

    # ---- what runs

    def _make_ready(self, op: _Op) -> None:
        if op.awaits is not None:
            self._reach(*op.awaits)
        deadline_s = time.monotonic() + PATIENCE_S
        while op.is_ready is not None and not op.is_ready():
            if time.monotonic() > deadline_s:
                raise RuntimeError("a stream waits for ever")
            time.sleep(POLL_S)

    def _reach(self, event: int, number: int) -> None:
        while self._reached[event] < number:
            self._run_next(self._recorded_on[event, number])

    def _run_next(self, queue: int) -> None:
        """The oldest operation of a queue, behind all that it waits for."""
        self._make_ready(self._queues[queue][0])
        self._queues[queue].popleft().run()

    def _try_next(self, queue: int) -> bool:
        """The oldest operation, if it can run now."""
        ops = self._queues[queue]
        if not ops:
            return False
        op = ops[0]
        if op.awaits is not None and self._reached[op.awaits[0]] < op.awaits[1]:
            return False
        if op.is_ready is not None and not op.is_ready():
            return False
        ops.popleft().run()
        return True

    # ---- what the host asks

    def is_done(self, event: int) -> bool:
        """Asking brings the queue on by one operation, and those that it waits for, so that who asks again and again
        gets an answer."""
        with self._lock:
            self.capture.check_asked(event)
            number = self._recorded[event]
            if self._reached[event] < number:
                self._nudge(self._recorded_on[event, number])
            return self._reached[event] >= number

    def _nudge(self, queue: int) -> None:
        op = self._queues[queue][0]
        if op.awaits is not None and self._reached[op.awaits[0]] < op.awaits[1]:
            self._nudge(self._recorded_on[op.awaits])
        else:
            self._try_next(queue)

    def synchronize(self, event: int) -> None:
        with self._lock:
            self.capture.check_asked(event)
            self._note_behind(HOST, event)
            self._reach(event, self._recorded[event])

    def synchronize_all(self) -> None:
        with self._lock:
            self._behind[HOST] = dict(self._num_recorded_on)
            for queue, ops in self._queues.items():
                while ops:
                    self._run_next(queue)

    def elapsed_s(self, first: int, last: int) -> float:
        for event in (first, last):
            self.capture.check_asked(event)
            if event not in self._timing_events or not self._recorded[event]:
                raise Refused("CUDA_ERROR_INVALID_HANDLE")
            if self._reached[event] < self._recorded[event]:
                raise Refused("CUDA_ERROR_NOT_READY")
        return self._reached_at_s[last] - self._reached_at_s[first]
