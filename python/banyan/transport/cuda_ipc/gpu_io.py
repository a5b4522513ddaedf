# SPDX-License-Identifier: Apache-2.0
"""Reads of the store in stream order: a stream waits for the word that tells how far they have come. No Python in
between.

A read begins when its request comes, long before a stream gets there: it is followed, nobody asks for it.

Invariants
  1. A stream that waits for a layer waits for a word that will be written, whatever becomes of the I/O.
  2. A slot is given back when its batch has ended and an event behind its last wait is done: no stream looks at its
     words any more.
  3. A batch that has ended says whether any layer did not land. Its requests must not use what is in memory then.

States of a batch: enqueued -> ended, with the device still behind it -> given back. One thread.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from banyan import _native
from banyan.ports import StoreRead
from banyan.transport.cuda_ipc.copies import POLL_S, EventPool
from banyan.transport.cuda_ipc.driver import CudaDriver

WORD_PATIENCE_S = 2.0


def comes_past(driver: CudaDriver, stream: int, word: int) -> bool:
    """Whether ``stream`` sees the word at this address, which is zero, and does all that it was given before, soon.
    Waits for it: at the start only. Where it does not, it may be looking at the word for as long as that is there."""
    driver.wait_flag(stream, word, 0)
    event, deadline_s = driver.create_event(), time.monotonic() + WORD_PATIENCE_S
    driver.record_event(event, stream)
    while not (is_done := driver.is_event_done(event)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    driver.destroy_event(event)
    return is_done


@dataclass(slots=True)
class _Passed:
    batch: _native.RingBatch
    event: int


class GpuIo:
    """What the store reads into this rank's part of the host arena, for copies that follow: the words of a ring, whose
    memory the device sees at ``words``."""

    def __init__(self, driver: CudaDriver, ring: _native.FlagRing, words: int, *, frame_bytes: int) -> None:
        self._driver = driver
        self._ring = ring
        self._words = words
        self._frame_bytes = frame_bytes
        self._events = EventPool(driver, driver.create_event)
        self._passed: list[_Passed] = []

    def pages(self, read: StoreRead, positions: Sequence[int]) -> bytes:
        """The pages of the arena that these of the read's pages go to, as bytes of int64."""
        offsets = array("q", read.offsets(list(positions)))
        return array("q", [offset // self._frame_bytes for offset in offsets]).tobytes()

    def follow(self, reads: Sequence[StoreRead]) -> _native.RingBatch | None:
        """Layers of reads that are under way, each answered when all of them have it. None when every slot is taken:
        then the reads are waited for here, and are over, or late."""
        batch = self._ring.follow(cast(list[_native.Read], list(reads)))
        # A late read may still be written to when its device answers, if it ever does.
        while batch is None and not all(read.has_ended or read.is_late for read in reads):
            time.sleep(POLL_S)
        return batch

    def wait(self, stream: int, batch: _native.RingBatch, layer: int) -> None:
        """What is enqueued on ``stream`` from now on runs after ``layer`` has come, or will not come."""
        self._driver.wait_flag(stream, self._words + batch.answer_offset, batch.value(layer))

    def finish(self, stream: int, batch: _native.RingBatch) -> None:
        """Nothing more is enqueued for the batch; ``stream`` is the one that waited."""
        event = self._events.take()
        self._driver.record_event(event, stream)
        self._passed.append(_Passed(batch, event))

    def poll(self) -> None:
        """Give the slots back that the device has passed. Called on every scheduling step; never waits."""
        kept = []
        for passed in self._passed:
            if self._driver.is_event_done(passed.event) and self._ring.give_back(passed.batch):
                self._events.give([passed.event])
            else:
                kept.append(passed)
        self._passed = kept
