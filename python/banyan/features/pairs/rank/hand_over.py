# SPDX-License-Identifier: Apache-2.0
"""What is different in a hand-over, whichever engine carries it: whoever waits is told, replicas are found, other
weights are seen, foreign messages stop nothing (``control_port``) and do not arrive where there is a secret
(``sealed``).

SGLang's sender tells nobody that it was aborted: the decode server waits for 300 s. Here it tells the decode server at
once; one that has not asked yet is told when it asks.

A decode server keeps what it is sent under the name of its own weights, and finds it again by that; other servers may,
too. So it names them, with adapters and flags, where it asks for a room, and the room fails where the prefill server
has others then, or changes them before all is sent. From then on the decode server keeps nothing, names nothing, and is
served.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import ABORT_TAG, AbortNotification, AckTarget, CommonKVReceiver

from banyan.features.pairs.asked_rooms import AskedRooms
from banyan.features.pairs.message_threads import MessageThreads
from banyan.features.pairs.rank import at_rank
from banyan.features.pairs.rank.control_port import (
    DEFERRED_TAGS,
    MAX_PEERS,
    STAGING_NUMBERS,
    ControlMessages,
    ScreenedSocket,
    is_of_staging,
)
from banyan.features.pairs.rank.prefill_messages import is_of_prefill_server
from banyan.features.pairs.rank.prefill_servers import PrefillTable
from banyan.features.pairs.rank.sealed import guarding_what_listens, receiver_context
from banyan.features.pairs.roles import OTHER_WEIGHTS
from banyan.features.pairs.unanswered import Unanswered
from banyan.latest import Latest
from banyan.sglang_plugin.rank.reporting import report

logger = logging.getLogger("banyan")

MAX_GIVEN_UP = 4096
"""Rooms remembered: of requests whose decode server has not asked yet, which takes it milliseconds."""

MAX_COMPARED = 4096
"""Rooms remembered: of requests that a prefill server may still answer."""

OF_WEIGHTS = b"banyan weights "
"""Begins the last frame of a decode server's message where its pages have a name: one more than SGLang reads."""

NEVER = -1
"""No number of changes of the weights: the decode server's are others."""

HEEDED_S = 1.0
"""A message takes a millisecond."""

GIVEN_UP = "the prefill server has given this request up"
NOT_TAKEN_IN = "the prefill server has not taken this decode server in, whose pool does not fit"


def rank_to_name(manager: Any) -> int:
    """The rank that a prefill server names for a room. Decode servers find a replica (``--dp``) under its own number;
    SGLang names the attention rank, which is 0 in every replica, so that all but the first would wait for ever."""
    return int(manager.system_dp_rank if manager.system_dp_size > 1 else manager.attn_dp_rank)


