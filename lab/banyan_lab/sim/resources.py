# SPDX-License-Identifier: Apache-2.0
"""What requests compete for: bandwidth that is shared, and room that is held.

A ``Link`` is a fluid server: its flows progress at once, in equal parts. It is exact and costs O(log n) for each flow,
because it keeps one virtual clock (bytes served to a flow) and not the progress of every flow.

Invariants
  1. Bytes in = bytes out + bytes under way, and the bytes served are the integral of the rate (``audit``).
  2. Room is never negative and never more than there is; who waits for room is served in order.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any

from banyan_lab.sim.engine import FIRST, Action, Simulation

_SAME_TIME = 1e-9


class UnbalancedBooks(AssertionError):
    """A resource served more or less than was asked of it."""


class Link:
    """Bandwidth under fair sharing. One direction of a NIC, a bus, a drive or a memory."""

    __slots__ = (
        "_armed_s",
        "_flows",
        "_num_started",
        "_seen_s",
        "_served",
        "_sim",
        "busy_s",
        "bytes_done",
        "bytes_per_s",
        "bytes_started",
        "name",
        "served_bytes",
    )

    def __init__(self, sim: Simulation, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"{name}: bandwidth {bytes_per_s} B/s")
        self._sim = sim
        self.name = name
        self.bytes_per_s = bytes_per_s
        self._served = 0.0
        self._flows: list[tuple[float, int, float, Action, tuple[Any, ...]]] = []
        """A heap ordered by the virtual time at which they end."""
        self._num_started = 0
        self._seen_s = 0.0
        self._armed_s = float("inf")
        self.bytes_started = 0.0
        self.bytes_done = 0.0
        self.served_bytes = 0.0
        self.busy_s = 0.0

    @property
    def num_flows(self) -> int:
        return len(self._flows)

    @property
    def pending_bytes(self) -> float:
        """Bytes that were asked for and not served."""
        self._advance()
        return self.bytes_started - self.served_bytes

    def start(self, num_bytes: float, done: Action, *args: Any) -> None:
        """Move ``num_bytes``; ``done(*args)`` runs when the last one has passed. Nothing takes no time."""
        if num_bytes <= 0:
            self._sim.after(0.0, done, *args)
            return
        self._advance()
        self._num_started += 1
        self.bytes_started += num_bytes
        heappush(self._flows, (self._served + num_bytes, self._num_started, num_bytes, done, args))
        self._arm()

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the bandwidth from now on: interference, or a degraded link."""
        self._advance()
        self.bytes_per_s = bytes_per_s
        self._armed_s = float("inf")
        self._arm()

    def _advance(self) -> None:
        elapsed_s = self._sim.now_s - self._seen_s
        self._seen_s = self._sim.now_s
        if elapsed_s <= 0 or not self._flows:
            return
        self._served += self.bytes_per_s * elapsed_s / len(self._flows)
        self.served_bytes += self.bytes_per_s * elapsed_s
        self.busy_s += elapsed_s

    def _next_end_s(self) -> float:
        if not self._flows:
            return float("inf")
        return self._seen_s + max(0.0, self._flows[0][0] - self._served) * len(self._flows) / self.bytes_per_s

    def _arm(self) -> None:
        # A later end keeps the earlier alarm: it rings, finds nothing done and is set anew. That is cheaper than
        # an alarm for each flow that joins.
        ends_s = self._next_end_s()
        if ends_s < self._armed_s:
            self._armed_s = ends_s
            self._sim.at(max(ends_s, self._sim.now_s), self._ring, priority=FIRST)

    def _ring(self) -> None:
        if self._sim.now_s < self._armed_s:
            return
        self._armed_s = float("inf")
        self._advance()
        ended = []
        # Rounding leaves the last flow a hair short of its end: less than a nanosecond of its rate.
        hair = self.bytes_per_s * _SAME_TIME / len(self._flows) if self._flows else 0.0
        while self._flows and self._flows[0][0] - self._served <= hair:
            _, _, num_bytes, done, args = heappop(self._flows)
            self.bytes_done += num_bytes
            ended.append((done, args))
        if self._flows:
            self._arm()
        else:
            self._served = 0.0
            self.served_bytes = self.bytes_done
        for done, args in ended:
            done(*args)

    def audit(self) -> None:
        """Check the books.

        Raises:
            UnbalancedBooks: when bytes were lost or invented.
        """
        self._advance()
        under_way = 0.0
        for end, _, num_bytes, _, _ in self._flows:
            left = end - self._served
            if not -1e-6 * num_bytes - 1 <= left <= num_bytes * (1 + 1e-9) + 1:
                raise UnbalancedBooks(f"{self.name}: a flow of {num_bytes} B has {left} B left")
            under_way += num_bytes - left
        slack = 1e-6 * max(1.0, self.bytes_started)
        if abs(self.bytes_done + under_way - self.served_bytes) > slack:
            raise UnbalancedBooks(f"{self.name}: served {self.served_bytes} B, gave {self.bytes_done + under_way} B")
        if self.served_bytes > self.bytes_started + slack:
            raise UnbalancedBooks(f"{self.name}: served {self.served_bytes} B of {self.bytes_started} B")


class Room:
    """Bytes that can be held: HBM, DRAM buffers, pools. Who finds it full waits in order."""

    __slots__ = ("_sim", "_waiting", "capacity", "held", "name", "peak")

    def __init__(self, sim: Simulation, name: str, capacity: float) -> None:
        if not capacity > 0:
            raise ValueError(f"{name}: room for {capacity} bytes")
        self._sim = sim
        self.name = name
        self.capacity = capacity
        self.held = 0.0
        self.peak = 0.0
        self._waiting: deque[tuple[float, Action, tuple[Any, ...]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self, amount: float, then: Action, *args: Any) -> None:
        """Run ``then(*args)`` as soon as ``amount`` is held for the caller: now, or in turn.

        Raises:
            ValueError: for more than there ever is.
        """
        if amount > self.capacity:
            raise ValueError(f"{self.name}: asked for {amount:.3g} of {self.capacity:.3g} bytes")
        if self._waiting or self.held + amount > self.capacity:
            self._waiting.append((amount, then, args))
            return
        self._hold(amount)
        then(*args)

    def give(self, amount: float) -> None:
        """Give back; those who waited for it go on at this moment.

        Raises:
            UnbalancedBooks: for more than is held.
        """
        self.held -= amount
        if self.held < -1e-3 * max(1.0, amount):
            raise UnbalancedBooks(f"{self.name}: {self.held} bytes held")
        self.held = max(0.0, self.held)
        while self._waiting and self.held + self._waiting[0][0] <= self.capacity:
            amount, then, args = self._waiting.popleft()
            self._hold(amount)
            self._sim.after(0.0, then, *args)

    def _hold(self, amount: float) -> None:
        self.held += amount
        self.peak = max(self.peak, self.held)
