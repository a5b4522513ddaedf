# SPDX-License-Identifier: Apache-2.0
"""A second kind of pages beside full ones, of which a prefix needs only the last few: a model's window pages, or its
states, with frame tables, arena and store of their own. A state is a window of one page.

Below the pool such pages go from the end of a prefix to its beginning (``banyan.restorable``): the arena gives up a
chain's first page last, and the store finds a page behind the one before it. So what is kept longest is what a
conversation goes on from.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from banyan.arena.page_source import Worth, all_that_is_found
from banyan.core import Run
from banyan.ports import OwnFrameTable
from banyan.restorable import WindowPages, longest_restorable, window_of
from banyan.sglang_plugin.pools.access import Window
from banyan.sglang_plugin.rank.kind import Kind
from banyan.supply import Supply


class WindowKind(Kind):
    """One rank's."""

    pages: WindowPages

    def _make_pages(self, frame_table: OwnFrameTable, supply: Supply) -> WindowPages:
        return WindowPages(
            frame_table,
            supply,
            num_pages=self.num_needed,
            reached=self.pools.reached,
            num_draft_layers=self.pools.num_draft_layers,
        )

    @property
    def num_needed(self) -> int:
        """Pages that a length needs before it."""
        assert self.pools.num_needed is not None
        return self.pools.num_needed

    # ---- pages of this rank's tree -----------------------------------------------------------------------------

    def wanted(self, keys: Sequence[str], slots: torch.Tensor) -> tuple[list[str], Any]:
        """What SGLang wants loaded, as the cache takes it: from the end on."""
        return list(keys)[::-1], self.access.frames(slots.flip(0))

    def node(self, keys: Sequence[str], slots: torch.Tensor) -> Window:
        """The pages of this kind of a node, as the pools' access takes them."""
        return keys, self.access.frames(slots)

    def publish(self, keys: Sequence[str], frames: Any) -> None:
        """Offer a chain of complete pages to the peers."""
        self.pages.frame_table.publish(frames, list(keys))

    def back_up(self, keys: Sequence[str]) -> None:
        """The same chain, to the tiers below."""
        chain = list(keys)[::-1]
        if self.tier is None or not chain:
            return
        self.tier.learn([chain])
        self.tier.backup.offer(chain)

    # ---- requests that have come -------------------------------------------------------------------------------

    def restorable(self, keys: Sequence[str], most: int) -> int:
        """The longest length of up to ``most`` pages for which this node, or its store, has what is needed."""
        tier = self.tier
        if tier is None:
            return self.pages.longest(keys, most)
        held = tier.on_node(keys[:most])

        def num_there(pages: Sequence[str]) -> int:
            num_held = sum(1 for _ in takewhile(held.__contains__, pages))
            return num_held + (tier.num_stored(pages[num_held:]) if num_held < len(pages) else 0)

        return longest_restorable(keys, most, self.num_needed, num_there)

    def arrive(self, request: str, keys: Sequence[str]) -> None:
        """A request has come that is going to restore so many pages: bring up what is needed before their end. It is
        read whole: without its last page the others are worth nothing."""
        if self.tier is not None and keys:
            self.tier.arrive(request, window_of(keys, self.num_needed), all_that_is_found)

    def state(self) -> dict[str, Any]:
        """This rank's pages of this kind, for ``/server_info``."""
        allocator = self.pools.allocator
        return {
            "num_window_pages": self.num_needed,
            "num_pool_pages": allocator.num_pages,
            "num_free_pages": allocator.available_size() // allocator.page_size,
            **self.figures(),
            **self.store_figures(),
        }


def capped(worth: Worth, most: int) -> Worth:
    """No more than ``most`` pages are worth it."""
    return partial(_capped, worth, most)


def _capped(worth: Worth, most: int, num_missing: int, found: Run, /) -> int:
    return worth(num_missing, replace(found, num_pages=min(found.num_pages, most))) if most > 0 else 0
