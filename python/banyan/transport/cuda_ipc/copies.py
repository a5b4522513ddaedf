# SPDX-License-Identifier: Apache-2.0
"""One batch of page copies on the copy streams, and the order between it and everything else on the device.

A batch is one chain, or two: what is leased and what follows a read of the store go on streams of their own, so that a
drive which does not answer holds up the second alone.

Invariants
  1. A copy stream waits for everything that was enqueued before the batch (``ready_events``) before it writes: a
     page that was just freed and handed out again may still be written by the forward pass in flight.
  2. Whoever reads layer l on a stream does so behind that stream's wait for the events of l's group, one in each chain.
  3. Whatever follows ``finish`` on a consumer's stream runs after the last byte of the batch was written.
  4. Leases are held until the device is behind the last copy of leased pages, mappings until that was seen. Events and
     words say so, no clock.
  5. No call waits for the device. ``finish`` of a batch that follows reads waits for them: they may fail.

States of a chain: enqueued --last event done--> landed; a refused call --> broken off: landed when what had been
enqueued has run to its end, or lost when nobody can tell when that is. A batch has ended when its chains have landed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from banyan import _native
from banyan.transport.cuda_ipc.driver import CudaDriver

POLL_S = 0.0001


DeviceFrames = Any
"""Page numbers in the device's memory, contiguous int64: a torch tensor, for one."""


@dataclass(frozen=True, slots=True)
class PageLists:
    """Device addresses of three int64 lists of ``num_pages``: row of the source's place, source page, target page."""

    rows: int
    sources: int
    targets: int
    num_pages: int


