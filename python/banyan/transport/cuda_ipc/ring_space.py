# SPDX-License-Identifier: Apache-2.0
"""Room in a fixed buffer for stretches that are given back in the order in which they were taken.

Invariant: while no more than half of the buffer is taken, every stretch that fits into the rest of that half finds
room in one piece. Proof: where the free end is too short for it, more than half lies before the taken region.
"""

from __future__ import annotations

from collections import deque


class RingSpace:
    """Offsets ``0 .. 2 * capacity``, of which ``capacity`` may be taken at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_taken = 0
        self._end = 0
        self._stretches: deque[tuple[int, int]] = deque()

    @property
    def size(self) -> int:
        """Size of the buffer behind it."""
        return 2 * self.capacity

    def has_room(self, size: int) -> bool:
        """Whether ``size`` places more may be taken."""
        return self.num_taken + size <= self.capacity

    def take(self, size: int) -> int:
        """Offset of ``size`` adjacent places.

        Raises:
            ValueError: when more than ``capacity`` would be taken: the caller has lost count.
        """
        if size < 1 or not self.has_room(size):
            raise ValueError(f"{size} places wanted, {self.num_taken} of {self.capacity} are taken")
        if not self._stretches or self._end + size > self.size:
            self._end = 0
        offset = self._end
        self._stretches.append((offset, size))
        self._end += size
        self.num_taken += size
        return offset

    def take_back(self) -> None:
        """Free the newest stretch: nobody has used it."""
        self._end, size = self._stretches.pop()
        self.num_taken -= size

    def give_back(self) -> None:
        """Free the oldest stretch."""
        _offset, size = self._stretches.popleft()
        self.num_taken -= size
