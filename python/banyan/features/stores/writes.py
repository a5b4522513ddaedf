# SPDX-License-Identifier: Apache-2.0
"""Pages that wait to be written to a store of values, and the thread that writes them.

Invariants
  1. A page's frame belongs to this from ``put`` until ``completed`` names its key; every key is named once.
  2. No more than ``backlog_bytes`` wait; what comes on top is not taken.
  3. A thread that ends before its time takes nothing with it: what waits fails, and nothing more is taken.
  4. A write starts only when the gate lets it, or when somebody waits for all of them.
  5. A page is written only if it had not been given up when its checksum was whole: what a frame is filled with later
     never verifies under the page's name.

A page: queued -> being written -> stored, present (the store had it), or failed; all that wait fail with one that the
library does not answer for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf

from banyan._native import SharedBytes, WriteGate
from banyan.features.stores.value_format import HeaderBuffer, ValueFormat
from banyan.features.stores.values import Iovec, Value, Values
from banyan.telemetry import start_thread

BATCH = 32
"""Pages that are written at once."""
LOOK_S = 0.01
"""How often a thread that must not write yet looks again."""

STORED, PRESENT, FAILED = "stored", "present", "failed"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A page that waits: the frame at byte ``offset`` of ``memory``, which begins at ``base``."""

    name: str
    key: str
    namespace: bytes
    memory: SharedBytes
    base: int
    offset: int


Done = Callable[[Sequence[tuple[Waiting, str]]], None]


