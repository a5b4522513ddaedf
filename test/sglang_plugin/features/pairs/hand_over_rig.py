# SPDX-License-Identifier: Apache-2.0
"""A prefill server's sender and a decode server's pages, with SGLang's own queue, worker, rooms and acknowledgements;
instead of NIXL an agent whose writes land bit by bit, some time after they were posted."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.utils import DisaggregationMode

from banyan.features.pairs.rank import by_nixl

NUM_LAYERS, NUM_REGIONS, NUM_SLOTS = 6, 12, 64
AGENT, ENDPOINT = "decode", ("10.0.0.2", 4242)
PAGE_LAYER_BYTES = 256 << 10
"""So that each layer of each page is worth a layer batch."""


class Ending(FastQueue):
    """A queue that ends its worker, which else runs for ever."""

    def get(self):
        chunk = super().get()
        if chunk is None:
            raise SystemExit
        return chunk


class SlowAgent:
    """Region r of slot s lies at index ``r * NUM_SLOTS + s``. A write copies one word at each look at it."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self.source = np.zeros(NUM_REGIONS * NUM_SLOTS, dtype=np.int64)
        self.target = np.zeros(NUM_REGIONS * NUM_SLOTS, dtype=np.int64)
        self.owner = {}
        """Decode page -> room, while the room may write there."""
        self.stray, self.num_words = [], 0
        self.room = None

    def make_prepped_xfer(self, operation, source, source_indices, target, target_indices):
        assert (operation, source, target) == ("WRITE", "from", "to")
        words = list(zip(source_indices.tolist(), target_indices.tolist(), strict=True))
        return {"room": self.room(), "words": words, "looks": self._rng.randrange(3)}

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        if handle["looks"]:
            handle["looks"] -= 1
            return "PROC"
        for source, target in handle["words"][:8]:
            if self.owner.get(target % NUM_SLOTS) != handle["room"]:
                self.stray.append((handle["room"], target))
            self.target[target] = self.source[source]
            self.num_words += 1
        del handle["words"][:8]
        return "PROC" if handle["words"] else "DONE"

    def check_remote_metadata(self, name):
        return True


def make_manager(agent, *, item_bytes=PAGE_LAYER_BYTES // 2):
    """A prefill server's manager behind its construction, without sockets."""
    made = by_nixl.NixlHandOver.__new__(by_nixl.NixlHandOver)
    made.prepare()
    made.prepare_advances()
    made.failure_lock = threading.Lock()
    made.request_status, made.transfer_infos, made.failure_records = {}, {}, {}
    made.req_to_decode_prefix_len, made._deferred_ack_targets = {}, {}
    made._deferred_ack_poisoned_rooms, made._staging_outstanding = set(), defaultdict(int)
    made.deferred_bootstrap = made._staging_ctx = made._dcp_pack_buffers = None
    made.disaggregation_mode, made.enable_staging = DisaggregationMode.PREFILL, False
    made.enable_deferred_decode_kv_release, made.defer_decode_allocation = True, False
    made.enable_all_cp_ranks_for_transfer, made.is_dummy_cp_rank, made.reports_transfer_latency = False, False, False
    made.pp_size = made.kv_shard_size = made.attn_tp_size = 1
    made.is_mla_backend = made.is_hybrid_mla_backend = False
    made.kv_args = SimpleNamespace(
        kv_layer_ids=[], kv_data_ptrs=[1] * NUM_REGIONS, kv_item_lens=[item_bytes] * NUM_REGIONS, num_draft_entries=0
    )
    made.src_mem_kind, made.agent, made._num_slots_src = "DRAM", agent, NUM_SLOTS
    made.prep_handles = {"": "from", AGENT: "to"}
    made.decode_kv_args_table = {
        AGENT: SimpleNamespace(
            decode_tp_size=1, requires_dcp_relayout=False, kv_xfer_segments=None, dst_homogeneous_mem_kind="DRAM",
            dst_kv_ptrs=[1] * NUM_REGIONS, gpu_id=0, dst_num_slots=NUM_SLOTS, dst_aux_ptrs=[],
            staging_base_ptr=0, staging_total_size=0, endpoint=ENDPOINT[0], dst_port=ENDPOINT[1],
        )
    }  # fmt: skip
    made.transfer_queues = [Ending()]
    made.send_aux = lambda *_: {"room": agent.room(), "words": [], "looks": 0}
    agent.room = lambda: made._at.chunk.room
    return made


class DecodeSide:
    """Pages of rooms, as SGLang's decode server has them: those of a failed room stay in use until the prefill server
    has acknowledged that nothing is under way to them."""

    def __init__(self, manager, agent):
        self._manager, self._agent = manager, agent
        self._free = list(range(1, NUM_SLOTS))
        self._pages = {}
        self.over = {}
        """Room -> how it ended; set when its pages are free again."""
        self.num_free = len(self._free)
        self._lock = threading.Lock()
        manager.send_kv_status_message = self._told
        manager._send_abort_ack = lambda room, target: self._acknowledged(room)

    def asks(self, room, num_pages):
        """Take pages and say so."""
        with self._lock:
            pages = [self._free.pop(0) for _ in range(num_pages)]
            self._pages[room] = pages
            self._agent.owner.update(dict.fromkeys(pages, room))
        info = SimpleNamespace(
            room=room, agent_name=AGENT, endpoint=ENDPOINT[0], dst_port=ENDPOINT[1], is_dummy=False,
            dst_kv_indices=np.array(pages, dtype=np.int32), dst_aux_index=0, decode_prefix_len=0,
        )  # fmt: skip
        self._manager.transfer_infos[room] = {AGENT: info}
        self._manager.update_status(room, KVPoll.WaitingForInput)

    def aborts(self, room):
        """Tell the prefill server, as a client that leaves makes it."""
        notice = AbortNotification(room=room, decode_ip=ENDPOINT[0], decode_port=ENDPOINT[1], generation=1)
        self._manager._handle_abort_notification(notice.to_zmq())

    def words(self, room):
        """What has come, by region and page."""
        return self._agent.target.reshape(NUM_REGIONS, NUM_SLOTS)[:, self._pages[room]]

    def release(self, room, how):
        with self._lock:
            for page in self._pages.pop(room):
                del self._agent.owner[page]
                self._free.append(page)
            self.over[room] = how

    @property
    def num_locked(self):
        return self.num_free - len(self._free)

    def _told(self, *, targets, bootstrap_room, status, failure_reason=None):
        if status == KVPoll.Failed and targets and bootstrap_room in self._pages:
            self.aborts(bootstrap_room)

    def _acknowledged(self, room):
        if room in self._pages:
            self.release(room, "failed")
