# SPDX-License-Identifier: Apache-2.0
"""SGLang's hand-over by Mooncake, with what is different in all (``hand_over``). Chunks leave as SGLang sends them.

SGLang's threads end at a request of a decode server that has not said where its pool lies: that is foreign here. They
end at one whose pages are divided in a way that they do not know, and at one whose pool does not fit: here its requests
fail. On a CPU Mooncake is told to use TCP by ``MC_FORCE_TCP=1``; it finds out by itself what memory a pool lies in.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import (
    KVArgsRegisterInfo,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
    TransferInfo,
)
from sglang.srt.disaggregation.utils import KVClassType

from banyan.features.pairs.rank.control_port import MAX_NAME, MAX_PEERS, ControlMessages, is_room
from banyan.features.pairs.rank.hand_over import HandOver
from banyan.features.pairs.rank.prefill_servers import PrefillReceiver
from banyan.features.pairs.rank.sender import TellingSender
from banyan.features.pairs.rank.taking_back import TakingReceiver
from banyan.sglang_plugin import runtime

logger = logging.getLogger("banyan")

FAILED = -1
"""As SGLang's transfers end where Mooncake says no: the session counts as failed."""

SESSION = re.compile(r".+:[0-9]{1,5}")
"""SGLang takes the port from behind the last colon, on the scheduler's thread."""


def _is_likely(said: KVArgsRegisterInfo | TransferInfo) -> bool:
    if len(said.mooncake_session_id) > MAX_NAME or not SESSION.fullmatch(said.mooncake_session_id):
        return False
    if isinstance(said, TransferInfo):
        return is_room(said)
    return 0 < said.dst_attn_tp_size <= MAX_PEERS and 0 <= said.dst_tp_rank < MAX_PEERS


MESSAGES = ControlMessages((), 6, KVArgsRegisterInfo.from_zmq, TransferInfo.from_zmq, _is_likely)


def _or_failed(name: str) -> Callable[..., int]:
    """SGLang's method; ``FAILED`` where it raises: a decode server whose pool does not fit, one with fewer layers for
    example, fails its own requests, where in SGLang it ends the thread that sends to all."""

    def send(manager: Any, to: Any, *what: Any, **named: Any) -> int:
        try:
            said: int = getattr(super(MooncakeHandOver, manager), name)(to, *what, **named)
        except Exception:
            logger.exception("banyan: nothing can be sent to %s", getattr(to, "mooncake_session_id", to))
            return FAILED
        return said

    return send


class MooncakeHandOver(HandOver, MooncakeKVManager):
    """A rank's."""

    messages = MESSAGES

    def start_prefill_thread(self) -> None:
        self.screen()
        super().start_prefill_thread()

    def start_decode_thread(self) -> None:
        self.screen_decode()
        super().start_decode_thread()

    def check_status(self, bootstrap_room: int) -> Any:
        """A room may go while SGLang's worker looks it up, which ends it: nothing is to be sent there."""
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def may_say(self, said: Any) -> bool:
        if isinstance(said, TransferInfo):
            return said.is_dummy or said.mooncake_session_id in self.decode_kv_args_table
        try:
            return not self.requires_dcp_relayout(said.dst_dcp_size, said.dst_dcp_rank)
        except RuntimeError:
            return False

    send_kvcache = _or_failed("send_kvcache")
    send_kvcache_slice = _or_failed("send_kvcache_slice")
    send_kvcache_dcp = _or_failed("send_kvcache_dcp")
    maybe_send_extra = _or_failed("maybe_send_extra")
    send_aux = _or_failed("send_aux")

    def _publish_peer_registration(self, mooncake_session_id: str, decode_kv_args: Any) -> str | None:
        """Take a decode server in; else why not. One that does not fit does not end the thread that serves all."""
        if not self.has_place(mooncake_session_id, decode_kv_args):
            return "there is no place"
        return super()._publish_peer_registration(mooncake_session_id, decode_kv_args)


class MooncakeSender(TellingSender, MooncakeKVSender):
    """One request's."""

    @property
    def supports_host_tensor_indices(self) -> bool:
        """Whether page numbers come in pinned memory, behind a CUDA event."""
        return runtime.is_on_gpu()


class MooncakeReceiver(TakingReceiver, PrefillReceiver, MooncakeKVReceiver):
    """What a decode server's requests receive with."""


CLASSES: dict[KVClassType, type] = {
    KVClassType.MANAGER: MooncakeHandOver,
    KVClassType.SENDER: MooncakeSender,
    KVClassType.RECEIVER: MooncakeReceiver,
}
