# SPDX-License-Identifier: Apache-2.0
"""SGLang's NIXL sender, by layers: what a forward has completed leaves while it goes on.

A layer batch of an advance is a chunk in SGLang's own queue, with the advance's own page numbers. So aborts, failures
and acknowledgements treat it as any other chunk: of a room that was given up nothing more is sent, and the decode
server's pages stay in use until nothing is under way to them. Behind the layer batches comes the chunk itself, once its
forward has ended: it sends what they have left, and the pages of which it cannot prove that they were sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll

from banyan.features.pairs.advance import Advance, Pace, layers_of_regions
from banyan.features.pairs.asked_rooms import AskedRooms
from banyan.sglang_plugin.rank.reporting import report

Pages = npt.NDArray[np.int32]

SETTLE_PAUSE_S = 0.0005
"""Between two looks at a transfer on a CPU: the sender's thread would take a core from the forward."""

SLOW_S, LEAST_BYTES_PER_S = 30.0, 4 << 20
"""A chunk takes no longer than so many seconds beside what its bytes take at this rate: others wait behind it."""

GIVEN_UP_S = 1.0
"""As ``SLOW_S``, of a room that has been given up."""


class PagesInAdvance:
    """An advance, and which pages it sends: ``pages`` go to the places from ``first`` on of the hand-over."""

    def __init__(self, pages: Pages, first: int, *, layer_bytes: int, least_bytes: int) -> None:
        self.pages = pages
        self.first = first
        self.advance = Advance(layer_bytes=layer_bytes, least_bytes=least_bytes)
        self.has_begun = False

    def num_sent(self, pages: Pages, first: int) -> npt.NDArray[np.int64]:
        """Of each of ``pages``, at the places from ``first`` on, how many layers this has sent there."""
        start, stop = max(first, self.first), min(first + len(pages), self.first + len(self.pages))
        sent = np.zeros(len(pages), dtype=np.int64)
        if start < stop:
            here, there = slice(start - first, stop - first), slice(start - self.first, stop - self.first)
            sent[here] = np.where(pages[here] == self.pages[there], self.advance.num_taken, 0)
        return sent


class _Watched:
    """A sender's queue. Its thread's chunk is noted, with the layers that it sends where it is a layer batch."""

    def __init__(self, queue: Any, sender: LayerwiseSender) -> None:
        self._queue = queue
        self._sender = sender

    def get(self) -> Any:
        chunk = self._queue.get()
        self._sender.begins(chunk)
        return chunk

    def put(self, chunk: Any) -> None:
        self._queue.put(chunk)


