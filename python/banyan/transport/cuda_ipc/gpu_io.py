# SPDX-License-Identifier: Apache-2.0
"""I/O in stream order: a stream rings when it reaches a layer, another waits for the answer. No Python in between.

Invariants
  1. A stream that waits for a layer waits for a word that will be written, whatever becomes of the I/O.
  2. A slot is given back when its batch has ended and an event behind its last wait is done: no stream looks at its
     words any more.
  3. ``finish`` is False when any layer did not land. Its requests must not use what is in memory.

States of a batch: enqueued -> ended, with the device still behind it -> given back. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from banyan.transport.cuda_ipc.driver import Flags, Streams


class IoBatch(Protocol):
    """``banyan._native.RingBatch``."""

    @property
    def doorbell_offset(self) -> int: ...

    @property
    def answer_offset(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...

    def value(self, layer: int) -> int: ...

    def cancel(self) -> None: ...


class IoRing(Protocol):
    """The part of ``banyan._native.FlagRing`` that gives slots back."""

    def give_back(self, batch: IoBatch) -> bool: ...


class FlagDriver(Streams, Flags, Protocol):
    """What enqueuing rings and waits takes."""


@dataclass(slots=True)
class _Passed:
    batch: IoBatch
    event: int


class GpuIo:
    """Enqueues the words of a ring whose memory the device sees at ``words``."""

    def __init__(self, driver: FlagDriver, ring: IoRing, words: int) -> None:
        self._driver = driver
        self._ring = ring
        self._words = words
        self._passed: list[_Passed] = []

    def ask(self, stream: int, batch: IoBatch, layer: int) -> None:
        """When ``stream`` comes here, the layers up to ``layer`` may be brought into memory."""
        self._driver.write_flag(stream, self._words + batch.doorbell_offset, batch.value(layer))

    def wait(self, stream: int, batch: IoBatch, layer: int) -> None:
        """What is enqueued on ``stream`` from now on runs after ``layer`` was answered."""
        self._driver.wait_flag(stream, self._words + batch.answer_offset, batch.value(layer))

    def finish(self, stream: int, batch: IoBatch) -> bool:
        """Nothing more is enqueued for the batch; ``stream`` is the one that waited. False when it has failed so far.

        The answer is final once the batch has ended: a caller who has not waited for the device asks ``has_failed``
        again before he hands results out.
        """
        event = self._driver.create_event()
        self._driver.record_event(event, stream)
        self._passed.append(_Passed(batch, event))
        return not batch.has_failed

    def settle(self) -> None:
        """Give the slots back that the device has passed. Called on every scheduling step; never waits."""
        kept = []
        for passed in self._passed:
            if self._driver.is_event_done(passed.event) and self._ring.give_back(passed.batch):
                self._driver.destroy_event(passed.event)
            else:
                kept.append(passed)
        self._passed = kept

    @property
    def num_under_way(self) -> int:
        return len(self._passed)

    def cancel(self, batches: Iterable[IoBatch]) -> None:
        """Let the streams go on: what has not been asked for will not come."""
        for batch in batches:
            batch.cancel()