class PageKernel(Protocol):
    """Copies pages between places; see ``banyan.transport.kv_trans``."""

    def enqueue(self, *, stream: int, lists: PageLists, target_row: int, extents: range) -> None:
        """Copy every listed page's ``extents`` into the place of ``target_row``; asynchronous, in stream order."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which layers share a launch: ``layers_per_launch`` of them, in forward order.

    ``extents_of_layer`` gives the number of each layer's extents.
    """

    extents_of_layer: tuple[int, ...]
    layers_per_launch: int

    def __post_init__(self) -> None:
        if self.layers_per_launch < 1:
            raise ValueError(f"{self.layers_per_launch} layers for each launch: at least 1")

    @property
    def num_groups(self) -> int:
        return -(-len(self.extents_of_layer) // self.layers_per_launch)

    def group_of(self, layer: int) -> int:
        return layer // self.layers_per_launch

    def last_layer(self, group: int) -> int:
        return min((group + 1) * self.layers_per_launch, len(self.extents_of_layer)) - 1

    def extents(self, group: int) -> range:
        first_layer = group * self.layers_per_launch
        start = sum(self.extents_of_layer[:first_layer])
        return range(start, start + sum(self.extents_of_layer[first_layer : first_layer + self.layers_per_launch]))


class EventPool:
    """Events are kept: making one costs more than recording it. ``create`` makes one of the kind that is kept here."""

    def __init__(self, streams: CudaDriver, create: Callable[[], int]) -> None:
        self._streams = streams
        self._create = create
        self._idle: list[int] = []

    def take(self) -> int:
        return self._idle.pop() if self._idle else self._create()

    def give(self, events: Sequence[int]) -> None:
        """Take events back. Waits that were enqueued on them keep the record they saw."""
        self._idle.extend(events)

    def close(self) -> None:
        for event in self._idle:
            self._streams.destroy_event(event)
        self._idle.clear()


class Chain:
    """What one stream does for a batch: a group of layers after the other, with an event behind each."""

    took_s = 0.0
    """By the clock of the device, from the first copy to the end of the last; known once it has landed."""

    def __init__(self, streams: CudaDriver) -> None:
        self.events: list[int] = []
        self.timed: tuple[int, int] | None = None
        """Timing events of a chain that was enqueued whole: behind all that it waits for, and its last one."""
        self.has_lists = False
        """Whether room for its page lists was taken."""
        self.is_lost = False
        self._streams = streams
        self._has_landed = False

    def break_off(self, last_event: int | None) -> None:
        """Nothing more is enqueued. ``last_event`` is behind what is; None: nobody knows when that ends."""
        self.is_lost = last_event is None
        if last_event is not None:
            self.events.append(last_event)

    @property
    def has_landed(self) -> bool:
        """Whether the device has done all that was enqueued. A chain whose end is unknown never has."""
        if not self._has_landed and not self.is_lost:
            self._has_landed = self._streams.is_event_done(self.events[-1])
            if self._has_landed and self.timed is not None:
                self.took_s = self._streams.elapsed_s(*self.timed)
        return self._has_landed

    def take_events(self) -> list[int]:
        """Give the events away; the chain has landed and needs no wait any more."""
        assert self._has_landed
        events, self.events = self.events, []
        return events


class CudaCopy:
    """A batch on its way. Implements ``banyan.ports.Copy``: the waits are enqueued, none of them blocks the caller."""

    wait_s = 0.0

    def __init__(
        self,
        *,
        streams: CudaDriver,
        groups: LayerGroups,
        num_bytes: int,
        current_stream: Callable[[], int],
        consumers: Callable[[], Sequence[int]],
    ) -> None:
        """``current_stream`` is that of the calling thread; ``consumers`` are all streams that touch the pool."""
        self.bytes_fetched = num_bytes
        self.bytes_copied = num_bytes
        self.chains: list[Chain] = []
        self._streams = streams
        self._groups = groups
        self._current_stream = current_stream
        self._consumers = consumers
        self._followed: _native.RingBatch | None = None
        self._waited: set[tuple[int, int, int]] = set()
        self._has_failed = False

    def follow(self, followed: _native.RingBatch) -> None:
        """A chain waits for these reads."""
        self._followed = followed

    def fail(self) -> None:
        """Nothing more is enqueued, and what was is not all."""
        self._has_failed = True

    @property
    def copy_s(self) -> float:
        """By the clock of the device, of the chain that took longest; known once the batch has ended."""
        return max((chain.took_s for chain in self.chains), default=0.0)

    def ages_s(self) -> Sequence[float]:
        """Empty: a layer's time is the device's, and only the batch's end is asked for."""
        return ()

    @property
    def has_ended(self) -> bool:
        """Whether the device has done all that was enqueued. A batch whose end is unknown never is."""
        return all(chain.has_landed for chain in self.chains)

    @property
    def is_lost(self) -> bool:
        return any(chain.is_lost for chain in self.chains)

    def wait_layer(self, layer: int) -> float:
        """Let the current stream wait for ``layer``; 0.0, the caller goes on at once."""
        group = self._groups.group_of(layer)
        for number, chain in enumerate(self.chains):
            if group < len(chain.events):
                self._wait(self._current_stream(), number, group)
        return 0.0

    def finish(self) -> bool:
        """Order what comes next on the consumers' streams behind the copy; False when it failed.

        A failed batch makes SGLang abort its requests and free their pages, so the order matters then as well.
        """
        for number, chain in enumerate(self.chains):
            if chain.events:
                for stream in self._consumers():
                    self._wait(stream, number, len(chain.events) - 1)
        return self._all_came() and not self._has_failed

    def _all_came(self) -> bool:
        """Whether every layer that the batch followed had come when it was let through. Waits for the reads."""
        if self._followed is None:
            return True
        while not self._followed.has_ended:
            time.sleep(POLL_S)
        return not self._followed.has_failed

    def _wait(self, stream: int, number: int, group: int) -> None:
        # A copy stream runs in order: a stream that waited for a later group of a chain has this one.
        if any(waited >= group for waiting, chain, waited in self._waited if (waiting, chain) == (stream, number)):
            return
        self._streams.wait_event(stream, self.chains[number].events[group])
        self._waited.add((stream, number, group))


class HostBoundCopy(CudaCopy):
    """A batch that lands in the memory of the host."""

    def finish(self) -> bool:
        """Wait until nothing writes the host's memory any more; False when the batch failed.

        Immediate once ``has_ended``; a batch whose end is unknown fails at once, its frames stay leased.
        """
        while not self.has_ended and not self.is_lost:
            time.sleep(POLL_S)
        return not self._has_failed
