# SPDX-License-Identifier: Apache-2.0
"""SGLang's NIXL hand-over, with seven differences: pools in DRAM are registered as such, whoever waits is told,
replicas are found, foreign messages stop nothing (``control_port``) and do not arrive where there is a secret
(``sealed``), on a CPU nobody spins, and there layers leave when they are complete (``layerwise``).

SGLang's sender tells nobody that it was aborted: the decode server waits for 300 s. Here it tells the decode server at
once; one that has not asked yet is told when it asks.

NIXL's progress thread polls without a pause, for network cards that nothing else would wake. On a CPU it takes the
cores that compute, also while the server is idle. Here it waits for an event between its polls.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver, NixlKVSender

from banyan.features.pairs.rank.control_port import MAX_PEERS, ScreenedSocket, is_foreign, room_of
from banyan.features.pairs.rank.layerwise import LayerwiseSender
from banyan.features.pairs.rank.sealed import receiver_context, sealing_what_listens
from banyan.features.pairs.rank.taking_back import TakingReceiver
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.reporting import report

logger = logging.getLogger("banyan")

MAX_GIVEN_UP = 4096
"""Rooms remembered: of requests whose decode server has not asked yet, which takes it milliseconds."""

PROGRESS_PAUSE_US = 1000
"""The longest wait of NIXL's progress thread; what UCX can announce ends it at once."""

GIVEN_UP = "the prefill server has given this request up"


@contextmanager
def pausing_progress() -> Iterator[None]:
    """NIXL agents that are made in here pause between their polls. Its Python class has no argument for that, and sets
    the pause to zero; the native one that it makes is the next place to say it."""
    from nixl._api import nixl_agent

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    native = bindings.nixlAgent

    def make(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_PAUSE_US
        return native(name, config)

    bindings.nixlAgent = make
    try:
        yield
    finally:
        bindings.nixlAgent = native


def rank_to_name(manager: Any) -> int:
    """The rank that a prefill server names for a room. Decode servers find a replica (``--dp``) under its own number;
    SGLang names the attention rank, which is 0 in every replica, so that all but the first would wait for ever."""
    return int(manager.system_dp_rank if manager.system_dp_size > 1 else manager.attn_dp_rank)


class BanyanNixl(LayerwiseSender, NixlKVManager):
    """States of a room given up: told at once, or remembered until its decode server asks -> told."""

    _has_refused = False

    def __init__(self, args: Any, *more: Any, **named: Any) -> None:
        # The threads start in here.
        self.prepare_advances()
        self._given_up: dict[int, None] = {}
        self._given_up_lock = threading.Lock()
        with sealing_what_listens():
            if runtime.is_on_gpu():
                super().__init__(args, *more, **named)
            else:
                args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
                with pausing_progress():
                    super().__init__(args, *more, **named)
        self.attn_dp_rank = rank_to_name(self)

    def add_transfer_request(self, bootstrap_room: int, kv_indices: Any, *more: Any, **named: Any) -> Any:
        """SGLang queues here what a request has to send: its pages, or those of a chunk."""
        if bootstrap_room in self.transfer_infos:
            report.handed_over(len(kv_indices))
        return super().add_transfer_request(bootstrap_room, kv_indices, *more, **named)

    def _start_bootstrap_thread(self) -> None:
        self.server_socket: Any = ScreenedSocket(self.server_socket, self._is_foreign, report.foreign)
        super()._start_bootstrap_thread()

    def _is_foreign(self, message: Sequence[bytes]) -> bool:
        """Whether SGLang is not to see it. The thread of the control port."""
        if is_foreign(message, stages=self.enable_staging):
            return True
        room = room_of(message)
        if room is not None:
            if len(self.transfer_infos.get(room, ())) >= MAX_PEERS:
                return True
            for forgotten in self.rooms.asked(room):
                self._forget_room(forgotten)
        return False

    def _forget_room(self, room: int) -> None:
        """No request has come to it."""
        for table in (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len, self.failure_records):
            table.pop(room, None)

    def _add_remote_peer(self, decode_kv_args: Any) -> None:
        """Take a decode server in. One that does not fit is refused, and does not end the thread that serves all."""
        is_new = decode_kv_args.agent_name not in self.decode_kv_args_table
        if is_new and len(self.decode_kv_args_table) >= MAX_PEERS:
            if not self._has_refused:
                self._has_refused = True
                logger.error(
                    "banyan: %d ranks of decode servers have said where their pools lie: the one at %s is not taken "
                    "in, nor are later ones. Restart this server; without --banyan-secret-file anybody can say so",
                    MAX_PEERS,
                    decode_kv_args.endpoint,
                )
            return
        try:
            super()._add_remote_peer(decode_kv_args)
        except Exception:
            self.decode_kv_args_table.pop(decode_kv_args.agent_name, None)
            logger.exception("banyan: the decode server at %s does not fit: not taken in", decode_kv_args.endpoint)

    def _await_handles(self, handles: Any, *, failure_seen: bool) -> Any:
        if not failure_seen and not runtime.is_on_gpu():
            self.settle(handles)
        return super()._await_handles(handles, failure_seen=failure_seen)

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
    """One request's sender; an abort reaches the other side. ``advanced_tokens``: up to where of its prompt advances
    have begun."""

    advanced_tokens = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.kv_mgr.rooms.claim(self.bootstrap_room)

    def clear(self) -> None:
        super().clear()
        self.kv_mgr.rooms.release(self.bootstrap_room)
        self.kv_mgr.forget_advances(self.bootstrap_room)

    def abort(self) -> None:
        has_sent = KVPoll.Success in (self.conclude_state, self.kv_mgr.request_status.get(self.bootstrap_room))
        super().abort()
        self.kv_mgr.rooms.release(self.bootstrap_room)
        self.kv_mgr.forget_advances(self.bootstrap_room)
        if not has_sent:
            self.kv_mgr.give_up(self.bootstrap_room)


class BanyanKVReceiver(TakingReceiver, NixlKVReceiver):
    """What a decode server's requests receive with."""


@functools.cache
def receiver_class() -> type[BanyanKVReceiver]:
    """The receiver, whose sockets speak to who knows the secret where this server has one. Asked for with each
    request."""
    context = receiver_context()
    if context is None:
        return BanyanKVReceiver
    # Tables of its own, too: SGLang's keep sockets of SGLang's context.
    context.set(zmq.MAX_SOCKETS, NixlKVReceiver._ctx.get(zmq.MAX_SOCKETS))
    return type("SealedKVReceiver", (BanyanKVReceiver,), {"_ctx": context, "_socket_cache": {}, "_socket_locks": {}})
