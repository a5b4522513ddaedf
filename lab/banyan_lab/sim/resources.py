# SPDX-License-Identifier: Apache-2.0
"""What requests compete for: bandwidth that is shared, and room that is held.

A ``Link`` is a fluid server: its flows progress at once, in proportion to their weights. It is exact and costs
O(log n) for each flow, because it keeps one virtual clock (bytes served to a flow of weight 1) and not the progress
of every flow. Flows of two classes share it as virtual lanes do: while both are busy the low one gets its reserve and
no more; a lane that is alone gets everything.

Invariants
  1. Bytes in = bytes out + bytes under way, and the bytes served are the integral of the rate (``audit``).
  2. Room is never negative and never more than there is; who waits for room is served in order.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any

from banyan_lab.sim.engine import FIRST, Action, Simulation

HIGH, LOW = 0, 1
LOW_RESERVE = 0.01
"""Share of a contended link that the low lane keeps, as in DualPath (arXiv 2602.21548): 99 % are for the model's own
communication."""

_SAME_TIME = 1e-9


class UnbalancedBooks(AssertionError):
    """A resource served more or less than was asked of it."""


class _Lane:
    """Flows of one class: their virtual clock, and a heap ordered by the virtual time at which they end."""

    __slots__ = ("flows", "served", "weight")

    def __init__(self) -> None:
        self.served = 0.0
        self.weight = 0.0
        self.flows: list[tuple[float, int, float, float, Action, tuple[Any, ...]]] = []


class Link:
    """Bandwidth under fair sharing with two lanes. One direction of a NIC, a bus, a drive or a memory."""

    __slots__ = (
        "_armed_s",
        "_flows",
        "_lanes",
        "_seen_s",
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
        self._lanes = (_Lane(), _Lane())
        self._flows = 0
        self._seen_s = 0.0
        self._armed_s = float("inf")
        self.bytes_started = 0.0
        self.bytes_done = 0.0
        self.served_bytes = 0.0
        self.busy_s = 0.0

    @property
    def num_flows(self) -> int:
        return len(self._lanes[HIGH].flows) + len(self._lanes[LOW].flows)

    @property
    def pending_bytes(self) -> float:
        """Bytes that were asked for and not served."""
        self._advance()
        return self.bytes_started - self.served_bytes

    def start(self, num_bytes: float, done: Action, *args: Any, weight: float = 1.0, lane: int = HIGH) -> None:
        """Move ``num_bytes``; ``done(*args)`` runs when the last one has passed. Nothing takes no time."""
        if num_bytes <= 0:
            self._sim.after(0.0, done, *args)
            return
        self._advance()
        own = self._lanes[lane]
        self._flows += 1
        self.bytes_started += num_bytes
        own.weight += weight
        heappush(own.flows, (own.served + num_bytes / weight, self._flows, num_bytes, weight, done, args))
        self._arm()

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the bandwidth from now on: interference, or a degraded link."""
        self._advance()
        self.bytes_per_s = bytes_per_s
        self._armed_s = float("inf")
        self._arm()

    def _rates(self) -> tuple[float, float]:
        high, low = self._lanes
        if high.flows and low.flows:
            return self.bytes_per_s * (1 - LOW_RESERVE), self.bytes_per_s * LOW_RESERVE
        return (self.bytes_per_s, 0.0) if high.flows else (0.0, self.bytes_per_s)

    def _advance(self) -> None:
        elapsed_s = self._sim.now_s - self._seen_s
        self._seen_s = self._sim.now_s
        high, low = self._lanes
        if elapsed_s <= 0 or not (high.flows or low.flows):
            return
        for lane, rate in zip(self._lanes, self._rates(), strict=True):
            if lane.flows:
                lane.served += rate * elapsed_s / lane.weight
                self.served_bytes += rate * elapsed_s
        self.busy_s += elapsed_s

    def _next_end_s(self) -> float:
        ends_s = float("inf")
        for lane, rate in zip(self._lanes, self._rates(), strict=True):
            if lane.flows and rate > 0:
                ends_s = min(ends_s, self._seen_s + max(0.0, lane.flows[0][0] - lane.served) * lane.weight / rate)
        return ends_s

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
        for lane, rate in zip(self._lanes, self._rates(), strict=True):
            # Rounding leaves the last flow a hair short of its end: less than a nanosecond of its rate.
            hair = rate * _SAME_TIME / lane.weight if lane.flows else 0.0
            while lane.flows and lane.flows[0][0] - lane.served <= hair:
                _, _, num_bytes, weight, done, args = heappop(lane.flows)
                lane.weight -= weight
                self.bytes_done += num_bytes
                ended.append((done, args))
            if not lane.flows:
                lane.served = lane.weight = 0.0
        if self.num_flows == 0:
            self.served_bytes = self.bytes_done
        else:
            self._arm()
        for done, args in ended:
            done(*args)

    def audit(self) -> None:
        """Check the books.

        Raises:
            UnbalancedBooks: when bytes were lost or invented.
        """
        self._advance()
        under_way = 0.0
        for lane in self._lanes:
            for end, _, num_bytes, weight, _, _ in lane.flows:
                left = (end - lane.served) * weight
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
