# SPDX-License-Identifier: Apache-2.0
"""The page allocator with a quarantine: a freed page that a peer is still reading is not handed out.

``available_size`` counts free pages and those in quarantine, since a copy ends by itself: an allocation that runs short
waits for it (``pools.quarantine``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from banyan.sglang_plugin.pools.quarantine import NO_PAGES, OLD_S, READER_PATIENCE_S, Quarantine, frame_array


class QuarantiningAllocator(Quarantine, PagedTokenToKVPoolAllocator):
    """Upstream's paged allocator; every freed page passes through the rank's frame table first."""

    load_patience_s: Callable[[], float] = staticmethod(lambda: READER_PATIENCE_S)
    """The most that pages to load into wait for readers; what gets none is computed."""

    staged_pages: list[Any]
    num_staged_pages: int

    least_evicted_tokens = 0
    """That go at once where any have to."""

    _needed_tokens = 0

    decodes_on_held = True
    """Whether a decode is planned with pages that peers are still reading. Where not, SGLang retracts a request."""

    @property
    def num_quarantined_tokens(self) -> int:
        """Tokens of freed pages that peers are still reading."""
        return len(self._quarantine) * self.page_size

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
        # One shard that computed alone would leave the others waiting for its part of the next agreement.
        return self._if_all_shards_got(self._when_readers_let_go(lambda: allocate(need_size), self.load_patience_s()))

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
        """As upstream's. A last request is not retracted but aborted: it waits for readers rather."""
        has_room = super().check_decode_capacity(
            num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, spec_algorithm=spec_algorithm
        )
        is_last = requests is not None and len(requests) <= 1
        return has_room and (self.decodes_on_held or is_last or self._are_free(num_tokens))

    def _are_free(self, num_tokens: int) -> bool:
        """Whether so many can be handed out without waiting for anybody."""
        return super().available_size() >= num_tokens

    def tokens_to_have(self, num_tokens: int) -> int:
        """How many are to be available before ``num_tokens`` are allocated: what a reader has held for long is not
        counted on, and where no decode is planned with what is held, nothing that is."""
        return num_tokens + self._num_uncounted() * self.page_size

    def _num_uncounted(self) -> int:
        if not self.decodes_on_held:
            return len(self._quarantine)
        # The shards of a rank must evict alike, and only this one knows how old its pages are.
        if not self._quarantine or not self.is_whole_rank:
            return 0
        now_s = time.monotonic()
        return sum(now_s - since_s > OLD_S for since_s in self._quarantine.values())

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
            freed = torch.cat(page_ids)
            super()._release_page_ids(self._withdraw(frame_array(freed), freed))

    def _put_back(self, page_ids: torch.Tensor) -> None:
        super()._release_page_ids(page_ids)
