# SPDX-License-Identifier: Apache-2.0
"""SGLang's NIXL hand-over, with two differences: pools in DRAM are registered as such, and whoever waits is told.

SGLang's sender tells nobody that it was aborted: the decode server waits for 300 s. Here it tells the decode server at
once; one that has not asked yet is told when it asks.
"""

from __future__ import annotations

import threading
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender

from banyan.sglang_plugin import runtime

MAX_GIVEN_UP = 4096
"""Rooms remembered: of requests whose decode server has not asked yet, which takes it milliseconds."""

GIVEN_UP = "the prefill server has given this request up"


class BanyanNixl(NixlKVManager):
    """States of a room given up: told at once, or remembered until its decode server asks -> told."""

    def __init__(self, args: Any, *more: Any, **named: Any) -> None:
        # The bootstrap thread starts in here.
        self._given_up: dict[int, None] = {}
        self._given_up_lock = threading.Lock()
        if not runtime.is_on_gpu():
            args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        super().__init__(args, *more, **named)

    def give_up(self, room: int) -> None:
        """Nothing more is sent in this room; its decode server learns it now, or when it asks."""
        with self._given_up_lock:
            has_asked = bool(self.transfer_infos.get(room))
            if not has_asked:
                self._given_up[room] = None
                while len(self._given_up) > MAX_GIVEN_UP:
                    del self._given_up[next(iter(self._given_up))]
        self.conclude_failure(bootstrap_room=room, failure_reason=GIVEN_UP)

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        """SGLang says here that a decode server has asked for this room."""
        if status == KVPoll.WaitingForInput and self._is_given_up(bootstrap_room):
            self.request_status.setdefault(bootstrap_room, KVPoll.Failed)
            self.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=GIVEN_UP)
            for table in (self.request_status, self.transfer_infos, self.failure_records):
                table.pop(bootstrap_room, None)
            return
        super().update_status(bootstrap_room, status)

    def _is_given_up(self, room: int) -> bool:
        with self._given_up_lock:
            return self._given_up.pop(room, self) is None


class BanyanKVSender(NixlKVSender):
    """One request's sender; an abort reaches the other side."""

    def abort(self) -> None:
        has_sent = KVPoll.Success in (self.conclude_state, self.kv_mgr.request_status.get(self.bootstrap_room))
        super().abort()
        if not has_sent:
            self.kv_mgr.give_up(self.bootstrap_room)
