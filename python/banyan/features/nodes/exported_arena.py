# SPDX-License-Identifier: Apache-2.0
"""Arena frames of a node as a page server lends them: found, leased, summed, and as the bytes of each layer."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from banyan import _native
from banyan.layout import BlockGeometry


@dataclass(frozen=True, slots=True)
class LeasedPart:
    """Pages of one part of the arena: byte offsets of their frames."""

    memory: _native.PeerMemory
    offsets: list[int]


class LeasedFrames:
    """Leased frames of any parts of the arena, mapped read-only."""

    def __init__(self, parts: Sequence[LeasedPart], layer_bytes: Sequence[int]) -> None:
        self._views = [(memoryview(part.memory), part.offsets) for part in parts]
        self.parts = parts
        self._layer_bytes = layer_bytes
        self._starts = [0, *accumulate(layer_bytes)]

    def layer(self, layer: int) -> list[memoryview]:
        start, end = self._starts[layer], self._starts[layer + 1]
        return [view[offset + start : offset + end] for view, offsets in self._views for offset in offsets]

    def sums(self, namespace: bytes, keys: Sequence[str]) -> Iterator[list[int]]:
        """Those of all pages, layer by layer; each takes its time."""
        for layer in range(len(self._layer_bytes)):
            yield list(chain.from_iterable(self._sums_of(namespace, keys, layer)))

    def _sums_of(self, namespace: bytes, keys: Sequence[str], layer: int) -> list[list[int]]:
        sums, at = [], 0
        for part in self.parts:
            own = list(keys[at : at + len(part.offsets)])
            at += len(own)
            places = array("q", [offset + self._starts[layer] for offset in part.offsets])
            sums.append(part.memory.checksums(namespace, own, places, self._layer_bytes[layer], layer))
        return sums


class ExportedArena:
    """The arena parts of one namespace that a page server lends from. ``view`` has a reader bit of its own."""

    def __init__(
        self, view: _native.Peers, *, namespace: bytes, arena_slots: Sequence[int], block: BlockGeometry
    ) -> None:
        self.namespace = namespace
        self._view = view
        self._slots = list(arena_slots)
        self._block = block

    def num_pages(self, keys: Sequence[str]) -> int:
        """Leading pages that the arena holds now."""
        return self._view.lookup(list(keys), self._slots).num_pages

    def memories(self) -> list[_native.PeerMemory]:
        """The parts that are there now."""
        found = (self._view.mapping(slot, epoch) for slot, epoch in self._view.present() if slot in self._slots)
        return [memory for memory in found if memory is not None]

    def lease(self, keys: Sequence[str]) -> tuple[_native.Lease, LeasedFrames] | None:
        """All pages of ``keys``, or None."""
        found = self._view.lookup(list(keys), self._slots)
        lease = self._view.lease(found, list(keys)) if found.num_pages == len(keys) else None
        if lease is None:
            return None
        parts = []
        for slot, epoch, frames in lease.sources():
            memory = self._view.mapping(slot, epoch)
            if memory is None:
                lease.release()
                return None
            frame_bytes = self._block.frame_bytes
            parts.append(LeasedPart(memory, [frame * frame_bytes for frame in memoryview(frames).cast("q")]))
        return lease, LeasedFrames(parts, self._block.layer_bytes)
