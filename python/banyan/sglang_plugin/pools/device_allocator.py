# SPDX-License-Identifier: Apache-2.0
"""The page allocator with a quarantine, where page numbers live on a GPU (``device_numbers``).

The stream that frees is behind the forward in flight, so a page that is evicted when it is needed comes too late for
the next forward. Pages are therefore evicted a step ahead, into a reserve (``banyan.sglang_plugin.pools.reserve``).
"""

from __future__ import annotations

import time

import torch

from banyan.pacing.lockstep import READER_PATIENCE_S
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.device_numbers import NumbersOnDevice
from banyan.sglang_plugin.pools.quarantine import POLL_S


class DeviceAllocator(NumbersOnDevice, QuarantiningAllocator):
    """Of pages of tokens."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        self._reserve.loaded(need_size)
        return super().alloc(need_size)

    def tokens_to_have(self, num_tokens: int) -> int:
        """The reserve beside: what is evicted now is there when the next forward is scheduled."""
        return super().tokens_to_have(self._reserve.tokens_to_have(num_tokens, self.available_size()))

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

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((super().get_all_free_pages(), *self._on_their_way()))

    def clear(self) -> None:
        self._forget_lane()
        super().clear()

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        if self._lane is None:
            super()._release_page_ids(*page_ids)
        else:
            self._send_freed(torch.cat(page_ids).to(torch.int64))
