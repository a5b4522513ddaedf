# SPDX-License-Identifier: Apache-2.0
"""How a pool on a GPU is announced to its peers: CUDA IPC handles and where each extent lies behind them.

The bytes travel in the rank's frame table. They are a fixed binary form, not pickle: whoever reads them checks every
number.

    8 s magic, u32 format, u32 segments, u32 extents, u32 probes (0 or 1), 16 s device
    each segment:  64 s handle, u64 num_bytes
    each extent:   u32 segment, u32 zero, u64 offset_bytes, u64 num_bytes
    a probe:       16 s nonce, an extent
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.transport.cuda_ipc.driver import HANDLE_BYTES, UUID_BYTES, CudaDriver

MAGIC = b"BNYNPOOL"
FORMAT = 2
NONCE_BYTES = 16
_HEADER = struct.Struct(f"<8sIIII{UUID_BYTES}s")
_SEGMENT = struct.Struct(f"<{HANDLE_BYTES}sQ")
_EXTENT = struct.Struct("<IIQQ")
_NONCE = struct.Struct(f"<{NONCE_BYTES}s")


@dataclass(frozen=True, slots=True)
class Segment:
    """One allocation of the owner."""

    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PlacedExtent:
    """One extent of the pool: ``num_bytes`` at ``offset_bytes`` of a segment."""

    segment: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes that follow from ``nonce``, for a peer to read before it believes what it reads."""

    nonce: bytes
    extent: PlacedExtent


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """``extents`` are in the order of the pool's geometry: layer by layer, within a layer as the layer has them."""

    device_uuid: bytes
    segments: tuple[Segment, ...]
    extents: tuple[PlacedExtent, ...]
    probe: Probe | None = None

    def encode(self) -> bytes:
        num_probes = int(self.probe is not None)
        parts = [_HEADER.pack(MAGIC, FORMAT, len(self.segments), len(self.extents), num_probes, self.device_uuid)]
        parts += [_SEGMENT.pack(segment.handle, segment.num_bytes) for segment in self.segments]
        placed = [*self.extents, *([self.probe.extent] if self.probe is not None else [])]
        parts += [_EXTENT.pack(extent.segment, 0, extent.offset_bytes, extent.num_bytes) for extent in placed]
        if self.probe is not None:
            parts.append(_NONCE.pack(self.probe.nonce))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> PoolDescription:
        """Inverse of ``encode``.

        Raises:
            ValueError: when the bytes are no description, are of another format, or an extent leaves its segment.
        """
        if len(data) < _HEADER.size:
            raise ValueError(f"a pool description of {len(data)} bytes is too short")
        magic, version, num_segments, num_extents, num_probes, device_uuid = _HEADER.unpack_from(data)
        if magic != MAGIC or version != FORMAT:
            raise ValueError(f"no pool description of format {FORMAT}: magic {magic!r}, format {version}")
        extents_from = _HEADER.size + num_segments * _SEGMENT.size
        end = extents_from + (num_extents + num_probes) * _EXTENT.size
        if num_probes > 1 or end + num_probes * _NONCE.size != len(data):
            raise ValueError(f"{num_segments} segments and {num_extents} extents do not make {len(data)} bytes")
        segments = tuple(Segment(*fields) for fields in _SEGMENT.iter_unpack(data[_HEADER.size : extents_from]))
        extents = tuple(
            PlacedExtent(segment, offset, size)
            for segment, _zero, offset, size in _EXTENT.iter_unpack(data[extents_from:end])
        )
        for extent in extents:
            _check(extent, segments)
        probe = Probe(data[end:], extents[-1]) if num_probes else None
        return cls(device_uuid, segments, extents[:num_extents], probe)


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
        _check(placed[-1], segments)
    if probe is None:
        return PoolDescription(device_uuid, tuple(segments), tuple(placed))
    return PoolDescription(device_uuid, tuple(segments), tuple(placed[:-1]), Probe(probe[0], placed[-1]))


def _check(extent: PlacedExtent, segments: Sequence[Segment]) -> None:
    if extent.segment >= len(segments):
        raise ValueError(f"an extent in segment {extent.segment} of {len(segments)}")
    room_bytes = segments[extent.segment].num_bytes
    if extent.offset_bytes + extent.num_bytes > room_bytes:
        raise ValueError(
            f"an extent of {extent.num_bytes} bytes at {extent.offset_bytes} leaves its segment of {room_bytes} bytes"
        )
