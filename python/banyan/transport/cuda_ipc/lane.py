# SPDX-License-Identifier: Apache-2.0
"""A stream that copies run on, with room for the page lists of what is under way.

Invariants
  1. Chains land in the order in which they were begun: the stream runs so. Lists and events are given back so, too.
  2. A chain that was begun ends: enqueued whole, or broken off behind an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from banyan import _native
from banyan.transport.cuda_ipc.copies import Chain, EventPool, LayerGroups, PageKernel
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan.transport.cuda_ipc.gpu_io import GpuIo
from banyan.transport.cuda_ipc.page_lists import ListSpace, Part


class Lane:
    """Enqueues copies into the place of ``target_row``. ``io``: by what a chain follows reads. One thread."""

    def __init__(
        self,
        *,
        driver: CudaDriver,
        kernel: PageKernel,
        groups: LayerGroups,
        stream: int,
        num_pages: int,
        target_row: int,
        io: GpuIo | None = None,
    ) -> None:
        """``num_pages`` bound what can be under way."""
        self._driver = driver
        self._kernel = kernel
        self._groups = groups
        self._stream = stream
        self._target_row = target_row
        self._io = io
        self._events = EventPool(driver, driver.create_event)
        self._timing = EventPool(driver, driver.create_timing_event)
        self._lists = ListSpace(driver, stream=stream, num_pages=num_pages)
        self._under_way: deque[Chain] = deque()

    def has_room(self, num_pages: int) -> bool:
        return self._lists.has_room(num_pages)

    def begin(self) -> Chain:
        """A chain that ``enqueue`` fills next."""
        self._under_way.append(Chain(self._driver))
        return self._under_way[-1]

    def enqueue(self, parts: Sequence[Part], behind: Sequence[int], followed: _native.RingBatch | None = None) -> None:
        """Fill the chain that was begun last: copy all ``parts`` group by group, behind the events ``behind`` and, for
        each group, behind the reads that are ``followed``.

        Raises:
            DriverError: when a call is refused. Whatever is raised, the chain is broken off.
        """
        chain = self._under_way[-1]
        try:
            self._enqueue(chain, parts, behind, followed)
        except BaseException:
            chain.break_off(self._last_event())
            raise

    def _enqueue(
        self, chain: Chain, parts: Sequence[Part], behind: Sequence[int], followed: _native.RingBatch | None
    ) -> None:
        stream, io = self._stream, self._io
        for event in behind:
            self._driver.wait_event(stream, event)
        lists = self._lists.take(sum(part.num_pages for part in parts))
        chain.has_lists = True
        self._lists.upload(lists, parts)
        began = self._timing.take()
        self._driver.record_event(began, stream)
        for group in range(self._groups.num_groups):
            if io is not None and followed is not None:
                io.wait(stream, followed, self._groups.last_layer(group))
            extents = self._groups.extents(group)
            self._kernel.enqueue(stream=stream, lists=lists, target_row=self._target_row, extents=extents)
            is_last = group == self._groups.num_groups - 1
            event = (self._timing if is_last else self._events).take()
            self._driver.record_event(event, stream)
            chain.events.append(event)
            if is_last:
                chain.timed = (began, event)
        if io is not None and followed is not None:
            io.finish(stream, followed)

    def _last_event(self) -> int | None:
        """An event behind all that is on the stream; None when even that is refused."""
        try:
            event = self._events.take()
            self._driver.record_event(event, self._stream)
        except DriverError:
            return None
        return event

    def poll(self) -> None:
        """Take back what chains that have landed had."""
        while self._under_way and self._under_way[0].has_landed:
            landed = self._under_way.popleft()
            timed = landed.timed or ()
            self._timing.give(timed)
            self._events.give([event for event in landed.take_events() if event not in timed])
            if landed.has_lists:
                self._lists.give_back()

    def close(self) -> None:
        """Nothing may be under way."""
        assert not self._under_way
        self._events.close()
        self._timing.close()
        self._lists.close()
