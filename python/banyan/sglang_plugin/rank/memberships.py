# SPDX-License-Identifier: Apache-2.0
"""All memberships of a rank: that of its full pages and, where a model has them, that of its window pages or
states. They come and go together. Scheduler thread only."""

from __future__ import annotations

from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.rank.membership import Membership


class Memberships:
    """``both``: each membership, the one of full pages first, with the allocator of its pool."""

    def __init__(self, *both: tuple[Membership, QuarantiningAllocator]) -> None:
        self._both = both

    @property
    def wait_us(self) -> int:
        """How long allocations have waited for peers that read pages."""
        return sum(allocator.wait_us for _, allocator in self._both)

    def wait_for_copies(self) -> None:
        """Nothing that was published is still on its way down."""
        for member, _ in self._both:
            member.access.wait_for_copies()

    def leave(self) -> None:
        """Leave all places.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        for member, allocator in self._both:
            member.leave_tier()
            allocator.wait_for_readers()
            member.leave()

    def withdraw(self) -> None:
        """Forget every page below the pools, and withdraw those in them: SGLang keeps them.

        Raises:
            RuntimeError: when a peer does not stop reading.
        """
        self.empty()
        for member, allocator in self._both:
            # What has been freed before is its own to hand out again.
            allocator.wait_for_readers()
            member.withdraw()

    def stand_apart(self) -> None:
        """From the next ``rejoin`` on, share with no other rank."""
        for member, _ in self._both:
            member.stand_apart()

    def meet_again(self) -> None:
        """From the next ``rejoin`` on, share with the ranks whose weights took the same updates."""
        for member, _ in self._both:
            member.meet_again()

    def empty(self) -> None:
        """Forget every page below the pools."""
        for member, _ in self._both:
            member.empty()

    def close_tiers(self) -> None:
        """Leave the arena for good."""
        for member, _ in self._both:
            member.close_tier()

    def close(self) -> None:
        """Leave for good."""
        for member, _ in self._both:
            member.close()
