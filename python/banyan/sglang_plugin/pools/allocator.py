# SPDX-License-Identifier: Apache-2.0
"""The page allocator with a quarantine: a freed page that a peer is still reading is not handed out.

``available_size`` counts free pages and those in quarantine, since a copy ends by itself: an allocation that runs short
waits for it (``pools.quarantine``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from banyan.pacing.lockstep import LOAD_PATIENCE_S, READER_PATIENCE_S
from banyan.sglang_plugin.pools.quarantine import (
    CIRCLE_S,
    NO_PAGES,
    OLD_S,
    POLL_S,
    Quarantine,
    frame_array,
)

logger = logging.getLogger("banyan")


class QuarantiningAllocator(Quarantine, PagedTokenToKVPoolAllocator):
    """Upstream's paged allocator; every freed page passes through the rank's frame table first."""

    staged_pages: list[Any]
    num_staged_pages: int

    least_evicted_tokens = 0
    """That go at once where any have to."""

    _needed_tokens = 0

    _told_held: frozenset[int] = frozenset()
    """What peers held when that was said last."""

    is_copying_down: Callable[[], bool] = staticmethod(lambda: False)
    """Whether pages that were freed are on their way to the arena: they come by themselves."""

    is_in_step = False
    """Whether ranks step together: all wait for what one waits for."""

    decodes_on_held = True
    """Whether a decode waits for pages that peers are still reading. Where not, SGLang retracts a request at once."""

    @property
    def num_uncounted_tokens(self) -> int:
        """Tokens of pages that count as free, and that nothing is planned with: what a reader has held for long, and
        where no decode waits for readers all that is held."""
        if not self.decodes_on_held:
            return len(self._quarantine) * self.page_size
        # The shards of a rank must evict alike, and only this one knows how old its pages are.
        if not self._quarantine or not self.is_whole_rank:
            return 0
        now_s = time.monotonic()
        return self.page_size * sum(now_s - since_s > OLD_S for since_s in self._quarantine.values())

    def available_size(self) -> int:
        return super().available_size() + self._num_held * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((super().get_all_free_pages(), self._quarantined_ids()))

    def merge_and_sort_free(self) -> None:
        # Upstream sorts whatever get_all_free_pages() counts; here that includes pages which must not be handed out.
        if self.num_staged_pages:
            self.free_pages = super().get_all_free_pages().sort().values
            self.staged_pages = []
            self.num_staged_pages = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        # For loads only: SGLang computes what gets no pages. A prefill or a decode that gets none ends the server.
        allocate = super().alloc
        if not self.is_in_step and super().available_size() < need_size <= self.available_size():
            self._wait_for_what_comes(need_size)
        # One shard that computed alone would leave the others waiting for its part of the next agreement.
        return self._if_all_shards_got(self._when_readers_let_go(lambda: allocate(need_size), LOAD_PATIENCE_S))

    def _wait_for_what_comes(self, num_tokens: int) -> None:
        """Longer than for readers: the forward in flight, behind which numbers of freed pages come to the host, and
        copies down wait for nobody."""
        began_s, came_s = time.monotonic(), 0.0
        while not QuarantiningAllocator._are_free(self, num_tokens):
            has_unread = self._num_held > len(self._quarantine)
            if not has_unread and not self.is_copying_down():
                break
            if self._take_drained():
                # Copies go piece by piece: the next ones are behind this one.
                came_s = came_s if has_unread else time.monotonic()
                continue
            # A copy that was broken off may never end: what has been held for so long is no reason to wait.
            held_s = began_s if has_unread else min(began_s, max(self._quarantine.values(), default=0.0))
            if time.monotonic() > min(max(held_s, came_s) + OLD_S, began_s + CIRCLE_S):
                break
            time.sleep(POLL_S)
        self.wait_us += round((time.monotonic() - began_s) * 1e6)

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        allocate = super().alloc_extend
        return self._when_readers_let_go(lambda: allocate(*args, **kwargs), READER_PATIENCE_S)

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        allocate = super().alloc_decode
        return self._when_readers_let_go(lambda: allocate(*args, **kwargs), READER_PATIENCE_S)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """As upstream's, with what there is to be beside; where that is too little, several pages go at once: each
        walk looks at all leaves that are kept."""
        self.evict_from(tree_cache, "num_tokens")
        self._needed_tokens = num_tokens = self.tokens_to_have(num_tokens)
        if num_tokens > (num_available := self.available_size()):
            num_tokens = max(num_tokens, num_available + self.least_evicted_tokens)
        try:
            return super().evict_to_free_tokens(tree_cache, num_tokens)
        finally:
            self._needed_tokens = 0

    @property
    def has_what_it_needs(self) -> bool:
        """Whether what is being evicted for an allocation is more than that needs."""
        return 0 < self._needed_tokens <= self.available_size()

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """As upstream's, with what can be handed out without another wait: a decode that gets no page ends the server.
        A last request is not retracted but aborted: it waits for readers rather."""
        has_room = super().check_decode_capacity(
            num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, spec_algorithm=spec_algorithm
        )
        # Shards of a rank must answer alike, and only this one knows what its readers hold.
        if not has_room or not self.is_whole_rank or self._are_free(num_tokens):
            return has_room
        if requests is not None and len(requests) <= 1:
            return self._become_free(num_tokens, READER_PATIENCE_S)
        return self.decodes_on_held and self._become_free(num_tokens, CIRCLE_S)

    def _become_free(self, num_tokens: int, patience_s: float) -> bool:
        """Whether readers let go of so many. What one has held for as long is not waited for again: SGLang asks once
        more for each request that it retracts."""
        held_s = time.monotonic() - max(self._quarantine.values(), default=0.0)
        if self._when_readers_let_go(lambda: self._are_free(num_tokens) or None, patience_s - held_s):
            return True
        held = frozenset(self._quarantine)
        if held != self._told_held:
            self._told_held = held
            logger.warning(
                "banyan: the pool is short and peers have held %d page(s) for over %g s: SGLang takes requests back "
                "(is a rank stopped?)",
                len(held),
                patience_s,
            )
        return False

    def _are_free(self, num_tokens: int) -> bool:
        """Whether so many can be handed out without waiting for anybody."""
        return super().available_size() >= num_tokens

    def tokens_to_have(self, num_tokens: int) -> int:
        """How many are to be available before ``num_tokens`` are allocated."""
        return num_tokens + self.num_uncounted_tokens

    def clear(self) -> None:
        super().clear()
        self._quarantine, self._not_withdrawn = {}, NO_PAGES
        if self._cache is not None:
            every_page = np.arange(1, self.num_pages + 1, dtype=np.int64)
            self.free_pages = self._withdraw(every_page, self.free_pages)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        # Also within a group of frees: SGLang may have given the keys of these pages to others, which are offered ahead
        # of its end, and a key that a page still has is no other page's.
        if page_ids.numel():
            self._release_page_ids(page_ids)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self._cache is None:
            super()._release_page_ids(*page_ids)
        else:
            freed = page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids)
            super()._release_page_ids(self._withdraw(frame_array(freed), freed))

    def _put_back(self, page_ids: torch.Tensor) -> None:
        super()._release_page_ids(page_ids)
