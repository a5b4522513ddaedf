# SPDX-License-Identifier: Apache-2.0
"""The page allocator with a quarantine: a freed page that a peer is still reading is not handed out.

A page is always in exactly one place: handed out, free (upstream's lists), or in quarantine. The set kept here equals
the shelf's quarantine; it exists because upstream's leak check wants page numbers.
``available_size`` counts the last two, since a copy ends by itself: an allocation that runs short waits for it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

logger = logging.getLogger("banyan")
T = TypeVar("T")

READER_PATIENCE_S = 60.0
"""A copy takes milliseconds, but it may be queued behind a long forward of its reader. A reader that holds a page for
longer is stuck, and then the pool really is short."""

OLD_S = 0.5
"""From then on a page in quarantine is not counted on where others can be evicted in its place."""

POLL_S = 0.0002


def frame_array(page_ids: torch.Tensor) -> NDArray[np.int64]:
    """Page numbers in the form the native core takes."""
    return page_ids.to(torch.int64).contiguous().numpy()


class OwnPages(Protocol):
    """What an allocator asks before it hands a freed page out. Frames come back as bytes of int64."""

    def retire(self, frames: Any) -> bytes:
        """Withdraw pages; those that nobody reads."""
        ...

    def drain(self) -> bytes:
        """Those that have been let go since."""
        ...


class QuarantiningAllocator(PagedTokenToKVPoolAllocator):
    """Upstream's paged allocator; every freed page passes through the rank's shelf first."""

    _cache: OwnPages | None = None  # set by the linker; upstream's constructor already calls clear()
    _quarantine: Mapping[int, float] = MappingProxyType({})
    """Page -> since when, in seconds of ``time.monotonic``."""
    wait_us = 0
    """How long allocations have waited for pages that were free but not handed out yet."""
    load_patience_s = math.inf
    """The most that pages to load into wait for readers; what gets none is computed."""

    def attach(self, cache: OwnPages) -> None:
        """From now on freed pages are withdrawn from ``cache`` before reuse."""
        self._cache = cache

    @property
    def _num_held(self) -> int:
        """Pages that are free but not handed out yet."""
        return len(self._quarantine)

    @property
    def num_quarantined_tokens(self) -> int:
        """Tokens of freed pages that peers are still reading."""
        return len(self._quarantine) * self.page_size

    def available_size(self) -> int:
        return super().available_size() + self._num_held * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        quarantined = self._page_ids(np.array(sorted(self._quarantine), dtype=np.int64))
        return torch.cat((super().get_all_free_pages(), quarantined))

    def merge_and_sort_free(self) -> None:
        # Upstream sorts whatever get_all_free_pages() counts; here that includes pages which must not be handed out.
        if self.num_staged_pages:
            self.free_pages = super().get_all_free_pages().sort().values
            self.staged_pages, self.num_staged_pages = [], 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        # For loads only: SGLang computes what gets no pages. A prefill or a decode that gets none ends the server.
        allocate = super().alloc
        return self._when_readers_let_go(lambda: allocate(need_size), min(self.load_patience_s, READER_PATIENCE_S))

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        allocate = super().alloc_extend
        return self._when_readers_let_go(lambda: allocate(*args, **kwargs), READER_PATIENCE_S)

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        allocate = super().alloc_decode
        return self._when_readers_let_go(lambda: allocate(*args, **kwargs), READER_PATIENCE_S)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """As upstream's, with what there is to be beside."""
        return super().evict_to_free_tokens(tree_cache, self.tokens_to_have(num_tokens))

    def tokens_to_have(self, num_tokens: int) -> int:
        """How many are to be available before ``num_tokens`` are allocated: what a reader has held for long is not
        counted on."""
        return num_tokens + self._num_old() * self.page_size

    def _num_old(self) -> int:
        # The shards of a rank must evict alike, and only this one knows how old its pages are.
        if not self._quarantine or get_parallel().attn_tp_size > 1:
            return 0
        now_s = time.monotonic()
        return sum(now_s - since_s > OLD_S for since_s in self._quarantine.values())

    def clear(self) -> None:
        super().clear()
        self._quarantine = {}
        if self._cache is not None:
            every_page = np.arange(1, self.num_pages + 1, dtype=np.int64)
            self.free_pages = self._withdraw(every_page, self.free_pages)

    def wait_for_readers(self) -> None:
        """Wait until no page is in quarantine.

        Raises:
            RuntimeError: when a reader does not let go.
        """
        self._wait_until(lambda: not self._num_held, READER_PATIENCE_S)
        if self._num_held:
            raise RuntimeError(f"peers have held {self._num_held} page(s) for over {READER_PATIENCE_S:g} s")

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self._cache is None:
            super()._release_page_ids(*page_ids)
        else:
            freed = torch.cat(page_ids)
            super()._release_page_ids(self._withdraw(frame_array(freed), freed))

    def _withdraw(self, frames: NDArray[np.int64], page_ids: torch.Tensor) -> torch.Tensor:
        """Withdraw pages, given as numbers and as SGLang has them; the ones to free now. Others go to quarantine."""
        assert self._cache is not None
        reusable = np.frombuffer(self._cache.retire(frames), dtype=np.int64)
        if len(reusable) == len(frames):
            return page_ids
        held = set(frames.tolist()).difference(reusable.tolist())
        self._quarantine = {**self._quarantine, **dict.fromkeys(held, time.monotonic())}
        return self._page_ids(reusable)

    def _page_ids(self, frames: NDArray[np.int64]) -> torch.Tensor:
        """Page numbers as SGLang keeps them."""
        return torch.tensor(frames, dtype=torch.int64, device=self.device)

    def _when_readers_let_go(self, allocate: Callable[[], T | None], patience_s: float) -> T | None:
        """Allocate; when the pool is short, take pages out of quarantine as their readers finish, and try again."""
        slots = allocate()
        if slots is not None or not self._num_held:
            return slots

        def retry() -> bool:
            nonlocal slots
            slots = allocate()
            return slots is not None

        began_s = time.monotonic()
        self._wait_until(retry, patience_s)
        self.wait_us += round((time.monotonic() - began_s) * 1e6)
        if slots is None and self._num_held:
            logger.error(
                "banyan: the pool is short and peers have held %d page(s) for over %g s: is a rank stopped?",
                self._num_held,
                patience_s,
            )
        return slots

    def _wait_until(self, enough: Callable[[], bool], patience_s: float) -> None:
        """Free pages as they leave quarantine until ``enough``, or nothing is left in it, or patience ends."""
        deadline = time.monotonic() + patience_s
        while self._num_held and time.monotonic() < deadline:
            if not self._take_drained():
                time.sleep(POLL_S)
            elif enough():
                return

    def _take_drained(self) -> bool:
        assert self._cache is not None
        drained = np.frombuffer(self._cache.drain(), dtype=np.int64)
        if len(drained) == 0:
            return False
        gone = set(drained.tolist())
        self._quarantine = {page: since_s for page, since_s in self._quarantine.items() if page not in gone}
        super()._release_page_ids(self._page_ids(drained))
        return True
