# SPDX-License-Identifier: Apache-2.0
"""The page allocator with a quarantine: a freed page that a peer is still reading is not handed out.

A page is always in exactly one place: handed out, free (upstream's lists), or in quarantine. The set kept here equals
the shelf's quarantine; it exists because upstream's leak check wants page numbers.
``available_size`` counts the last two, since a copy ends by itself: an allocation that runs short waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from banyan.cache import PrefixCache
from banyan.sglang_plugin import runtime

logger = logging.getLogger("banyan")
T = TypeVar("T")

READER_PATIENCE_S = 10.0
"""A copy takes milliseconds. A reader that holds a page for longer is stuck, and then the pool really is short."""

POLL_S = 0.0002


def around_get_paged_allocator_cls(original: Callable[..., Any], platform: Any) -> type | None:
    chosen = original(platform)
    if not runtime.is_sharing():
        return chosen
    if chosen is not None:
        runtime.refuse(f"this platform has its own page allocator ({chosen.__name__}): use --banyan-share off")
    if not runtime.is_on_gpu():
        return QuarantiningAllocator
    from banyan.sglang_plugin.device_allocator import DeviceAllocator

    return DeviceAllocator


def frame_array(page_ids: torch.Tensor) -> NDArray[np.int64]:
    """Page numbers in the form the native core takes."""
    return page_ids.to(torch.int64).contiguous().numpy()


class QuarantiningAllocator(PagedTokenToKVPoolAllocator):
    """Upstream's paged allocator; every freed page passes through the rank's shelf first."""

    _cache: PrefixCache | None = None  # set by the linker; upstream's constructor already calls clear()
    _quarantine: frozenset[int] = frozenset()

    def attach(self, cache: PrefixCache) -> None:
        """From now on freed pages are withdrawn from ``cache`` before reuse."""
        self._cache = cache

    @property
    def _num_held(self) -> int:
        """Pages that are free but not handed out yet."""
        return len(self._quarantine)

    def available_size(self) -> int:
        return super().available_size() + self._num_held * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        quarantined = self._page_ids(np.array(sorted(self._quarantine), dtype=np.int64))
        return torch.cat((super().get_all_free_pages(), quarantined))

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self._when_readers_let_go(lambda: super(QuarantiningAllocator, self).alloc(need_size))

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._when_readers_let_go(lambda: super(QuarantiningAllocator, self).alloc_extend(*args, **kwargs))

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._when_readers_let_go(lambda: super(QuarantiningAllocator, self).alloc_decode(*args, **kwargs))

    def clear(self) -> None:
        super().clear()
        self._quarantine = frozenset()
        if self._cache is not None:
            every_page = np.arange(1, self.num_pages + 1, dtype=np.int64)
            self.free_pages = self._withdraw(every_page, self.free_pages)

    def settle(self) -> None:
        """Wait until no page is in quarantine.

        Raises:
            RuntimeError: when a reader does not let go.
        """
        self._wait_for_readers(lambda: not self._num_held)
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
        self._quarantine |= set(frames.tolist()).difference(reusable.tolist())
        return self._page_ids(reusable)

    def _page_ids(self, frames: NDArray[np.int64]) -> torch.Tensor:
        """Page numbers as SGLang keeps them."""
        return torch.tensor(frames, dtype=torch.int64, device=self.device)

    def _when_readers_let_go(self, allocate: Callable[[], T | None]) -> T | None:
        """Allocate; when the pool is short, take pages out of quarantine as their readers finish, and try again."""
        slots = allocate()
        if slots is not None or not self._num_held:
            return slots

        def retry() -> bool:
            nonlocal slots
            slots = allocate()
            return slots is not None

        self._wait_for_readers(retry)
        if slots is None and self._num_held:
            logger.error(
                "banyan: the pool is short and peers have held %d page(s) for over %g s: is a rank stopped?",
                self._num_held,
                READER_PATIENCE_S,
            )
        return slots

    def _wait_for_readers(self, enough: Callable[[], bool]) -> None:
        """Free pages as they leave quarantine until ``enough``, or nothing is left in it, or patience ends."""
        deadline = time.monotonic() + READER_PATIENCE_S
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
        self._quarantine -= set(drained.tolist())
        super()._release_page_ids(self._page_ids(drained))
        return True
