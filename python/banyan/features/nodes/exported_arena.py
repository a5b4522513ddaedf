# SPDX-License-Identifier: Apache-2.0
"""Arena frames of a node, summed and as the bytes of each layer; and how a page server finds and leases them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from banyan import _native
from banyan.layout import BlockGeometry

Memory = TypeVar("Memory", _native.PeerMemory, _native.SharedBytes)


class PartFrames(Generic[Memory]):
    """Frames in one part of the arena, layer by layer: page ``i`` begins at byte ``offsets[i]`` of its ``memory``."""

    def __init__(self, memory: Memory, offsets: Sequence[int], layer_bytes: Sequence[int]) -> None:
        self.memory: Memory = memory
        self.offsets = offsets
        self.layer_bytes = layer_bytes
        self._view = memoryview(memory)
        self._starts = [0, *accumulate(layer_bytes)]

    def layer(self, layer: int) -> list[memoryview]:
        start, end = self._starts[layer], self._starts[layer + 1]
        return [self._view[offset + start : offset + end] for offset in self.offsets]

    def sums(self, namespace: bytes, keys: Sequence[str], layer: int) -> list[int]:
        """The checksum of each page, which are those of ``keys``, in one layer."""
        places = array("q", [offset + self._starts[layer] for offset in self.offsets])
        return self.memory.checksums(namespace, list(keys), places, self.layer_bytes[layer], layer)


class LeasedFrames:
    """Leased frames of any parts of the arena, mapped read-only."""

    def __init__(self, parts: Sequence[PartFrames[_native.PeerMemory]], num_layers: int) -> None:
        self.parts = parts
        self._num_layers = num_layers

    def layer(self, layer: int) -> list[memoryview]:
        return [view for part in self.parts for view in part.layer(layer)]

    def sums(self, namespace: bytes, keys: Sequence[str]) -> Iterator[list[int]]:
        """Those of all pages, layer by layer; each takes its time."""
        for layer in range(self._num_layers):
            sums: list[int] = []
            for part in self.parts:
                sums += part.sums(namespace, keys[len(sums) : len(sums) + len(part.offsets)], layer)
            yield sums


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
        parts, layer_bytes, frame_bytes = [], self._block.layer_bytes, self._block.frame_bytes
        for slot, epoch, frames in lease.sources():
            memory = self._view.mapping(slot, epoch)
            if memory is None:
                lease.release()
                return None
            offsets = [frame * frame_bytes for frame in memoryview(frames).cast("q")]
            parts.append(PartFrames(memory, offsets, layer_bytes))
        return lease, LeasedFrames(parts, len(layer_bytes))