class Writes:
    """``done`` is told what became of pages, ``lost`` why the store did not answer; both on the writing thread."""

    def __init__(
        self,
        values: Values,
        value_format: ValueFormat,
        header_buffer: HeaderBuffer,
        *,
        backlog_bytes: int,
        num_reads: Callable[[], int],
        done: Done,
        lost: Callable[[Exception], None],
    ) -> None:
        self._values = values
        self._value_format = value_format
        self._header_buffer = header_buffer
        self._max_waiting = max(1, backlog_bytes // value_format.page_bytes)
        self._num_reads = num_reads
        self._done = done
        self._lost = lost
        self._gate = WriteGate()
        self._changed = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._names: set[str] = set()
        self._writing: list[Waiting] = []
        self._given_up: list[Waiting] | None = None
        self._num_flushing = 0
        self._num_failed = 0
        self._has_ended = False
        self.since_s = inf
        """Since when the library writes what it was given last; inf while it has nothing."""
        self.writing_us = 0
        """Microseconds in which the library was writing."""
        self._thread = start_thread(
            self._run, name="banyan-store-write", feature="writing to the store", ended=self._off
        )

    @property
    def has_ended(self) -> bool:
        """Nothing is taken any more."""
        return self._has_ended

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._writing)

    def put(self, pages: Sequence[Waiting]) -> list[str]:
        """Queue a chain of pages: for each "queued", "present" (queued before) or "full", and then all that follow."""
        answers: list[str] = []
        with self._changed:
            for page in pages:
                if page.name in self._names:
                    answers.append(PRESENT)
                elif self._has_ended or self.num_waiting >= self._max_waiting:
                    break
                else:
                    self._waiting.append(page)
                    self._names.add(page.name)
                    answers.append("queued")
            self._changed.notify_all()
        return answers + ["full"] * (len(pages) - len(answers))

    def pause(self) -> None:
        with self._changed:
            self._gate.pause_writes()

    def open(self) -> None:
        with self._changed:
            self._gate.open_writes()
            self._changed.notify_all()

    def flush(self, stall_s: float, within_s: float | None = None) -> int:
        """Write out everything, whatever the gate says; how many pages failed meanwhile. Blocks.

        Raises:
            TimeoutError: when nothing gets done for ``stall_s``, or all of it takes longer than ``within_s``. What
                waits has failed then.
        """
        deadline_s = time.monotonic() + (inf if within_s is None else within_s)
        with self._changed:
            num_failed = self._num_failed
            self._num_flushing += 1
            self._changed.notify_all()
            is_stuck = False
            while self.num_waiting and not is_stuck:
                num_before, wait_s = self.num_waiting, min(stall_s, deadline_s - time.monotonic())
                is_stuck = not self._changed.wait_for(lambda: self.num_waiting < num_before, max(0.0, wait_s))  # noqa: B023
            self._num_flushing -= 1
            if not is_stuck:
                return self._num_failed - num_failed
            dropped = self._take(len(self._waiting))
        self._end(dropped, [FAILED] * len(dropped))
        num_writing = len(self._writing)
        raise TimeoutError(
            f"the store does not answer: {len(dropped)} pages were given up, {num_writing} are on their way"
        )

    def drop(self, within_s: float) -> bool:
        """Give up what waits: it completes as failed. What is being written is waited for and, when that takes too
        long, given up as well: it is removed again when the library has written it. Whether it had an end."""
        with self._changed:
            dropped = self._take(len(self._waiting))
            has_ended = self._changed.wait_for(lambda: not self._writing, within_s)
            if not has_ended:
                self._given_up = self._writing
        self._end(dropped, [FAILED] * len(dropped))
        return has_ended

    def close(self, within_s: float) -> None:
        """Finish what is being written, drop the rest. Idempotent."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._thread.join(within_s)
        self.drop(0.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._has_ended)
                if self._has_ended:
                    return
                batch = self._take(self._num_allowed())
                self._writing = batch
                if not batch:
                    self._changed.wait(LOOK_S)
                    continue
            self.since_s = time.monotonic()
            try:
                outcomes = self._write(batch)
                if FAILED in outcomes and self._given_up is not batch:
                    self._lost(OSError(f"{outcomes.count(FAILED)} page(s) were not written"))
            except Exception as error:  # noqa: BLE001 - whatever a library raises costs hits, and nothing else
                self._lost(error)
                # Each batch might wait as long for the library, and somebody for all of them.
                with self._changed:
                    batch += self._take(len(self._waiting))
                outcomes = [FAILED] * len(batch)
            self.writing_us += int((time.monotonic() - self.since_s) * 1e6)
            self.since_s = inf
            self._end(batch, outcomes)
            with self._changed:
                self._writing = []
                self._num_failed += outcomes.count(FAILED)
                self._changed.notify_all()

    def _off(self) -> None:
        """The thread has ended by a fault: nothing is taken any more, and all that waits has failed."""
        with self._changed:
            self._has_ended = True
            lost = [*self._writing, *self._take(len(self._waiting))]
            self._writing = []
            self._num_failed += len(lost)
            self._changed.notify_all()
        self._end(lost, [FAILED] * len(lost))

    def _num_allowed(self) -> int:
        first = self._waiting[0]
        alike = takewhile(
            lambda page: page.memory is first.memory, islice(self._waiting, self._header_buffer.num_headers)
        )
        most = sum(1 for _ in alike)
        if self._num_flushing:
            return most
        num_reads = self._num_reads()
        for number in range(most):
            if not self._gate.may_write(num_reads=num_reads, num_writes=0):
                return number
        return most

    def _take(self, num_pages: int) -> list[Waiting]:
        return [self._waiting.popleft() for _ in range(num_pages)]

    def _end(self, pages: Sequence[Waiting], outcomes: Sequence[str]) -> None:
        with self._changed:
            self._names.difference_update(page.name for page in pages)
        self._done(list(zip(pages, outcomes, strict=True)))

    def _write(self, batch: list[Waiting]) -> list[str]:
        there = self._values.present([page.name for page in batch])
        new = self._made([page for page, is_there in zip(batch, there, strict=True) if not is_there])
        if self._is_given_up(batch):
            return [FAILED] * len(batch)
        written = iter(self._values.write(new) if new else ())
        if self._is_given_up(batch):
            # Whoever gave it up was told that nothing of it is there. A library that is closed is not called any more.
            if not self._has_ended:
                self._values.remove([value.name for value in new])
            return [FAILED] * len(batch)
        return [PRESENT if is_there else STORED if next(written) else FAILED for is_there in there]

    def _is_given_up(self, batch: list[Waiting]) -> bool:
        with self._changed:
            return self._given_up is batch

    def _made(self, pages: Sequence[Waiting]) -> list[Value]:
        """The values of pages in one memory, their headers in the header buffer."""
        if not pages:
            return []
        value_format, header_buffer, first = self._value_format, self._header_buffer, pages[0]
        keys, offsets = [page.key for page in pages], [page.offset for page in pages]
        layers = [
            value_format.layer_sums(first.memory, first.namespace, keys, offsets, layer)
            for layer in range(value_format.num_layers)
        ]
        values = []
        for number, page in enumerate(pages):
            value_format.write_header(header_buffer.view(number), [sums[number] for sums in layers])
            header = Iovec(header_buffer.place(number), value_format.header_bytes)
            values.append(Value(page.name, (header, Iovec(page.base + page.offset, value_format.page_bytes))))
        return values