class LayerwiseSender:
    """In front of SGLang's ``NixlKVManager``, and behind ``HandOver``, whose ``rooms`` it asks.

    States of a page in a room: in advance (its first layers sent) -> sent with its chunk, or forgotten with the room.
    """

    rooms: AskedRooms

    def prepare_advances(self) -> None:
        """To be called before SGLang's own construction, which starts the senders' threads."""
        self._at = threading.local()
        self._advances: dict[int, list[PagesInAdvance]] = {}
        self._layer_of_region: npt.NDArray[np.int64] | None = None
        self._pace = Pace()

    # ---- the scheduler's thread --------------------------------------------------------------------------------

    def knows_layers(self, num_layers: int) -> bool:
        """Whether the pool's regions are those of a model with so many layers; asked before the first advance."""
        args: Any = self.kv_args  # type: ignore[attr-defined]
        if self._layer_of_region is None and not args.kv_layer_ids:
            layers = layers_of_regions(
                len(args.kv_data_ptrs),
                num_layers=num_layers,
                num_draft_regions=args.num_draft_entries,
                parts_per_layer=1 if self.is_mla_backend else 2,  # type: ignore[attr-defined]
            )
            self._layer_of_region = None if layers is None else np.array(layers, dtype=np.int64)
        return self._layer_of_region is not None

    def begin_advance(self, room: int, pages: Pages, first: int) -> PagesInAdvance | None:
        """Make ready to send ``pages``, which a forward is about to complete; None where that is not possible."""
        # One that was given up since its batch was chosen would be forgotten by nobody.
        if self._layer_of_region is None or not self.rooms.is_claimed(room) or not self._goes_page_by_page(room):
            return None
        num_layers = int(self._layer_of_region.max()) + 1
        layer_bytes = len(pages) * sum(self.kv_args.kv_item_lens) // num_layers  # type: ignore[attr-defined]
        ahead = PagesInAdvance(pages, first, layer_bytes=layer_bytes, least_bytes=self._pace.least_bytes)
        self._advances[room] = [*self._advances.get(room, ()), ahead]
        return ahead

    def layers_completed(self, room: int, ahead: PagesInAdvance, num_layers: int) -> None:
        if ahead.advance.completed(num_layers):
            if not ahead.has_begun:
                ahead.has_begun = True
                report.counters().advanced_pages += len(ahead.pages)
            place = slice(ahead.first, ahead.first + len(ahead.pages))
            super().add_transfer_request(room, ahead.pages, place, False)  # type: ignore[misc]

    def forget_advances(self, room: int) -> None:
        """The room is over."""
        self._advances.pop(room, None)

    def _goes_page_by_page(self, room: int) -> bool:
        """Whether each page goes as it is to one place of each decode server of this room, by prepared lists."""
        manager: Any = self
        peers = [info for info in list(manager.transfer_infos.get(room, {}).values()) if not info.is_dummy]
        return (
            bool(peers)
            and not manager.enable_staging
            and manager.pp_size == 1
            and manager.kv_shard_size == 1
            and not manager.enable_all_cp_ranks_for_transfer
            and "" in manager.prep_handles
            and all(info.agent_name in manager.prep_handles for info in peers)
        )

    # ---- a sender's thread -------------------------------------------------------------------------------------

    def transfer_worker(self, queue: Any, *more: Any, **named: Any) -> None:
        super().transfer_worker(_Watched(queue, self), *more, **named)  # type: ignore[misc]

    def begins(self, chunk: Any) -> None:
        """This thread is about to send ``chunk``."""
        mine = self._advances.get(chunk.room, ())
        layer_batch = next((ahead for ahead in mine if ahead.pages is chunk.prefill_kv_indices), None)
        self._at.chunk = chunk
        self._at.layers = layer_batch.advance.take() if layer_batch is not None else None
        self._at.posted_bytes, self._at.begun_s = 0, time.perf_counter()

    def send_kvcache(
        self,
        peer_name: str,
        prefill_kv_indices: Pages,
        dst_kv_ptrs: Any,
        dst_kv_indices: Pages,
        *more: Any,
        **named: Any,
    ) -> Any:
        """Post what this thread's chunk has to send to one decode server; None where nothing is left."""
        chunk, layers = self._at.chunk, self._at.layers
        ahead = self._advances.get(chunk.room, ())
        if layers is None and not ahead:
            return super().send_kvcache(peer_name, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, *more, **named)  # type: ignore[misc]
        num_pages = len(prefill_kv_indices)
        if layers is not None:
            begin, end = np.full(num_pages, layers.start), layers.stop
        else:
            begin, end = _sent(ahead, prefill_kv_indices, chunk.index_slice.start or 0), None
        return self._post(peer_name, prefill_kv_indices, dst_kv_indices, begin, end)

    def _post(
        self, peer_name: str, sources: Pages, targets: Pages, begin: npt.NDArray[np.int64], end: int | None
    ) -> Any:
        """Post the layers of each page from its ``begin`` on, before ``end`` where there is one."""
        manager: Any = self
        assert self._layer_of_region is not None
        layer = self._layer_of_region[:, None]
        wanted = layer >= begin[None, :]
        if end is not None:
            wanted &= layer < end
        if not wanted.any():
            return None
        region = np.arange(len(self._layer_of_region), dtype=np.int32)[:, None]
        num_targets = manager.decode_kv_args_table[peer_name].dst_num_slots
        handle = manager.agent.make_prepped_xfer(
            "WRITE",
            manager.prep_handles[""],
            (region * manager._num_slots_src + sources[None, :])[wanted].astype(np.int32),
            manager.prep_handles[peer_name],
            (region * (num_targets or manager._num_slots_src) + targets[None, :])[wanted].astype(np.int32),
        )
        if not handle:
            raise RuntimeError(f"NIXL made no transfer of layers to {peer_name}")
        manager._post_xfer(handle, "layers could not be posted")
        self._at.posted_bytes += int(wanted.sum(axis=1) @ np.array(manager.kv_args.kv_item_lens))
        return handle

    def settle(self, handles: Iterable[Any]) -> bool:
        """Wait, with pauses, while all of ``handles`` are well and some under way; SGLang's own wait has none, and no
        end behind a decode server that stands still. False where it took too long. A sender's thread, which thereby
        learns how fast its chunk has left."""
        manager: Any = self
        chunk = self._at.chunk
        chunk_bytes = len(chunk.prefill_kv_indices) * sum(manager.kv_args.kv_item_lens)
        late_s = time.perf_counter() + chunk_bytes / LEAST_BYTES_PER_S
        while True:
            states = [manager.agent.check_xfer_state(handle) for handle in handles]
            if "PROC" not in states or "ERR" in states:
                break
            is_given_up = manager.request_status.get(chunk.room, KVPoll.Failed) == KVPoll.Failed
            if time.perf_counter() > late_s + (GIVEN_UP_S if is_given_up else SLOW_S):
                return False
            time.sleep(SETTLE_PAUSE_S)
        if self._at.posted_bytes and "ERR" not in states:
            self._pace.sent(self._at.posted_bytes, time.perf_counter() - self._at.begun_s)
        return True


def _sent(ahead: Iterable[PagesInAdvance], pages: Pages, first: int) -> npt.NDArray[np.int64]:
    sent = np.zeros(len(pages), dtype=np.int64)
    for each in ahead:
        sent = np.maximum(sent, each.num_sent(pages, first))
    return sent
