# SPDX-License-Identifier: Apache-2.0
"""What is freed by numbers that live on a GPU: the part that an allocator of pages and one of states have in common.

A page is in one more place here: on its way. SGLang frees page numbers that only the device knows; they are copied to
the host behind the events of the stream that made them, and withdrawn from the peers when they have come. Until then
they are free memory that is not handed out. What the driver refuses to bring is held, and sent again at a later step.
States of a freed page: (held ->) on its way -> free, or quarantine -> free.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from banyan import faults
from banyan.sglang_plugin.pools.quarantine import OwnPages, Quarantine
from banyan.sglang_plugin.pools.readback_order import ReadbackOrder
from banyan.sglang_plugin.pools.reserve import Reserve
from banyan.transport.cuda_ipc.numbers_to_device import NumbersToDevice
from banyan.transport.cuda_ipc.readback import ReadbackLane


class NumbersOnDevice(Quarantine):
    """Nothing here waits for the device unless the pool is short of what is not in use."""

    _lane: ReadbackLane[torch.Tensor] | None = None
    _uploads: NumbersToDevice | None = None
    _freed_events: Callable[[], list[int]]
    _order: ReadbackOrder
    _settle: Callable[[], None]
    _not_sent: tuple[torch.Tensor, ...] = ()
    """Freed, and refused by the driver."""
    _num_taken = 0
    _reserve = Reserve(0)

    def attach_lane(
        self,
        pages: OwnPages,
        lane: ReadbackLane[torch.Tensor],
        uploads: NumbersToDevice,
        freed_events: Callable[[], list[int]],
        reserve: Reserve,
        order: ReadbackOrder,
        settle: Callable[[], None],
    ) -> None:
        """Freed pages go down ``lane`` behind ``freed_events()``, recorded where their numbers are being computed, and
        are withdrawn when their turn in ``order`` has come; those that come out of quarantine go up by ``uploads``.
        ``settle`` takes note of all that the device has done for this rank."""
        self.attach(pages)
        self._lane, self._uploads, self._freed_events, self._reserve = lane, uploads, freed_events, reserve
        self._order, self._settle = order, settle

    @property
    def _num_held(self) -> int:
        num_sent = self._lane.num_pages if self._lane is not None else 0
        return len(self._quarantine) + num_sent + sum(freed.numel() for freed in self._not_sent)

    def _on_their_way(self) -> list[torch.Tensor]:
        return [*(self._lane.tags() if self._lane is not None else ()), *self._not_sent]

    def _send_freed(self, freed: torch.Tensor) -> None:
        """These numbers are freed: they are on their way. Nobody writes to ``freed`` any more."""
        if freed.numel():
            self._not_sent += (freed,)
            self._send_held()

    def _send_held(self) -> None:
        assert self._lane is not None
        try:
            while self._not_sent:
                self._lane.send(self._not_sent[0], self._not_sent[0], behind=self._freed_events())
                self._not_sent = self._not_sent[1:]
                self._order.sent(self)
        except BaseException as error:  # noqa: BLE001 - whatever it is, SGLang is freeing pages
            faults.note("device_numbers.send", error, stops=True)

    def _forget_lane(self) -> None:
        """All is free, also what is on its way."""
        if self._lane is not None:
            self._lane.forget()
            self._order.forget(self)
            self._not_sent = ()

    def take_next(self) -> bool:
        """Withdraw the pages that were freed first; False when their numbers have not come. They have had their turn in
        the order, whatever becomes of them."""
        assert self._lane is not None
        taken = self._lane.take()
        if taken is None:
            return False
        freed, numbers = taken
        frames = np.frombuffer(numbers, np.int64)
        # Nearly always all of them are free now, and `freed` is on the device already.
        self._put_back_or_hold(frames, lambda: self._withdraw(frames, freed))
        self._num_taken += 1
        return True

    def _take_drained(self) -> bool:
        num_taken = self._num_taken
        self._send_held()
        # This rank's own copies may hold what it waits for.
        self._settle()
        return super()._take_drained() or self._num_taken != num_taken

    def _page_ids(self, frames: NDArray[np.int64]) -> torch.Tensor:
        if self._uploads is not None and len(frames):
            pages = torch.empty(len(frames), dtype=torch.int64, device=self.device)
            if self._uploads.send(frames.tobytes(), pages.data_ptr()):
                return pages
        return super()._page_ids(frames)
