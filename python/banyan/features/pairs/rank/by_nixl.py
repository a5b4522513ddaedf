# SPDX-License-Identifier: Apache-2.0
"""SGLang's hand-over by NIXL, with what is different in all (``hand_over``), and: pools in DRAM are registered as such,
on a CPU nobody spins, and there layers leave when they are complete (``layerwise``).

NIXL's progress thread polls without a pause, for network cards that nothing else would wake. On a CPU it takes the
cores that compute, also while the server is idle. Here it waits for an event between its polls.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import (
    GUARD,
    KVArgsRegisterInfo,
    NixlKVManager,
    NixlKVReceiver,
    NixlKVSender,
    TransferInfo,
)
from sglang.srt.disaggregation.utils import KVClassType

from banyan.features.pairs.rank.control_port import MAX_NAME, MAX_PEERS, ControlMessages, is_room
from banyan.features.pairs.rank.hand_over import HandOver
from banyan.features.pairs.rank.layerwise import LayerwiseSender
from banyan.features.pairs.rank.prefill_servers import PrefillReceiver
from banyan.features.pairs.rank.sender import TellingSender
from banyan.features.pairs.rank.taking_back import TakingReceiver
from banyan.sglang_plugin import runtime
from banyan.transport.nixl.agent import pausing_progress

logger = logging.getLogger("banyan")

PROGRESS_PAUSE_US = 1000
"""The longest wait of NIXL's progress thread, on a CPU."""

STAYS_UNDER_WAY = "what the prefill server has sent does not arrive"


def _is_likely(said: KVArgsRegisterInfo | TransferInfo) -> bool:
    if len(said.agent_name) > MAX_NAME:
        return False
    if isinstance(said, TransferInfo):
        return is_room(said)
    return 0 < said.decode_tp_size <= MAX_PEERS and 0 <= said.decode_tp_rank < said.decode_tp_size


MESSAGES = ControlMessages((GUARD,), 7, KVArgsRegisterInfo.from_zmq, TransferInfo.from_zmq, _is_likely)


class NixlHandOver(HandOver, LayerwiseSender, NixlKVManager):
    """A rank's."""

    messages = MESSAGES

    def __init__(self, args: Any, *more: Any, **named: Any) -> None:
        # The threads start in here.
        self.prepare_advances()
        if runtime.is_on_gpu():
            super().__init__(args, *more, **named)
        else:
            args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
            with pausing_progress(PROGRESS_PAUSE_US):
                super().__init__(args, *more, **named)

    def _start_bootstrap_thread(self) -> None:
        self.screen()
        super()._start_bootstrap_thread()

    def _start_decode_listener_thread(self) -> None:
        self.screen_decode()
        super()._start_decode_listener_thread()

    def may_say(self, said: Any) -> bool:
        return not isinstance(said, TransferInfo) or said.is_dummy or said.agent_name in self.decode_kv_args_table

    def _add_remote_peer(self, decode_kv_args: Any) -> None:
        """Take a decode server in. One that does not fit is refused, and does not end the thread that serves all."""
        if not self.has_place(decode_kv_args.agent_name, decode_kv_args):
            return
        try:
            super()._add_remote_peer(decode_kv_args)
        except Exception:
            self.decode_kv_args_table.pop(decode_kv_args.agent_name, None)
            self.refuse(decode_kv_args)
            logger.exception("banyan: the decode server at %s does not fit: not taken in", decode_kv_args.endpoint)

    def _await_handles(self, handles: Any, *, failure_seen: bool) -> Any:
        if not failure_seen and not self.settle(handles):
            logger.error("banyan: a decode server has not taken in what was sent to it: that request fails")
            failure_seen = True
        settled, any_failed = super()._await_handles(handles, failure_seen=failure_seen)
        room = self._at.chunk.room
        is_untold = not settled and self.request_status.get(room) == KVPoll.Transferring
        if is_untold and self.enable_deferred_decode_kv_release:
            # SGLang leaves the decode server to its time-out, for the pages' sake. They stay out of use there until
            # it is said that nothing is under way to them, which is never said of these.
            self.conclude_failure(bootstrap_room=room, failure_reason=STAYS_UNDER_WAY)
        return settled, any_failed

    def over(self, room: int) -> None:
        super().over(room)
        self.forget_advances(room)


class NixlSender(TellingSender, NixlKVSender):
    """One request's. ``advanced_tokens``: up to where of its prompt advances have begun."""

    advanced_tokens = 0


class NixlReceiver(TakingReceiver, PrefillReceiver, NixlKVReceiver):
    """What a decode server's requests receive with."""


CLASSES: dict[KVClassType, type] = {
    KVClassType.MANAGER: NixlHandOver,
    KVClassType.SENDER: NixlSender,
    KVClassType.RECEIVER: NixlReceiver,
}
