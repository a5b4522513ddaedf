# SPDX-License-Identifier: Apache-2.0
"""What a rank and its NIXL process say to each other, over sockets that keep messages apart. Pure."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from banyan.decoding import decoded

MAX_BYTES = 192 << 10
"""Of `Carry`, the largest: 4,096 pages and an agent's description of itself."""


MAX_REASON = 500


class Map(msgspec.Struct, tag="map", array_like=True, frozen=True):
    """Map the file that comes with this, and let NIXL know it."""

    num_bytes: int
    is_writable: bool


class Carry(msgspec.Struct, tag="carry", array_like=True, frozen=True):
    """Read pages, layer by layer, into the memory that was mapped last: page ``i`` from ``places[i]`` of the agent that
    ``metadata`` describes to byte ``offsets[i]``. Both are little-endian words of 64 bits. What becomes of it is said
    on the socket that comes with this; its closing ends it."""

    metadata: bytes
    places: bytes
    offsets: bytes
    layer_bytes: list[int]


class Mapped(msgspec.Struct, tag="mapped", array_like=True, frozen=True):
    """``address``: in the process; ``metadata``: of its agent, with all that was mapped so far."""

    address: int
    metadata: bytes


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    reason: str


ToProcess = Map | Carry
ToRank = Mapped | Failed

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()
_to_process = msgspec.msgpack.Decoder(ToProcess)
_to_rank = msgspec.msgpack.Decoder(ToRank)

_landed = struct.Struct("<I")
OVER = b"over"
"""Nothing is written any more."""


def encode(message: ToProcess | ToRank) -> bytes:
    return _encoder.encode(message)


def read_by_process(payload: bytes) -> ToProcess:
    return decoded(_to_process, payload)


def read_by_rank(payload: bytes) -> ToRank:
    """
    Raises:
        ValueError: for what the process does not say.
    """
    return decoded(_to_rank, payload)


def landed(num_layers: int) -> bytes:
    """So many layers are in place; the same again: some bytes of the next one."""
    return _landed.pack(num_layers)


def num_landed(payload: bytes) -> int:
    """
    Raises:
        ValueError: for what the process does not say.
    """
    if len(payload) != _landed.size:
        raise ValueError(f"{len(payload)} bytes")
    return int(_landed.unpack(payload)[0])