class HandOver(PrefillTable):
    """In front of SGLang's manager of an engine. States of a room given up: told at once, or remembered until its
    decode server asks -> told."""

    messages: ControlMessages
    _has_refused = False
    kv_status_msg_carries_reason = True
    """Also where SGLang's engine tells none: its decode servers read one."""

    def __init__(self, *args: Any, **named: Any) -> None:
        # The threads start in here.
        self.prepare()
        with guarding_what_listens():
            super().__init__(*args, **named)
        self.attn_dp_rank = rank_to_name(self)

    def prepare(self) -> None:
        """What the threads need."""
        self.rooms = AskedRooms(time.monotonic)
        self._given_up: Latest[int, None] = Latest(MAX_GIVEN_UP)
        self._given_up_lock = threading.Lock()
        self._heeding = threading.RLock()
        """Held while SGLang's thread heeds a message of a room. Whoever holds it waits for nothing but locks that are
        held for a moment; none of these is held where it is taken."""
        self._refused: set[tuple[str, int]] = set()
        """Addresses of decode servers' ranks that were not taken in."""
        self._epochs: dict[int, int] = {}
        """Of rooms whose decode server has named its weights: how often this one's had changed when they were these."""
        self._compared: Latest[int, None] = Latest(MAX_COMPARED)
        """Rooms that this decode server has asked for with the name of its weights."""
        self._message_threads = MessageThreads()
        self.unanswered = Unanswered(time.monotonic)
        self.first_rows = {}

    def add_transfer_request(self, bootstrap_room: int, kv_indices: Any, *more: Any, **named: Any) -> Any:
        """SGLang queues here what a request has to send: its pages, or those of a chunk."""
        manager: Any = self
        now = at_rank.weights_epoch()
        if self._epochs.get(bootstrap_room, now) != now:
            manager.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=OTHER_WEIGHTS)
            return None
        if bootstrap_room in manager.transfer_infos:
            report.counters().handed_over_pages += len(kv_indices)
        return super().add_transfer_request(bootstrap_room, kv_indices, *more, **named)  # type: ignore[misc]

    def build_receiver_metadata_message(self, **asked: Any) -> list[bytes]:
        """What a decode server asks for a room with."""
        frames: list[bytes] = super().build_receiver_metadata_message(**asked)  # type: ignore[misc]
        name = at_rank.weights_name()
        if not name:
            return frames
        self._compared.put(asked["bootstrap_room"], None)
        return [*frames, OF_WEIGHTS + name.encode()]

    def apply_prefill_status(self, *, bootstrap_room: int, failure_reason: str | None = None, **said: Any) -> None:
        """A decode server hears here why a room has failed; of one that is over, too: where this rank's other shards
        have heard it before, SGLang has cleared the room."""
        if failure_reason == OTHER_WEIGHTS and bootstrap_room in self._compared:
            at_rank.keep_nothing(OTHER_WEIGHTS)
        super().apply_prefill_status(bootstrap_room=bootstrap_room, failure_reason=failure_reason, **said)  # type: ignore[misc]

    # ---- the thread of the control port ------------------------------------------------------------------------

    def screen(self) -> None:
        """To be called before SGLang's thread of a prefill server takes the socket."""
        self.server_socket: Any = ScreenedSocket(self.server_socket, self._is_foreign, self._while_heeded)

    def screen_decode(self) -> None:
        """The same on a decode server."""
        self.server_socket = ScreenedSocket(self.server_socket, lambda said: not is_of_prefill_server(said, self))

    def _while_heeded(self, message: Sequence[bytes]) -> AbstractContextManager[Any]:
        """A registration takes long, and is of no room."""
        return nullcontext() if self.messages.is_registration(message) else self._heeding

    @contextmanager
    def unheeded(self) -> Iterator[None]:
        """While SGLang's thread heeds no message: it looks into the tables of rooms again and again, and ends where one
        has gone in between. Nobody waits long for a thread that has ended."""
        is_held = self._heeding.acquire(timeout=HEEDED_S)
        try:
            yield
        finally:
            if is_held:
                self._heeding.release()

    def _is_foreign(self, message: Sequence[bytes]) -> bool:
        """Whether SGLang is not to see it."""
        manager: Any = self
        if message[0] == ABORT_TAG:
            return not self._can_be_answered(message)
        if manager.enable_staging and message[0] in STAGING_NUMBERS:
            return not is_of_staging(message, manager.decode_kv_args_table)
        if manager.deferred_bootstrap is not None and message[0] in DEFERRED_TAGS:
            return False
        said = self.messages.read(message)
        if said is None:
            return True
        is_fit = self.may_say(said)
        if self.messages.is_registration(message):
            if not is_fit:
                self.refuse(said)
            return not is_fit
        if not is_fit and _address(said) not in self._refused:
            return True
        num_bytes = self.messages.num_bytes(message)
        if self.is_asked_for(said.room) or not self.rooms.may_ask(said.room, num_bytes):
            return True
        if message[-1].startswith(OF_WEIGHTS):
            self._note_weights(said.room, message[-1].removeprefix(OF_WEIGHTS))
        for forgotten in self.rooms.asked(said.room, num_bytes):
            self._forget_room(forgotten)
        if not is_fit:
            self._turn_away(said)
        return not is_fit

    def _turn_away(self, said: Any) -> None:
        """Its room fails: there, and here now or when its request comes."""
        manager: Any = self
        manager.request_status.setdefault(said.room, KVPoll.Failed)
        manager.conclude_failure(bootstrap_room=said.room, failure_reason=NOT_TAKEN_IN, targets=[_address(said)])

    def _note_weights(self, room: int, name: bytes) -> None:
        """Each shard of a decode server names them: the first change since any of them did counts."""
        # Before the name: that may be another one by then.
        epoch = at_rank.weights_epoch()
        if at_rank.has_other_weights(name.decode(errors="replace")):
            epoch = NEVER
        self._epochs[room] = min(epoch, self._epochs.get(room, epoch))

    def _can_be_answered(self, abort: Sequence[bytes]) -> bool:
        """Whether it names no address, or that of a decode server, which else keeps pages for 300 s: SGLang opens a
        socket to any other, too, and stands still behind one that nobody reads."""
        said = AbortNotification.from_zmq(list(abort))
        if said is None or said.decode_ip is None:
            return said is not None
        peers = list(self.decode_kv_args_table.values())  # type: ignore[attr-defined]
        return (said.decode_ip, said.decode_port) in self._refused.union(map(_address, peers))

    def may_say(self, said: Any) -> bool:
        """Whether the engine's threads go on when they have read it."""
        return True

    def _forget_room(self, room: int) -> None:
        """No request has come to it, or none is there any more."""
        manager: Any = self
        tables = (manager.request_status, manager.transfer_infos, manager.req_to_decode_prefix_len)
        with self.unheeded():
            for table in (*tables, manager.failure_records, self._epochs):
                table.pop(room, None)

    def has_place(self, name: str, peer: Any) -> bool:
        """Whether one more rank of a decode server is taken in. The first that is not is told of in the log."""
        known = self.decode_kv_args_table  # type: ignore[attr-defined]
        if name in known or len(known) < MAX_PEERS:
            return True
        self.refuse(peer)
        if not self._has_refused:
            self._has_refused = True
            logger.error(
                "banyan: %d ranks of decode servers have said where their pools lie: the one at %s is not taken "
                "in, nor are later ones. Restart this server; without --banyan-secret-file anybody can say so",
                MAX_PEERS,
                peer.endpoint,
            )
        return False

    def refuse(self, peer: Any) -> None:
        """A rank of a decode server is not taken in: what it asks for fails. Of no more than have a place is that
        known, since each is told by a socket of its own."""
        if len(self._refused) < MAX_PEERS:
            self._refused.add(_address(peer))

    def is_asked_for(self, room: int) -> bool:
        """Whether by all whom the first of them has announced. SGLang's other threads go through them from then on, and
        end at one more."""
        infos = list(self.transfer_infos.get(room, {}).values())  # type: ignore[attr-defined]
        return 0 < len(infos) >= infos[0].required_dst_info_num

    # ---- rooms that are over ------------------------------------------------------------------------------------

    def over(self, room: int) -> None:
        """Its request has ended here."""
        self.rooms.release(room)
        self._epochs.pop(room, None)

    def give_up(self, room: int) -> None:
        """Nothing more is sent in this room; its decode server learns it now, or when it asks."""
        manager: Any = self
        with self._given_up_lock:
            if manager.transfer_infos.get(room):
                # A room without a sender that only a part has asked for has none yet, and SGLang would tell nobody.
                manager.request_status.setdefault(room, KVPoll.Failed)
            else:
                self._given_up.put(room, None)
        manager.conclude_failure(bootstrap_room=room, failure_reason=GIVEN_UP)
        for forgotten in self.rooms.left(room):
            self._forget_room(forgotten)

    def send_kv_status_message(self, *, targets: Sequence[tuple[str, int]], status: Any, **said: Any) -> None:
        """SGLang tells decode servers here. Of failures threads of their own tell: the scheduler itself meets them, and
        behind a decode server that reads nothing a message waits for 30 s."""
        tell = functools.partial(super().send_kv_status_message, status=status, **said)  # type: ignore[misc]
        if status != KVPoll.Failed:
            tell(targets=targets)
            return
        for target in targets:
            self._message_threads.tell(target, functools.partial(tell, targets=[target]))

    def _send_abort_ack(self, room: int, target: AckTarget) -> None:
        """SGLang acknowledges an abort here, on the thread of the control port too, which hears all decode servers."""
        send = functools.partial(super()._send_abort_ack, room, target)  # type: ignore[misc]
        self._message_threads.tell((target.ip, target.port), send)

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        """SGLang says here that a decode server has asked for this room."""
        manager: Any = self
        has_others = self._epochs.get(bootstrap_room) == NEVER
        if status == KVPoll.WaitingForInput and self.take_given_up(bootstrap_room):
            manager.request_status.setdefault(bootstrap_room, KVPoll.Failed)
            # Another shard may have given it up for the weights; each of the decode server's has to hear why.
            why = OTHER_WEIGHTS if has_others else GIVEN_UP
            manager.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=why)
            self._forget_room(bootstrap_room)
            return
        super().update_status(bootstrap_room, status)  # type: ignore[misc]
        if status == KVPoll.WaitingForInput and has_others:
            manager.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=OTHER_WEIGHTS)

    def take_given_up(self, room: int) -> bool:
        """Whether its request was given up before its decode server had asked; from now on it counts as any other."""
        with self._given_up_lock:
            return self._given_up.pop(room, self) is None


def _address(said: Any) -> tuple[str, int]:
    """Where a decode server's rank that says so is told."""
    return said.endpoint, said.dst_port


@functools.cache
def receiver_class(receiver: type[CommonKVReceiver]) -> type[CommonKVReceiver]:
    """The engine's, whose sockets speak to who knows the secret where this server has one. Asked for with each
    request."""
    context = receiver_context()
    if context is None:
        return receiver
    # SGLang's tables, though: it looks there for the sockets of a prefill server that has gone.
    context.set(zmq.MAX_SOCKETS, receiver._ctx.get(zmq.MAX_SOCKETS))
    return type("SealedKVReceiver", (receiver,), {"_ctx": context})
