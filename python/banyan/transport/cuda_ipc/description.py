# SPDX-License-Identifier: Apache-2.0
"""How a pool on a GPU is announced to its peers: CUDA IPC handles and where each extent lies behind them.

The bytes travel in the rank's frame table. They are a typed msgpack value, not pickle: whoever reads them checks every
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from banyan.decoding import decoded
from banyan.transport.cuda_ipc.driver import CudaDriver

NONCE_BYTES = 16

_Number = Annotated[int, msgspec.Meta(ge=0)]


class Segment(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One allocation of the owner."""

    handle: bytes
    num_bytes: _Number


class PlacedExtent(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One extent of the pool: ``num_bytes`` at ``offset_bytes`` of a segment."""

    segment: _Number
    offset_bytes: _Number
    num_bytes: _Number


class Probe(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Bytes that follow from ``nonce``, for a peer to read before it believes what it reads."""

    nonce: bytes
    extent: PlacedExtent


class PoolDescription(msgspec.Struct, tag="pool", array_like=True, forbid_unknown_fields=True, frozen=True):
    """``extents`` are in the order of the pool's geometry: layer by layer, within a layer as the layer has them."""

    device_uuid: bytes
    segments: tuple[Segment, ...]
    extents: tuple[PlacedExtent, ...]
    probe: Probe | None = None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> PoolDescription:
        """Inverse of ``encode``.

        Raises:
            ValueError: when the bytes are no description, or an extent leaves its segment.
        """
        description = decoded(_decoder, data)
        description.check()
        return description

    def check(self) -> None:
        """
        Raises:
            ValueError: when an extent, or the probe's, leaves its segment.
        """
        for extent in (*self.extents, *([] if self.probe is None else [self.probe.extent])):
            if extent.segment >= len(self.segments):
                raise ValueError(f"an extent in segment {extent.segment} of {len(self.segments)}")
            room_bytes = self.segments[extent.segment].num_bytes
            if extent.offset_bytes + extent.num_bytes > room_bytes:
                raise ValueError(
                    f"an extent of {extent.num_bytes} bytes at {extent.offset_bytes} leaves its segment of "
                    f"{room_bytes} bytes"
                )


_decoder = msgspec.msgpack.Decoder(PoolDescription)


def describe(
    ipc: CudaDriver,
    device_uuid: bytes,
    extents: Sequence[tuple[int, int]],
    probe: tuple[bytes, int, int] | None = None,
) -> PoolDescription:
    """Describe the extents ``(address, num_bytes)`` of a pool of this process, and its probe: ``(nonce, address,
    num_bytes)``.

    An allocation is exported once, however many extents lie in it: a process may open a handle only once.

    Raises:
        ValueError: when an extent reaches beyond its allocation.
        DriverError: when an allocation has no handle.
    """
    segments: list[Segment] = []
    number_of: dict[int, int] = {}
    placed = []
    for address, num_bytes in [*extents, *([probe[1:]] if probe is not None else [])]:
        base, allocated_bytes = ipc.allocation_of(address)
        if base not in number_of:
            number_of[base] = len(segments)
            segments.append(Segment(ipc.export_handle(base), allocated_bytes))
        placed.append(PlacedExtent(number_of[base], address - base, num_bytes))
    placed_probe = None if probe is None else Probe(probe[0], placed.pop())
    description = PoolDescription(device_uuid, tuple(segments), tuple(placed), placed_probe)
    description.check()
    return description
