# SPDX-License-Identifier: Apache-2.0
"""A rank's window pages, or its states: a second membership beside that of its full pages, with shelves, arena and
store of its own. A state is a window of one page.

Below the pool window pages go from the end of a prefix to its beginning (``banyan.windows``): the arena gives up a
chain's first page last, and the store finds a page behind the one before it. So what is kept longest is what a
conversation goes on from.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from banyan.arena.prefetch import Worth
from banyan.core import SourceKind
from banyan.ports import PageStore
from banyan.sglang_plugin.pools.access import Window
from banyan.sglang_plugin.pools.state_pool import States
from banyan.sglang_plugin.pools.two_pools import Windows
from banyan.sglang_plugin.rank.membership import Membership, Portion
from banyan.sglang_plugin.rank.tiers import HostTier
from banyan.windows import WindowPages, longest_restorable, window_of


def all_of_it(num_missing: int, num_found: int, kind: SourceKind, /) -> int:
    """A window is read whole: without its last page the others are worth nothing."""
    return num_found


class RankWindows:
    """One rank's. ``pages`` is what its cache knows of it."""

    def __init__(self, windows: Windows | States, member: Membership) -> None:
        shelf, supply = member.join()
        self._windows = windows
        self.member = member
        self.allocator = windows.allocator
        self.pages = WindowPages(shelf=shelf, supply=supply, num_pages=windows.num_pages, places=windows.places)
        member.access.guard(windows.allocator, self.pages)

    # ---- pages of this rank's tree -----------------------------------------------------------------------------

    def wanted(self, keys: Sequence[str], slots: torch.Tensor) -> tuple[list[str], Any]:
        """What SGLang wants loaded, as the cache takes it: from the end on."""
        return list(keys)[::-1], self.member.access.frames(slots.flip(0))

    def node(self, keys: Sequence[str], slots: torch.Tensor) -> Window:
        """The window pages of a node, as the pools' access takes them."""
        return keys, self.member.access.frames(slots)

    def publish(self, keys: Sequence[str], frames: Any) -> None:
        """Offer a chain of complete pages to the peers."""
        self.pages.publish(frames, list(keys))

    def back_up(self, keys: Sequence[str]) -> None:
        """The same chain, to the tiers below."""
        tier, chain = self.member.tier, list(keys)[::-1]
        if tier is None or not chain:
            return
        if tier.store is not None:
            tier.store.learn([chain])
        tier.back_up(chain)

    # ---- requests that have come -------------------------------------------------------------------------------

    def restorable(self, keys: Sequence[str], most: int) -> int:
        """The longest length of up to ``most`` pages whose window pages are on this node or in its store."""
        return longest_restorable(keys, most, self._windows.num_pages, self._num_held)

    def _num_held(self, keys: Sequence[str]) -> int:
        tier = self.member.tier
        if tier is None:
            return self.pages.supply.num_supplied(keys)
        num_held = tier.num_on_node(keys)
        return num_held if tier.store is None else num_held + tier.store.num_stored(keys[num_held:])

    def arrive(self, request: str, keys: Sequence[str]) -> None:
        """A request has come that is going to restore so many pages: bring up the window before their end."""
        tier = self.member.tier
        if tier is not None and keys:
            tier.arrive(request, window_of(keys, self._windows.num_pages), all_of_it)

    def arrive_behind(self, full: HostTier, request: str, keys: list[str], worth: Worth) -> None:
        """A request for the prompt of ``keys`` has come: bring up as many full pages as can be restored, and the window
        before their end. ``full``: the tier of full pages."""
        num_held = full.num_on_node(keys)
        num_there = num_held if full.store is None else max(num_held, full.store.num_stored(keys))
        full.arrive(request, keys, capped(worth, self.restorable(keys, num_there) - num_held))
        num_coming = num_held + full.prefetch.num_arriving(keys[num_held:])
        self.arrive(request, keys[: self.restorable(keys, num_coming)])

    # ---- life --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Collect what copies and I/O have finished. Never waits."""
        self.member.access.poll()
        if self.member.tier is not None:
            self.member.tier.poll()

    def rejoin(self) -> None:
        """Go on under the namespace of weights that have just changed; the old one has been left."""
        self.pages.move_to(self.member.rejoin)

    @property
    def told_as(self) -> str:
        """What they are called in ``/server_info``."""
        return "states" if isinstance(self._windows, States) else "windows"

    def state(self) -> dict[str, Any]:
        """This rank's windows, or states, for ``/server_info``."""
        return {
            "num_window_pages": self._windows.num_pages,
            "num_pool_pages": self.allocator.num_pages,
            "num_free_pages": self.allocator.available_size() // self.allocator.page_size,
            **self.member.figures(),
        }


def capped(worth: Worth, most: int) -> Worth:
    """No more than ``most`` pages are worth it."""
    return partial(_capped, worth, most)


def _capped(worth: Worth, most: int, num_missing: int, num_found: int, kind: SourceKind, /) -> int:
    return min(most, worth(num_missing, min(num_found, most), kind)) if most > 0 else 0


class BothStores:
    """The stores of full pages and of window pages, told as one when to write."""

    def __init__(self, stores: Sequence[PageStore]) -> None:
        self._stores = stores

    def pause_writes(self) -> None:
        for store in self._stores:
            store.pause_writes()

    def open_writes(self) -> None:
        for store in self._stores:
            store.open_writes()


def portions(beside: Windows | States) -> tuple[Portion, Portion]:
    """Of full pages, and of window pages or states; what the flags give a rank is divided between both kinds."""
    kind: Literal["window", "state"] = "window" if isinstance(beside, Windows) else "state"
    return Portion("full", beside.layers, 1.0 - beside.share), Portion(kind, beside.layers, beside.share)
