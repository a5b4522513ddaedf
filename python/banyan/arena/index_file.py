# SPDX-License-Identifier: Apache-2.0
"""What a kept part of the arena holds, written beside it for whoever finds the two after a restart.

Invariants
  1. An entry is valid only while its frame holds the complete page that it names: it is struck before the frame is
     filled anew, and entered when the page's checksum is known.
  2. The last word of an entry makes it valid: a process that is killed meanwhile leaves it struck.
  3. All entries belong to one namespace; another one strikes them all before its name is written down.

An entry: struck --enter--> valid --strike--> struck. One writer, the owner of the part.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from banyan.core import PageKey

MAGIC = b"BNYNKEP1"
HEADER = struct.Struct("<8s32sQQ")
"""Magic, namespace, bytes of a page, number of frames."""
HEADER_BYTES = 4096
ENTRY = struct.Struct("<Q32sQ16x")
"""Order of entering, key, checksum. Order 0: struck."""
ORDER = struct.Struct("<Q")
STRUCK = 0
MOST_ORDER = (1 << 63) - 1
"""More than a writer comes to: a number beyond it was damaged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A page, where it lies, and the checksum of its bytes."""

    frame: int
    key: PageKey
    checksum: int


class IndexFile:
    """The entries of a part of ``num_frames`` frames, in ``memory`` of ``num_bytes(num_frames)``."""

    @staticmethod
    def num_bytes(num_frames: int) -> int:
        return HEADER_BYTES + num_frames * ENTRY.size

    def __init__(self, memory: memoryview, *, page_bytes: int, num_frames: int) -> None:
        self._memory = memory
        self._page_bytes = page_bytes
        self._num_frames = num_frames
        self._last_order = STRUCK

    def entries(self, namespace: bytes) -> list[Entry]:
        """What is valid under ``namespace``, in the order of entering. Every entry of another one is struck."""
        header = (MAGIC, namespace, self._page_bytes, self._num_frames)
        if HEADER.unpack_from(self._memory) != header:
            self.strike_all()
            HEADER.pack_into(self._memory, 0, *header)
            return []
        table = enumerate(ENTRY.iter_unpack(self._memory[HEADER_BYTES : self.num_bytes(self._num_frames)]))
        valid = sorted(((*row, frame) for frame, row in table if STRUCK < row[0] <= MOST_ORDER), key=itemgetter(0))
        self._last_order = valid[-1][0] if valid else STRUCK
        return [Entry(frame, PageKey(key.hex()), checksum) for _, key, checksum, frame in valid]

    def enter(self, frames: Sequence[int], keys: Sequence[str], checksums: Sequence[int]) -> None:
        """These frames hold these pages."""
        for frame, key, checksum in zip(frames, keys, checksums, strict=True):
            self._last_order += 1
            at = self._place(frame)
            ENTRY.pack_into(self._memory, at, STRUCK, bytes.fromhex(key), checksum)
            ORDER.pack_into(self._memory, at, self._last_order)

    def strike(self, frames: Sequence[int]) -> None:
        """These frames hold nothing any more."""
        for frame in frames:
            ORDER.pack_into(self._memory, self._place(frame), STRUCK)

    def strike_all(self) -> None:
        self._memory[HEADER_BYTES:] = bytes(len(self._memory) - HEADER_BYTES)

    def _place(self, frame: int) -> int:
        if not 0 <= frame < self._num_frames:
            raise IndexError(f"frame {frame} of {self._num_frames}")
        return HEADER_BYTES + frame * ENTRY.size
