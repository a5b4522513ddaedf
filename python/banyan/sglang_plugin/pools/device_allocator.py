# SPDX-License-Identifier: Apache-2.0
"""The page allocator with a quarantine, where page numbers live on a GPU.

A page is in one more place here: on its way. SGLang frees page numbers that only the device knows; they are copied to
the host behind the events of the stream that made them, and withdrawn from the peers when they have come. Until then
they are free memory that is not handed out. States of a freed page: on its way -> free, or quarantine -> free.

The stream that frees is behind the forward in flight, so a page that is evicted when it is needed comes too late for
the next forward. Pages are therefore evicted a step ahead, into a reserve (``banyan.sglang_plugin.pools.reserve``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.quarantine import POLL_S, READER_PATIENCE_S, OwnPages
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.transport.cuda_ipc.readback import ReadbackLane


class DeviceAllocator(QuarantiningAllocator):
    """Nothing here waits for the device unless the pool is short of what is not in use."""

    _lane: ReadbackLane[torch.Tensor] | None = None
    _freed_events: Callable[[], list[int]]
    _order: ReadbackOrder
    _settle: Callable[[], None]
    _num_taken = 0
    _reserve = Reserve(0)

    def attach_lane(
        self,
        pages: OwnPages,
        lane: ReadbackLane[torch.Tensor],
        freed_events: Callable[[], list[int]],
        reserve: Reserve,
        order: ReadbackOrder,
        settle: Callable[[], None],
    ) -> None:
        """Freed pages go down ``lane`` behind ``freed_events()``, recorded where their numbers are being computed, and
        are withdrawn when their turn in ``order`` has come. ``settle`` takes note of all that the device has done
        for this rank."""
        self.attach(pages)
        self._lane, self._freed_events, self._reserve = lane, freed_events, reserve
        self._order, self._settle = order, settle

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self._reserve.loaded(need_size)
        return super().alloc(need_size)

    def tokens_to_have(self, num_tokens: int) -> int:
        """The reserve beside: what is evicted now is there when the next forward is scheduled."""
        return super().tokens_to_have(self._reserve.tokens_to_have(num_tokens, self.available_size()))

    def poll(self) -> None:
        """Take what has come and what readers have let go of. Called on every scheduling step."""
        if self._num_held:
            self._take_drained()

    def _are_free(self, num_tokens: int) -> bool:
        # What is on its way comes behind this rank's own forward, which waits for no peer's scheduler; only when it has
        # come is it known whether a peer reads it.
        lane, began_s = self._lane, time.monotonic()
        while lane is not None and lane.num_pages and not super()._are_free(num_tokens):
            if not self._take_drained():
                time.sleep(POLL_S)
            if time.monotonic() - began_s > READER_PATIENCE_S:
                break
        self.wait_us += round((time.monotonic() - began_s) * 1e6)
        return super()._are_free(num_tokens)

    @property
    def _num_held(self) -> int:
        return len(self._quarantine) + (self._lane.num_pages if self._lane is not None else 0)

    def get_all_free_pages(self) -> torch.Tensor:
        on_their_way = [] if self._lane is None else self._lane.tags()
        return torch.cat((super().get_all_free_pages(), *on_their_way))

    def clear(self) -> None:
        if self._lane is not None:
            self._lane.forget()
            self._order.forget(self)
        super().clear()

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self._lane is None:
            super()._release_page_ids(*page_ids)
            return
        freed = torch.cat(page_ids).to(torch.int64)
        if freed.numel():
            self._lane.send(freed, freed, behind=self._freed_events())
            self._order.sent(self)

    def take_next(self) -> bool:
        """Withdraw the pages that were freed first; False when their numbers have not come."""
        assert self._lane is not None
        taken = self._lane.take()
        if taken is None:
            return False
        freed, numbers = taken
        # Nearly always all of them are free now, and `freed` is on the device already.
        PagedTokenToKVPoolAllocator._release_page_ids(self, self._withdraw(np.frombuffer(numbers, np.int64), freed))
        self._num_taken += 1
        return True

    def _take_drained(self) -> bool:
        num_taken = self._num_taken
        # This rank's own copies may hold what it waits for.
        self._settle()
        return super()._take_drained() or self._num_taken != num_taken

    def _page_ids(self, frames: NDArray[np.int64]) -> torch.Tensor:
        pages = torch.from_numpy(frames.copy())
        if self.device == "cpu":
            return pages
        # From pinned memory: an ordinary upload would wait for the stream.
        return pages.pin_memory().to(self.device, non_blocking=True)
